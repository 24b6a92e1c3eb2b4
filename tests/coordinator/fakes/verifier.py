"""A fake verifier: the hash target behind the real protocol, lengths enforced."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitspec.errors import SplitspecError
from splitspec.rows import RowFormat, encode_rows
from splitspec.v1 import rows_pb2
from splitspec.v1 import verifier_pb2 as pb
from splitspec.v1.verifier_pb2_grpc import add_VerifierServicer_to_server
from tests.coordinator.fakes.peer import (
    CommittedLengthMismatch,
    InvalidArgument,
    NoFreeSlot,
    Peer,
    SessionNotFound,
    item_error,
)
from tests.coordinator.fakes.target import VOCAB_SIZE, WIDTH, next_token, row_bytes

RAW = RowFormat(kind=rows_pb2.ROW_KIND_RAW_TAPS, dtype=rows_pb2.ROW_DTYPE_FLOAT32, width=WIDTH)


@dataclass
class Slot:
    """One session: its committed tokens are its cache."""

    seed: int | None
    wants_rows: bool
    tokens: list[int] = field(default_factory=list)


class FakeVerifier(Peer):
    """Serves the hash target."""

    add_to_server = staticmethod(add_VerifierServicer_to_server)

    def __init__(self, folder: Path, tokenizer_hash: str, **model: Any) -> None:
        super().__init__(folder, "verifier")
        fields: dict[str, Any] = {
            "protocol_version": 1,
            "model_id": "hash",
            "model_hash": "h1",
            "tokenizer_hash": tokenizer_hash,
            "vocab_size": VOCAB_SIZE,
            "tap_layers": [1],
            "row_layouts": [
                pb.RowLayout(kind=rows_pb2.ROW_KIND_NONE),
                pb.RowLayout(kind=RAW.kind, width=WIDTH, dtype=RAW.dtype),
            ],
            "max_draft_count": 7,
            "min_prefill_chunk": 1,
            "max_prefill_chunk": 8,
            "max_context_length": 128,
            "slot_count": 8,
            "precision": "fp32",
            "runtime": "torch",
        }
        self.model = pb.VerifierGetModelResponse(**{**fields, **model})
        self.verify_item_count = 0
        self.prefill_item_counts: list[int] = []
        self.opened_kinds: list[int] = []

    async def GetModel(self, request: Any, context: Any) -> pb.VerifierGetModelResponse:
        """Answer the handshake."""
        del request, context
        return self.model

    def run(self, sessions: dict[int, Slot], request: Any, error: Any) -> Any:
        """Run one step; `error` fails its verify and prefill items."""
        results = []
        touched: set[int] = set()
        self.prefill_item_counts.append(sum(i.HasField("prefill") for i in request.items))
        for item in request.items:
            result = pb.VerifyItemResult(session=item.session)
            try:
                if item.WhichOneof("action") in ("verify", "prefill"):
                    assert item.session not in touched, "two items of one session in a step"
                    touched.add(item.session)
                    if error is not None:
                        raise error
                self._run_item(sessions, item, result)
            except SplitspecError as problem:
                result.error.CopyFrom(item_error(problem))
            slot = sessions.get(item.session)
            result.committed_length = len(slot.tokens) if slot else 0
            results.append(result)
        return pb.VerifierRunStepsResponse(step=request.step, results=results)

    def _run_item(self, sessions: dict[int, Slot], item: Any, result: Any) -> None:
        action = item.WhichOneof("action")
        if action == "open":
            if self.session_count >= self.model.slot_count:
                raise NoFreeSlot("every slot is taken")
            if item.session in sessions or not item.session:
                raise InvalidArgument.of("session", item.session, "a new one")
            sampling = item.open.sampling
            self.opened_kinds.append(item.open.row_kind)
            sessions[item.session] = Slot(
                seed=sampling.seed if sampling.temperature > 0 else None,
                wants_rows=item.open.row_kind == RAW.kind,
            )
            return
        slot = sessions.get(item.session)
        if slot is None:
            raise SessionNotFound(f"no session {item.session}")
        if action == "release":
            del sessions[item.session]
            return
        if item.committed_length != len(slot.tokens):
            raise CommittedLengthMismatch(f"{item.committed_length} != {len(slot.tokens)}")
        if action == "prefill":
            self._prefill(slot, item.prefill, result.prefill)
        else:
            self._verify(slot, item.verify, result.verify)

    def _prefill(self, slot: Slot, chunk: Any, result: Any) -> None:
        smallest, largest = self.model.min_prefill_chunk, self.model.max_prefill_chunk
        if not smallest <= len(chunk.token_ids) <= largest:
            raise InvalidArgument.of("token_ids", len(chunk.token_ids), f"{smallest}..{largest}")
        self._commit(slot, list(chunk.token_ids), result)
        if chunk.final:
            result.bonus_token_id = next_token(slot.tokens, slot.seed)
        result.SetInParent()

    def _verify(self, slot: Slot, window: Any, result: Any) -> None:
        self.verify_item_count += 1
        if len(window.draft_token_ids) > self.model.max_draft_count:
            raise InvalidArgument.of("draft_token_ids", len(window.draft_token_ids), "fewer")
        if len(slot.tokens) + len(window.draft_token_ids) + 1 > self.model.max_context_length:
            raise InvalidArgument.of("window", len(window.draft_token_ids), "inside the context")
        prefix = [*slot.tokens, window.pending_token_id]
        accepted = 0
        for draft in window.draft_token_ids:
            if draft >= self.model.vocab_size:
                raise InvalidArgument.of("draft_token_ids", draft, "in the vocabulary")
            if draft == next_token(prefix, slot.seed):
                prefix.append(draft)
                accepted += 1
            else:
                break
        result.accepted_count = accepted
        result.bonus_token_id = next_token(prefix, slot.seed)
        self._commit(slot, prefix[len(slot.tokens) :], result)

    def _commit(self, slot: Slot, tokens: list[int], result: Any) -> None:
        if slot.wants_rows:
            start = len(slot.tokens)
            result.rows.CopyFrom(encode_rows(RAW, start, row_bytes(tokens, start)))
        slot.tokens += tokens
        assert len(slot.tokens) <= self.model.max_context_length
