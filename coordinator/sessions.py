"""One generation's state, and the waiting room in front of the verifier's slots."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from splitspec.errors import (
    CommittedLengthMismatch,
    Draining,
    EngineFailed,
    NotReady,
    QueueFull,
    SessionNotFound,
    SplitspecError,
)
from splitspec.telemetry import NO_SPAN, OFF, Span, Tracing
from splitspec.v1 import sampling_pb2

MAX_FRUITLESS_REPLAYS = 4
"""Replays in a row without a new token before a request fails: it may be what kills the peer."""


class LinkLost(NotReady):
    """The stream to a peer broke while an item waited on it: replay from tokens."""


class PeerAbsent(NotReady):
    """A peer did not come back within the patience: no replay helps."""


REPLAYABLE = (LinkLost, NotReady, Draining, EngineFailed, CommittedLengthMismatch, SessionNotFound)
"""What a replay from tokens can mend."""


@dataclass(slots=True)
class RoundTimes:
    """Seconds of a request's rounds, split as `RoundTimes` of the protocol."""

    draft: float = 0.0
    verify: float = 0.0
    wire: float = 0.0
    total: float = 0.0

    @property
    def coordinator(self) -> float:
        """Return what is neither inside a service nor between the processes."""
        return max(0.0, self.total - self.draft - self.verify - self.wire)


@dataclass(kw_only=True)
class Session:
    """One generation, prompt to stop. `tokens` is the only copy of what replay needs."""

    tokens: list[int]
    """Prompt and everything emitted; the last one is pending once a session runs."""
    prompt_length: int
    output_limit: int
    """Tokens to emit at most: max_tokens, or what the context holds."""
    draft_count: int
    """Draft tokens a round at most."""
    sampling: sampling_pb2.SamplingParameters
    tracing: Tracing = OFF
    span: Span = NO_SPAN
    """The request's `splitspec.generate`, parent of the spans of its rounds."""
    prefill_span: Span = NO_SPAN
    committed_length: int = 0
    acceptance_length_counts: list[int] = field(default_factory=list)
    draft_token_count: int = 0
    target_only_round_count: int = 0
    replay_causes: list[str] = field(default_factory=list)
    times: RoundTimes = field(default_factory=RoundTimes)
    _fruitless_replays: int = 0

    @property
    def running(self) -> bool:
        """Return whether there is a pending token: the prefill bonus has been emitted."""
        return len(self.tokens) > self.prompt_length

    @property
    def prefill_end(self) -> int:
        """Return the length that prefill commits: the prompt, or on replay all but pending."""
        return len(self.tokens) - 1 if self.running else self.prompt_length

    def draft_room(self, max_draft_count: int) -> int:
        """Return K: what was asked for, less where max_tokens or the context end comes first.

        `max_draft_count` is what the verifier takes now.
        """
        remaining = self.output_limit - (len(self.tokens) - self.prompt_length)
        return min(self.draft_count, max_draft_count, remaining - 1)

    def start(self, bonus_token_id: int) -> list[int]:
        """Make the prefill bonus pending; return what was emitted."""
        self.tokens.append(bonus_token_id)
        self._fruitless_replays = 0
        self.check_lengths()
        return [bonus_token_id]

    def commit(self, draft_ids: Sequence[int], accepted_count: int, bonus_id: int) -> list[int]:
        """Advance by one round's outcome; return the emitted tokens."""
        emitted = [*draft_ids[:accepted_count], bonus_id]
        assert 1 <= len(emitted) == accepted_count + 1 <= len(draft_ids) + 1, "law L3"
        self.tokens += emitted
        self.committed_length += len(emitted)
        self.check_lengths()
        counts = self.acceptance_length_counts
        counts.extend([0] * (accepted_count + 1 - len(counts)))
        counts[accepted_count] += 1
        self.draft_token_count += len(draft_ids)
        self.target_only_round_count += not draft_ids
        self._fruitless_replays = 0
        return emitted

    def check_lengths(self) -> None:
        """Assert law L1."""
        assert len(self.tokens) == self.committed_length + 1, "law L1"

    def begin_replay(self, error: SplitspecError) -> None:
        """Start again from tokens, because of `error`.

        Raises:
            SplitspecError: `error` itself, where another replay would not help.
        """
        disagreed = isinstance(error, CommittedLengthMismatch)
        cause = "verifier_length" if disagreed else "verifier_lost"
        self._fruitless_replays += 1
        hopeless = self._fruitless_replays > MAX_FRUITLESS_REPLAYS
        if hopeless or isinstance(error, PeerAbsent) or (disagreed and cause in self.replay_causes):
            raise error
        self.restart(cause)

    def restart(self, cause: str) -> None:
        """Forget what the peers hold; prefill runs everything again. `cause`: see REPLAY_CAUSES."""
        self.replay_causes.append(cause)
        self.committed_length = 0


class Admission:
    """At most `slot_count` sessions run; up to `queue_limit` requests wait in order of arrival."""

    def __init__(self, *, queue_limit: int, wait_seconds: float) -> None:
        self._queue_limit = queue_limit
        self._wait_seconds = wait_seconds
        self._slot_count = 0
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def running_count(self) -> int:
        """Return the number of sessions that hold a slot."""
        return self._running

    @property
    def waiting_count(self) -> int:
        """Return the number of requests in the queue."""
        return len(self._waiting)

    def resize(self, slot_count: int) -> None:
        """Follow the verifier's slot count."""
        self._slot_count = slot_count
        self._admit_waiting()

    @asynccontextmanager
    async def slot(self, on_waited: Callable[[], None]) -> AsyncIterator[None]:
        """Hold a slot while the block runs; wait for it first, then call `on_waited`.

        Raises:
            QueueFull: the queue is full, or the wait took too long.
        """
        try:
            await self._enter()
        finally:
            on_waited()
        try:
            yield
        finally:
            self._leave()

    async def _enter(self) -> None:
        if self._running < self._slot_count and not self._waiting:
            self._running += 1
            return
        if len(self._waiting) >= self._queue_limit:
            raise QueueFull(
                f"{self._running} sessions run and {len(self._waiting)} requests wait; "
                f"the queue holds {self._queue_limit}",
                queue_limit=self._queue_limit,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except TimeoutError:
            self._forget(turn)
            raise QueueFull(
                f"no slot came free within {self._wait_seconds:g} s", waited=self._wait_seconds
            ) from None
        except asyncio.CancelledError:
            self._forget(turn)
            raise

    def _forget(self, turn: asyncio.Future[None]) -> None:
        """Take a request out of the queue; give back a slot that it was granted meanwhile."""
        if turn in self._waiting:
            self._waiting.remove(turn)
        elif turn.done() and not turn.cancelled():
            self._leave()

    def _leave(self) -> None:
        self._running -= 1
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and self._running < self._slot_count:
            turn = self._waiting.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)
