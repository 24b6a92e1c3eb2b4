"""One generation, prompt to stop. Start reading here.

    prefill -> (draft -> verify -> commit) x rounds -> finish

The drafter proposes K draft tokens after the pending token. The verifier runs the window
`[pending, d1..dK]` in one target pass (law L5), lets the leading draft tokens stand that the target
would have chosen itself, and adds its own bonus token, which becomes pending. Emitted is always the
target's own choice at every position, so the drafter decides how soon, never what (law L4).

A verifier that is lost is mended by replay from `session.tokens`, a drafter that is lost by doing
without: K = 0. Neither loses or repeats a token. `verifier.py` and `drafter.py` hold the lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Protocol

from coordinator.sessions import REPLAYABLE, Session
from splitspec.telemetry import SPAN_PREFILL
from splitspec.v1 import generation_pb2, rows_pb2, verifier_pb2

Emit = Callable[[Sequence[int]], "generation_pb2.FinishReason | None"]
"""Takes emitted tokens, returns why the answer ends with them, or None to go on."""


class VerifierLane(Protocol):
    """One session's slot in the verifier. Losses raise an error of `REPLAYABLE`."""

    @property
    def max_draft_count(self) -> int:
        """Return the largest K of a window; it may change when the verifier comes back."""

    async def open(self, session: Session, row_kind: rows_pb2.RowKind) -> None:
        """Take a fresh slot; an older one is given back."""

    def chunks(self, begin: int, end: int) -> Iterable[tuple[int, int]]:
        """Split positions [begin, end) into prefill chunks."""

    async def prefill(self, session: Session, end: int) -> verifier_pb2.PrefillResult:
        """Run tokens [committed_length, end)."""

    async def verify(self, session: Session, drafts: list[int]) -> verifier_pb2.VerifyResult:
        """Run the window of the pending token and `drafts`."""


class DrafterLane(Protocol):
    """One session's slot in the drafter. Never raises: a lost or late drafter drafts nothing."""

    @property
    def row_kind(self) -> rows_pb2.RowKind:
        """Return the rows it wants now; ROW_KIND_NONE while it has no slot."""

    def needs_replay(self, session: Session) -> bool:
        """Return whether it has a slot again that lacks rows which only a replay brings."""

    def open(self, session: Session) -> None:
        """Take a fresh slot, if it can; an older one that holds something is given back."""

    def keep(self, rows: rows_pb2.Rows | None) -> None:
        """Take newly committed rows, to send with the next item."""

    def extend(self, session: Session) -> None:
        """Send what has committed since, without waiting for it."""

    async def draft(self, session: Session, count: int) -> list[int]:
        """Send what has committed since (law L2) and return up to `count` draft tokens."""


async def generate(
    session: Session, verifier: VerifierLane, drafter: DrafterLane, emit: Emit
) -> generation_pb2.FinishReason:
    """Run `session` until `emit` says why it ends."""
    finish = emit(await prefill(session, verifier, drafter))
    while finish is None:
        if drafter.needs_replay(session):
            session.restart("drafter_back")
            await prefill(session, verifier, drafter)
        started = perf_counter()
        try:
            count = session.draft_room(verifier.max_draft_count)
            drafts = await drafter.draft(session, count)
            result = await verifier.verify(session, drafts)
        except REPLAYABLE as error:
            session.begin_replay(error)
            await prefill(session, verifier, drafter)
            continue
        emitted = session.commit(drafts, result.accepted_count, result.bonus_token_id)  # L1, L3
        drafter.keep(result.rows if result.HasField("rows") else None)
        session.times.total += perf_counter() - started
        finish = emit(emitted)
    return finish


async def prefill(session: Session, verifier: VerifierLane, drafter: DrafterLane) -> list[int]:
    """Run the prompt and return the prefill bonus; on a replay, all tokens but the pending one.

    Rows go to the drafter chunk by chunk, while the verifier runs the next chunk.
    """
    session.prefill_span = session.tracing.start(SPAN_PREFILL, parent=session.span.traceparent)
    try:
        return await _prefill(session, verifier, drafter)
    finally:
        session.prefill_span.end()


async def _prefill(session: Session, verifier: VerifierLane, drafter: DrafterLane) -> list[int]:
    while True:
        try:
            drafter.open(session)
            await verifier.open(session, drafter.row_kind)
            for _, end in verifier.chunks(0, session.prefill_end):
                result = await verifier.prefill(session, end)
                session.committed_length = end
                drafter.keep(result.rows if result.HasField("rows") else None)
                drafter.extend(session)
            if session.running:
                session.check_lengths()  # L1: the replay ends where the loss began
                return []
            return session.start(result.bonus_token_id)
        except REPLAYABLE as error:
            session.begin_replay(error)
