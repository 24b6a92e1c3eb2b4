"""A session's slot in the verifier: items out, checked results back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from coordinator.batching import Rank
from coordinator.sessions import LinkLost, Session
from coordinator.steps import Dialect, StepLink
from splitspec.errors import CommittedLengthMismatch, Draining, NoFreeSlot, SplitspecError
from splitspec.telemetry import (
    KEY_ACCEPTED_COUNT,
    KEY_COMMITTED_LENGTH,
    KEY_DRAFT_COUNT,
    SPAN_VERIFY,
    Span,
)
from splitspec.v1 import rows_pb2, verifier_pb2
from splitspec.v1.verifier_pb2_grpc import VerifierStub

DIALECT = Dialect(
    peer="verifier",
    stub=VerifierStub,
    model_request=verifier_pb2.VerifierGetModelRequest,
    step_request=verifier_pb2.VerifierRunStepsRequest,
)
SLOT_RETRY_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class VerifierPatience:
    """How long a session waits for what is not there."""

    reconnect_seconds: float = 30.0
    slot_seconds: float = 60.0
    """For a slot that another coordinator holds."""


def chunk_spans(begin: int, end: int, smallest: int, largest: int) -> Iterable[tuple[int, int]]:
    """Split [begin, end) into chunks of `smallest`..`largest` tokens, the last one as it comes.

    A rest that would be too small borrows from the chunk before it.
    """
    while begin < end:
        size = min(largest, end - begin)
        rest = end - begin - size
        if 0 < rest < smallest:
            size = max(smallest, size - (smallest - rest))
        yield begin, begin + size
        begin += size


class RemoteVerifier:
    """One session's lane; `rounds.VerifierLane` over a link."""

    def __init__(self, link: StepLink, patience: VerifierPatience) -> None:
        self._link = link
        self._patience = patience
        self._epoch = 0
        self._session = 0
        """This lane's number on the link; 0 while it holds no slot."""

    @property
    def max_draft_count(self) -> int:
        """Return what the verifier that is connected, or was the last time, takes in a window.

        One that comes back with less has another epoch: what was drafted for more is not sent.
        """
        count: int = self._link.model.max_draft_count
        return count

    async def open(self, session: Session, row_kind: rows_pb2.RowKind) -> None:
        """Take a fresh slot; wait for the verifier, and for a slot that others hold.

        Raises:
            NoFreeSlot, PeerAbsent, ModelMismatch: the wait was in vain.
            LinkLost: the link broke meanwhile.
        """
        self.release()
        deadline = monotonic() + self._patience.slot_seconds
        while True:
            self._epoch = await self._link.ready(self._patience.reconnect_seconds)
            self._session = self._link.new_session()
            opening = verifier_pb2.OpenSession(sampling=session.sampling, row_kind=row_kind)
            item = self._item(0, session.prefill_span, open=opening)
            try:
                await self._link.submit(self._epoch, Rank.OPEN, self._session, item)
                return
            except (NoFreeSlot, Draining):
                self._session = 0
                if monotonic() >= deadline:
                    raise
            await asyncio.sleep(SLOT_RETRY_SECONDS)

    def chunks(self, begin: int, end: int) -> Iterable[tuple[int, int]]:
        """Split positions [begin, end) into chunks that the verifier takes."""
        model = self._link.model
        return chunk_spans(begin, end, model.min_prefill_chunk, model.max_prefill_chunk)

    async def prefill(self, session: Session, end: int) -> verifier_pb2.PrefillResult:
        """Run tokens [committed_length, end); the prompt's last chunk yields the bonus."""
        begin = session.committed_length
        final = end == session.prompt_length and not session.running
        chunk = verifier_pb2.PrefillChunk(token_ids=session.tokens[begin:end], final=final)
        item = self._item(begin, session.prefill_span, prefill=chunk)
        result, _ = await self._link.submit(
            self._epoch, Rank.PREFILL, self._session, item, end - begin
        )
        prefilled: verifier_pb2.PrefillResult = result.prefill
        _check(result, end, end - begin, prefilled)
        if prefilled.HasField("bonus_token_id") != final:
            raise LinkLost("the verifier's prefill bonus does not go with the last chunk")
        return prefilled

    async def verify(self, session: Session, drafts: list[int]) -> verifier_pb2.VerifyResult:
        """Run the window [pending, *drafts]."""
        span = session.tracing.start(SPAN_VERIFY, parent=session.span.traceparent)
        try:
            verified = await self._verify(session, drafts, span)
            if session.tracing.enabled:
                span.set(KEY_DRAFT_COUNT, len(drafts))
                span.set(KEY_ACCEPTED_COUNT, verified.accepted_count)
                span.set(KEY_COMMITTED_LENGTH, session.committed_length)
            return verified
        except SplitspecError as error:
            span.fail(error.reason, error.message)
            raise
        finally:
            span.end()

    async def _verify(
        self, session: Session, drafts: list[int], span: Span
    ) -> verifier_pb2.VerifyResult:
        window = verifier_pb2.VerifyWindow(
            pending_token_id=session.tokens[-1], draft_token_ids=drafts
        )
        committed = session.committed_length
        item = self._item(committed, span, verify=window)
        result, trip = await self._link.submit(self._epoch, Rank.DECODE, self._session, item)
        verified: verifier_pb2.VerifyResult = result.verify
        if verified.accepted_count > len(drafts):
            raise LinkLost("the verifier accepted more draft tokens than it was sent (law L3)")
        acceptance_length = verified.accepted_count + 1
        _check(result, committed + acceptance_length, acceptance_length, verified)
        session.times.verify += trip.service
        session.times.wire += trip.answered - trip.sent - trip.service
        return verified

    def release(self) -> None:
        """Give the slot back, if there is one."""
        if self._session:
            item = verifier_pb2.VerifyItem(
                session=self._session, release=verifier_pb2.ReleaseSession()
            )
            self._link.release(self._epoch, self._session, item)
            self._session = 0

    def _item(self, committed_length: int, span: Span, **action: Any) -> verifier_pb2.VerifyItem:
        return verifier_pb2.VerifyItem(
            session=self._session,
            committed_length=committed_length,
            traceparent=span.traceparent,
            **action,
        )


def _check(result: Any, committed_length: int, count: int, outcome: Any) -> None:
    """Refuse a result that does not commit `count` positions up to `committed_length` (law L3)."""
    if result.committed_length != committed_length:
        raise CommittedLengthMismatch(
            f"committed_length is {result.committed_length} at the verifier; "
            f"expected {committed_length}",
            value=result.committed_length,
            expected=committed_length,
        )
    if outcome.HasField("rows") and outcome.rows.count != count:
        raise LinkLost(f"the verifier sent {outcome.rows.count} rows for {count} (law L3)")
