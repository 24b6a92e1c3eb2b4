"""A fake drafter that knows the target: right, wrong, or right half of the time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitspec.errors import SplitspecError
from splitspec.rows import NO_ROWS, check_rows
from splitspec.v1 import drafter_pb2 as pb
from splitspec.v1.drafter_pb2_grpc import add_DrafterServicer_to_server
from tests.coordinator.fakes.peer import (
    CommittedLengthMismatch,
    InvalidArgument,
    NoFreeSlot,
    Peer,
    SessionNotFound,
    item_error,
)
from tests.coordinator.fakes.target import VOCAB_SIZE, WIDTH, next_token, row_bytes
from tests.coordinator.fakes.verifier import RAW


@dataclass
class Context:
    """What one session was fed."""

    seed: int | None
    tokens: list[int] = field(default_factory=list)


class FakeDrafter(Peer):
    """Drafts with the hash target itself. `kind`: "right", "wrong", "coin-flip" or "invalid"."""

    add_to_server = staticmethod(add_DrafterServicer_to_server)

    def __init__(
        self, folder: Path, *, kind: str = "right", wants_rows: bool = False, **model: Any
    ) -> None:
        super().__init__(folder, "drafter")
        row_format = RAW if wants_rows else NO_ROWS
        fields: dict[str, Any] = {
            "protocol_version": 1,
            "method": kind,
            "vocab_size": VOCAB_SIZE,
            "row_kind": row_format.kind,
            "tap_layers": [1] if wants_rows else [],
            "row_width": WIDTH if wants_rows else 0,
            "row_dtype": row_format.dtype,
            "max_draft_count": 7,
            "max_context_length": 1024,
            "slot_count": 64,
        }
        self.kind = kind
        self.model = pb.DrafterGetModelResponse(**{**fields, **model})
        self.random = random.Random(0)
        self.draft_count = 0
        self.extend_count = 0
        self.problems: list[str] = []
        """Laws that the coordinator broke."""

    async def GetModel(self, request: Any, context: Any) -> pb.DrafterGetModelResponse:
        """Answer the handshake."""
        del request, context
        return self.model

    def run(self, sessions: dict[int, Context], request: Any, error: Any) -> Any:
        """Run one step; `error` fails its draft items."""
        results = []
        touched: set[int] = set()
        for item in request.items:
            result = pb.DraftItemResult(session=item.session)
            try:
                if item.HasField("draft"):
                    if item.session in touched:
                        self.problems.append("two draft items of one session in a step")
                    touched.add(item.session)
                    if error is not None:
                        raise error
                self._run_item(sessions, item, result)
            except SplitspecError as problem:
                result.error.CopyFrom(item_error(problem))
            context = sessions.get(item.session)
            result.context_length = len(context.tokens) if context else 0
            results.append(result)
        return pb.DrafterRunStepsResponse(step=request.step, results=results)

    def _run_item(self, sessions: dict[int, Context], item: Any, result: Any) -> None:
        if item.HasField("open"):
            if self.session_count >= self.model.slot_count:
                raise NoFreeSlot("every slot is taken")
            sampling = item.open.sampling
            sessions[item.session] = Context(sampling.seed if sampling.temperature > 0 else None)
            return
        context = sessions.get(item.session)
        if context is None:
            raise SessionNotFound(f"no session {item.session}")
        if item.HasField("release"):
            del sessions[item.session]
            return
        self._draft(context, item, result)

    def _draft(self, context: Context, item: Any, result: Any) -> None:
        draft = item.draft
        if item.context_length != len(context.tokens):
            self.problems.append(f"L2: {item.context_length} != {len(context.tokens)}")
            raise CommittedLengthMismatch("context")
        ids = list(draft.token_ids)
        wants_rows = self.model.row_kind == RAW.kind
        if wants_rows and ids:
            start = len(context.tokens)
            data = check_rows(draft.rows, RAW, start, len(ids))
            if data != row_bytes(ids, start):
                self.problems.append(f"rows of {start}.. are not those of their tokens")
        elif draft.HasField("rows"):
            self.problems.append("rows that nobody wants")
        context.tokens += ids
        result.draft.SetInParent()
        if not draft.draft_count:
            self.extend_count += 1
            return
        self.draft_count += 1
        if not draft.HasField("pending_token_id"):
            raise InvalidArgument.of("pending_token_id", "absent", "a token")
        result.draft.draft_token_ids.extend(
            self._drafts([*context.tokens, draft.pending_token_id], context.seed, draft.draft_count)
        )

    def _drafts(self, prefix: list[int], seed: int | None, count: int) -> list[int]:
        drafts = []
        for _ in range(count):
            token = next_token(prefix, seed)
            wrong = self.kind == "wrong" or (
                self.kind == "coin-flip" and self.random.random() < 0.5
            )
            if wrong:
                token = (token + 1) % VOCAB_SIZE
            if self.kind == "invalid":
                token = VOCAB_SIZE + 5
            drafts.append(token)
            prefix.append(token)
        return drafts
