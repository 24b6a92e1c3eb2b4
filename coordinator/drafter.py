"""A session's slot in the drafter. Whatever happens to it costs drafts, never the answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic

from coordinator.batching import Answer, Rank
from coordinator.sessions import LinkLost, Session
from coordinator.steps import Dialect, StepLink
from splitspec.errors import SplitspecError
from splitspec.telemetry import KEY_CONTEXT_LENGTH, KEY_DRAFT_COUNT, SPAN_DRAFT, Span
from splitspec.v1 import drafter_pb2, rows_pb2
from splitspec.v1.drafter_pb2_grpc import DrafterStub

DIALECT = Dialect(
    peer="drafter",
    stub=DrafterStub,
    model_request=drafter_pb2.DrafterGetModelRequest,
    step_request=drafter_pb2.DrafterRunStepsRequest,
)


@dataclass(frozen=True, kw_only=True)
class DrafterPatience:
    """How long a round waits for drafts, and a session before it tries a failed drafter again."""

    draft_seconds: float = 1.0
    retry_seconds: float = 0.5
    max_retry_seconds: float = 30.0


class NoDrafter:
    """The lane of a coordinator that has no drafter."""

    row_kind = rows_pb2.ROW_KIND_NONE

    def needs_replay(self, session: Session) -> bool:  # noqa: ARG002
        """Return that nothing lacks rows."""
        return False

    def open(self, session: Session) -> None:
        """Do nothing."""

    def keep(self, rows: rows_pb2.Rows | None) -> None:
        """Do nothing."""

    def extend(self, session: Session) -> None:
        """Do nothing."""

    async def draft(self, session: Session, count: int) -> list[int]:  # noqa: ARG002
        """Draft nothing."""
        return []

    def release(self) -> None:
        """Do nothing."""


class RemoteDrafter:
    """One session's lane; `rounds.DrafterLane` over a link."""

    def __init__(self, link: StepLink, patience: DrafterPatience, vocab_size: int) -> None:
        self._link = link
        self._patience = patience
        self._vocab_size = vocab_size
        self._epoch = 0
        self._session = 0
        """This lane's number on the link; 0 while it holds no slot."""
        self._context_length = 0
        """What the drafter holds once it has run every item that was sent."""
        self._rows: list[rows_pb2.Rows] = []
        """Rows of the positions from `_context_length` on."""
        self._lacks_rows = False
        """Whether the slot was taken amid an answer: only a replay brings the rows before it."""
        self._outstanding: set[Answer] = set()
        self._late: Answer | None = None
        self._retry_at = 0.0
        self._retry_seconds = patience.retry_seconds

    @property
    def row_kind(self) -> rows_pb2.RowKind:
        """Return the rows that the slot takes; none while there is no slot."""
        model = self._link.model
        return model.row_kind if self._attached else rows_pb2.ROW_KIND_NONE

    def needs_replay(self, session: Session) -> bool:
        """Return whether a slot was granted that lacks rows of positions committed before.

        A drafter that is full refuses it first: then a replay would be for nothing.
        """
        granted = self._attached and not self._outstanding  # a refusal would have lost the slot
        return granted and self._lacks_rows and self._room(session) > 0

    @property
    def _attached(self) -> bool:
        return bool(self._session) and self._link.connected and self._epoch == self._link.epoch

    def open(self, session: Session) -> None:
        """Take a fresh slot, if the drafter is there and long enough. Does not wait.

        A slot that waits for this replay is fresh and stays.
        """
        if not (self._attached and self._lacks_rows and self._room(session) > 0):
            self._take_slot(session)
        self._lacks_rows = False

    def _take_slot(self, session: Session) -> None:
        self.release()
        if not self._link.connected or monotonic() < self._retry_at or self._room(session) < 1:
            return
        self._epoch = self._link.epoch
        self._session = self._link.new_session()
        item = drafter_pb2.DraftItem(
            session=self._session,
            context_length=0,
            traceparent=session.prefill_span.traceparent,
            open=drafter_pb2.OpenDraftSession(sampling=session.sampling),
        )
        self._send(Rank.OPEN, item, 0)

    def keep(self, rows: rows_pb2.Rows | None) -> None:
        """Take the rows of newly committed positions, to send with the next item.

        Without a slot that they can go to they are dropped: nothing would ever empty the list.
        """
        takes_rows = self.row_kind != rows_pb2.ROW_KIND_NONE and not self._lacks_rows
        if takes_rows and rows is not None:
            self._rows.append(rows)

    def extend(self, session: Session) -> None:
        """Send the positions committed since, without waiting for the answer."""
        if self._attached:
            self._send_draft(session, 0, session.prefill_span)

    async def draft(self, session: Session, count: int) -> list[int]:
        """Send the positions committed since; return at most `count` draft tokens.

        No token when the drafter is lost or late: then a target-only round goes on without it.
        """
        if self._late is not None and not self._late.done():
            return []
        self._late = None
        if count > 0 and not self._attached:
            self._take_slot(session)
            self._lacks_rows = self.row_kind != rows_pb2.ROW_KIND_NONE
        if not self._attached:
            return []
        room = self._room(session)
        if room < 1:
            self.release()  # for good: contexts only grow
        count = min(count, room, self._link.model.max_draft_count)
        if count < 1 or self._lacks_rows:
            return []
        span = session.tracing.start(SPAN_DRAFT, parent=session.span.traceparent)
        try:
            return await self._ask(session, count, span)
        finally:
            span.end()

    def release(self) -> None:
        """Give the slot back, if there is one."""
        if self._session:
            item = drafter_pb2.DraftItem(
                session=self._session, release=drafter_pb2.ReleaseDraftSession()
            )
            self._link.release(self._epoch, self._session, item)
            given_up, self._outstanding = self._outstanding, set()
            for answer in given_up:
                if not answer.done():  # never sent, or its result is of no use any more
                    answer.set_exception(LinkLost("the drafter's slot was given up"))
        self._session = 0
        self._context_length = 0
        self._rows = []
        self._lacks_rows = False
        self._late = None

    def _room(self, session: Session) -> int:
        """Return how many draft tokens the drafter's context holds after the pending token.

        Counted from where prefill ends, it is the same before, while and after a replay runs.
        """
        longest: int = self._link.model.max_context_length
        return longest - session.prefill_end - 1

    async def _ask(self, session: Session, count: int, span: Span) -> list[int]:
        context_length = session.committed_length
        answer = self._send_draft(session, count, span)
        try:
            async with asyncio.timeout(self._patience.draft_seconds):
                result, trip = await asyncio.shield(answer)
        except TimeoutError:
            span.fail("LATE", "no drafts in time")
            self._late = answer
            return []
        except SplitspecError as error:
            span.fail(error.reason, error.message)
            return []
        session.times.draft += trip.service
        session.times.wire += trip.answered - trip.sent - trip.service
        drafts: list[int] = list(result.draft.draft_token_ids)
        sound = len(drafts) <= count and all(token < self._vocab_size for token in drafts)
        if not sound or result.context_length != context_length:  # law L2
            span.fail("INVALID_DRAFT", "too many drafts, an unknown token or a wrong length")
            self._lose()
            return []
        self._retry_seconds = self._patience.retry_seconds
        if session.tracing.enabled:
            span.set(KEY_DRAFT_COUNT, len(drafts))
            span.set(KEY_CONTEXT_LENGTH, context_length)
        return drafts

    def _send_draft(self, session: Session, count: int, span: Span) -> Answer:
        begin, end = self._context_length, session.committed_length
        draft = drafter_pb2.Draft(token_ids=session.tokens[begin:end], draft_count=count)
        if count:
            draft.pending_token_id = session.tokens[end]
        size = 0
        if self._rows:
            draft.rows.CopyFrom(_joined(self._rows))
            size = len(draft.rows.inline)
            self._rows = []
        item = drafter_pb2.DraftItem(
            session=self._session,
            context_length=begin,
            traceparent=span.traceparent,
            draft=draft,
        )
        self._context_length = end
        return self._send(Rank.DECODE, item, size)

    def _send(self, rank: Rank, item: drafter_pb2.DraftItem, size: int) -> Answer:
        answer = self._link.submit(self._epoch, rank, self._session, item, size)
        self._outstanding.add(answer)
        answer.add_done_callback(self._settle)
        return answer

    def _settle(self, answer: Answer) -> None:
        """Lose the slot if an item failed: the drafter lacks what the item brought."""
        failed = answer.cancelled() or answer.exception() is not None
        if answer in self._outstanding:
            self._outstanding.remove(answer)
            if failed:
                self._lose()

    def _lose(self) -> None:
        """Go on without the drafter; try again after a while, longer each time."""
        self.release()
        self._retry_at = monotonic() + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, self._patience.max_retry_seconds)


def _joined(rows: list[rows_pb2.Rows]) -> rows_pb2.Rows:
    """Return rows of consecutive positions as one message; their bytes are not looked at."""
    first = rows[0]
    if len(rows) == 1:
        return first
    return rows_pb2.Rows(
        kind=first.kind,
        dtype=first.dtype,
        width=first.width,
        start=first.start,
        count=sum(part.count for part in rows),
        inline=b"".join(part.inline for part in rows),
    )
