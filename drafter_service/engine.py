"""Run steps: check items against sessions, pack their works, advance context lengths. No gRPC.

One bad item fails alone, with its session as it was before; the others of the step go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

from drafter_service.drafter import Drafter, DrafterInfo, DraftWork, SessionParameters
from drafter_service.sessions import Session, StreamSessions
from graph_runtime.slots import SlotTable
from splitspec.errors import (
    CommittedLengthMismatch,
    ContextFull,
    InvalidArgument,
    SplitspecError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenItem:
    """Take a slot."""

    session_id: int
    parameters: SessionParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftItem:
    """Extend the context, then draft; fields as in `DraftWork`."""

    session_id: int
    context_length: int
    token_ids: Sequence[int]
    rows: bytes | None
    pending_token_id: int | None
    draft_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseItem:
    """Give the slot back, whatever lengths the peers believe: they end with the session."""

    session_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedItem:
    """An item that could not be decoded."""

    session_id: int
    error: SplitspecError


Item = OpenItem | DraftItem | ReleaseItem | RefusedItem


@dataclass(slots=True, kw_only=True)
class ItemResult:
    """What happened to one item."""

    session_id: int
    context_length: int = 0
    """After the item; after an error, as it was before."""
    draft_token_ids: list[int] | None = None
    """None for anything but a draft item that succeeded."""
    error: SplitspecError | None = None


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Results in the order of the items, and the time and passes that the drafter took."""

    results: list[ItemResult]
    device_ns: int
    pass_count: int


@dataclass(slots=True)
class _Pack:
    """The draft items of a step that wait to share a pass."""

    works: list[DraftWork] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    results: list[ItemResult] = field(default_factory=list)
    drafted: set[int] = field(default_factory=set)
    """Sessions that have had their draft item in this step, run or not."""
    device_ns: int = 0
    pass_count: int = 0


class Engine:
    """One drafter and the sessions of every stream. Used by one thread."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._info = drafter.info
        self._slots = SlotTable(self._info.slot_count)

    @property
    def info(self) -> DrafterInfo:
        """Return what is loaded."""
        return self._info

    @property
    def used_slot_count(self) -> int:
        """Return how many slots are held."""
        return self._slots.used_count

    def run(self, stream: StreamSessions, items: Sequence[Item]) -> StepResult:
        """Run `items` in order; draft items share one pass, unless a release must come between."""
        pack = _Pack()
        results = [self._run_item(stream, item, pack) for item in items]
        self._flush(pack)
        return StepResult(results=results, device_ns=pack.device_ns, pass_count=pack.pass_count)

    def release_all(self, stream: StreamSessions) -> None:
        """Free every slot of a stream that has ended (law L7)."""
        for session in stream.remove_all():
            self._release(session)

    def _run_item(self, stream: StreamSessions, item: Item, pack: _Pack) -> ItemResult:
        result = ItemResult(session_id=item.session_id)
        try:
            match item:
                case DraftItem():
                    self._pack(stream, item, pack, result)
                case OpenItem():
                    self._open(stream, item)
                case ReleaseItem():
                    session = stream.get(item.session_id)
                    self._flush(pack)  # its draft item may wait
                    stream.remove(item.session_id)
                    self._release(session)
                case RefusedItem():
                    raise item.error
        except SplitspecError as error:
            # A draft item of the same session may still wait in the pack: the length it leaves
            # is the one that the peer must believe next.
            self._flush(pack)
            result.error = error
            result.context_length = stream.context_length(item.session_id)
        return result

    def _open(self, stream: StreamSessions, item: OpenItem) -> None:
        stream.check_new(item.session_id)
        session = Session(slot=self._slots.take(), parameters=item.parameters)
        self._drafter.open(session.slot, item.parameters)
        stream.add(item.session_id, session)

    def _release(self, session: Session) -> None:
        self._drafter.release(session.slot)
        self._slots.give_back(session.slot)

    def _pack(
        self, stream: StreamSessions, item: DraftItem, pack: _Pack, result: ItemResult
    ) -> None:
        session = stream.get(item.session_id)
        if item.session_id in pack.drafted:
            raise InvalidArgument.of(
                "items", f"two draft items of session {item.session_id}", "one a step"
            )
        self._check(session, item)
        pack.drafted.add(item.session_id)
        pack.sessions.append(session)
        pack.results.append(result)
        pack.works.append(
            DraftWork(
                slot=session.slot,
                parameters=session.parameters,
                start=session.context_length,
                token_ids=item.token_ids,
                rows=item.rows,
                pending_token_id=item.pending_token_id,
                draft_count=item.draft_count,
            )
        )

    def _check(self, session: Session, item: DraftItem) -> None:
        if item.context_length != session.context_length:
            raise CommittedLengthMismatch(
                f"context_length is {item.context_length}; this drafter holds "
                f"{session.context_length} of session {item.session_id}",
                value=item.context_length,
                expected=session.context_length,
            )
        length = session.context_length + len(item.token_ids)
        limit = self._info.max_context_length
        if length > limit:
            raise ContextFull(
                f"the context would be {length} long; this drafter holds {limit}",
                value=length,
                expected=limit,
            )

    def _flush(self, pack: _Pack) -> None:
        """Run the works that wait in one pass of the drafter."""
        if not pack.works:
            return
        started, passed = perf_counter_ns(), self._drafter.pass_count
        drafts = self._drafter.step(pack.works)
        pack.device_ns += perf_counter_ns() - started
        pack.pass_count += self._drafter.pass_count - passed
        for work, session, result, ids in zip(
            pack.works, pack.sessions, pack.results, drafts, strict=True
        ):
            assert len(ids) <= work.draft_count, (len(ids), work.draft_count)
            assert session.context_length == work.start, "law L2"
            session.context_length += len(work.token_ids)
            result.context_length = session.context_length
            result.draft_token_ids = ids
        pack.works, pack.sessions, pack.results = [], [], []
