"""Run steps: check items against sessions, pack their spans, verify, commit by length. No gRPC.

One bad item fails alone, with its session as it was before; the others of the step go on. So does
one whose logits are not finite. A fault of the device, or a broken law, fails the engine for good.
"""

from __future__ import annotations

from collections.abc import Sequence

from graph_runtime.projection import RowProjection
from graph_runtime.slots import SlotTable
from graph_runtime.target import Span, Target
from splitspec.errors import (
    CommittedLengthMismatch,
    ContextFull,
    Draining,
    EngineFailed,
    InvalidArgument,
    SplitspecError,
    UserError,
)
from splitspec.v1 import rows_pb2
from verifier_service.committed_rows import CommittedRows
from verifier_service.packing import Pack, Work
from verifier_service.sessions import Session, StreamSessions
from verifier_service.steps import (
    EngineModel,
    ForkItem,
    Item,
    ItemResult,
    ModelItem,
    OpenItem,
    PrefillItem,
    RefusedItem,
    ReleaseItem,
    StepResult,
    VerifyItem,
)


class Engine:
    """One target and the sessions of every stream. Used by one thread."""

    def __init__(
        self, target: Target, *, max_draft_count: int, fusion: RowProjection | None = None
    ) -> None:
        self._rows = CommittedRows(target.info, fusion)
        self._target = target
        self._info = target.info
        self._slots = SlotTable(self._info.slot_count)
        self._max_draft_count = max_draft_count
        self.failure: EngineFailed | None = None

    @property
    def model(self) -> EngineModel:
        """Return what is served."""
        info = self._info
        return EngineModel(
            model_id=info.model_id,
            model_hash=info.model_hash,
            tokenizer_hash=info.tokenizer_hash,
            vocab_size=info.vocab_size,
            tap_layers=info.tap_layers,
            row_formats=tuple(self._rows.formats.values()),
            fused_model_hash=self._rows.fused_model_hash,
            max_draft_count=self._max_draft_count,
            min_prefill_chunk=info.min_prefill_chunk,
            max_prefill_chunk=info.max_prefill_chunk,
            max_context_length=info.max_context_length,
            slot_count=info.slot_count,
            precision=info.precision,
            runtime=info.runtime,
        )

    @property
    def used_slot_count(self) -> int:
        """Return how many slots are held."""
        return self._slots.used_count

    def warm_up(self) -> None:
        """Run the widest window and a chunk once, so that no session pays for first-time work.

        Raises:
            UserError: the target's logits are not finite: it can serve nobody.
        """
        info = self._info
        widths = (info.max_prefill_chunk, self._max_draft_count + 1)
        for width in sorted({max(1, min(w, info.max_context_length)) for w in widths}):
            (output,) = self._target.step([_warm_span(width)])
            if not output.logits.isfinite().all():
                raise UserError(
                    f"model {info.model_id} gives logits that are not finite: its weights are "
                    f"broken, or overflow at {info.precision}"
                )
            assert output.rows is not None
            self._rows.warm_up(output.rows)

    def run_step(
        self, stream: StreamSessions, items: Sequence[Item], *, draining: bool = False
    ) -> StepResult:
        """Run `items` in order; model items share one pass, unless a release must come between.

        Raises:
            EngineFailed: the device failed, now or before. No session survives it.
        """
        if self.failure is not None:
            raise self.failure
        pack = Pack()
        try:
            results = [self._run_item(stream, item, pack, draining) for item in items]
            self._flush(pack)
        except Exception as error:
            self.failure = _to_failure(error)
            raise self.failure from error
        for result in pack.failed:
            result.committed_length = stream.committed_length(result.session_id)
        return StepResult(
            results=results,
            device_ns=pack.device_ns,
            copy_ns=pack.copy_ns,
            pass_count=pack.pass_count,
            row_bytes=pack.row_bytes,
        )

    def release_all(self, stream: StreamSessions) -> None:
        """Free every slot of a stream that has ended (law L7)."""
        for session in stream.remove_all():
            self._slots.give_back(session.slot)

    def _run_item(
        self, stream: StreamSessions, item: Item, pack: Pack, draining: bool
    ) -> ItemResult:
        result = ItemResult(session_id=item.session_id)
        try:
            match item:
                case PrefillItem() | VerifyItem():
                    self._pack(stream, item, pack, result)
                case OpenItem() | ForkItem():
                    if draining:
                        raise Draining("the service is shutting down and opens no session")
                    result.committed_length = self._open(stream, item, pack)
                case ReleaseItem():
                    session = stream.get(item.session_id)
                    self._flush_before(session, pack)
                    stream.remove(item.session_id)
                    self._slots.give_back(session.slot)
                case RefusedItem():
                    raise item.error
        except EngineFailed:
            raise
        except SplitspecError as error:
            result.error = error
            pack.failed.append(result)
        return result

    def _open(self, stream: StreamSessions, item: OpenItem | ForkItem, pack: Pack) -> int:
        """Take a slot, copy a fork's prefix into it, and return the committed length."""
        stream.check_new(item.session_id)
        row_format = self._rows.formats.get(item.row_kind)
        if row_format is None:
            offered = " or ".join(rows_pb2.RowKind.Name(f.kind) for f in self.model.row_formats)
            raise InvalidArgument.of("open.row_kind", item.row_kind, offered)
        length = 0
        source: Session | None = None
        if isinstance(item, ForkItem):
            source, length = stream.get(item.source_session_id), item.length
            self._flush_before(source, pack)
            if length > source.committed_length:
                raise InvalidArgument.of(
                    "fork.length", length, f"0..{source.committed_length}, the source's length"
                )
        session = Session(
            slot=self._slots.take(),
            sampling=item.sampling,
            row_format=row_format,
            committed_length=length,
        )
        if source is not None and length:
            self._target.copy_prefix(source.slot, session.slot, length)
        stream.add(item.session_id, session)
        return length

    def _pack(
        self, stream: StreamSessions, item: ModelItem, pack: Pack, result: ItemResult
    ) -> None:
        """Check a model item and let it wait for the step's pass."""
        session = stream.get(item.session_id)
        if item.session_id in pack.modelled:
            raise InvalidArgument.of(
                "items", f"two model items of session {item.session_id}", "one a step"
            )
        if item.committed_length != session.committed_length:
            raise CommittedLengthMismatch(
                f"committed_length is {item.committed_length}; this verifier holds "
                f"{session.committed_length} of session {item.session_id}",
                value=item.committed_length,
                expected=session.committed_length,
            )
        span = self._span(item, session)
        end, limit = span.start + len(span.token_ids), self._info.max_context_length
        if end > limit:
            raise ContextFull(
                f"the item ends at position {end}; this verifier holds {limit}",
                value=end,
                expected=limit,
            )
        pack.modelled.add(item.session_id)
        pack.works.append(Work(item, session, result, span))

    def _span(self, item: ModelItem, session: Session) -> Span:
        """Return the span of a model item, its bounds and token ids checked."""
        info = self._info
        if isinstance(item, VerifyItem):
            if len(item.draft_token_ids) > self._max_draft_count:
                raise InvalidArgument.of(
                    "verify.draft_token_ids count",
                    len(item.draft_token_ids),
                    f"0..{self._max_draft_count}",
                )
            self._check_ids("verify.pending_token_id", [item.pending_token_id])
            self._check_ids("verify.draft_token_ids", item.draft_token_ids)
            token_ids = [item.pending_token_id, *item.draft_token_ids]
            logits_count = len(token_ids)
        else:
            count = len(item.token_ids)
            if not info.min_prefill_chunk <= count <= info.max_prefill_chunk:
                raise InvalidArgument.of(
                    "prefill.token_ids count",
                    count,
                    f"{info.min_prefill_chunk}..{info.max_prefill_chunk}",
                )
            self._check_ids("prefill.token_ids", item.token_ids)
            token_ids = list(item.token_ids)
            logits_count = int(item.final)
        return Span(
            slot=session.slot,
            start=session.committed_length,
            token_ids=token_ids,
            logits_count=logits_count,
            wants_rows=session.row_format.kind != rows_pb2.ROW_KIND_NONE,
        )

    def _check_ids(self, field_name: str, token_ids: Sequence[int]) -> None:
        vocab_size = self._info.vocab_size
        if token_ids and max(token_ids) >= vocab_size:
            first = next(token_id for token_id in token_ids if token_id >= vocab_size)
            raise InvalidArgument.of(field_name, first, f"ids in [0, {vocab_size})")

    def _flush_before(self, session: Session, pack: Pack) -> None:
        """Run what waits if `session` is part of it: its length or slot is about to be used."""
        if any(work.session is session for work in pack.works):
            self._flush(pack)

    def _flush(self, pack: Pack) -> None:
        """Run what waits."""
        if pack.works:
            pack.run(self._target, self._rows)


def _to_failure(error: Exception) -> EngineFailed:
    if isinstance(error, EngineFailed):
        return error
    return EngineFailed(f"{type(error).__name__}: {error}"[:500])


def _warm_span(width: int) -> Span:
    return Span(slot=0, start=0, token_ids=[0] * width, logits_count=1, wants_rows=True)
