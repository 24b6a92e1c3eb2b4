"""The link to one service: one long-lived stream, all ready items of all sessions in one step.

While a step runs, items gather; when its answer is in, all of them go as the next step. A message
costs about 120 us whatever it carries, so a round of 32 sessions must be one message, not 32.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any, NoReturn

import grpc
from google.protobuf import duration_pb2

from coordinator.batching import Answer, Rank, Ready, ReadyItems, Trip
from coordinator.sessions import LinkLost, PeerAbsent
from splitspec import ITEMS_A_SLOT
from splitspec.channels import CLIENT_OPTIONS
from splitspec.errors import ModelMismatch, SplitspecError
from splitspec.wire_errors import error_from_item, error_from_rpc

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LinkLimits:
    """How long a link waits, and how much it puts into one step."""

    connect_seconds: float = 5.0
    step_seconds: float = 30.0
    backoff_seconds: float = 0.05
    max_backoff_seconds: float = 1.0
    step_budget: int = 256
    """Cost of the items of a step at most; one item with a cost always fits. The cost of a prefill
    is its tokens, that of a draft item the bytes of its rows, that of a verify nothing."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """What differs between the verifier's and the drafter's stream."""

    peer: str
    stub: Callable[[grpc.aio.Channel], Any]
    model_request: Callable[[], Any]
    step_request: Callable[..., Any]


class StepLink:
    """Keeps one peer connected and runs steps on it.

    `accept` gets the handshake's answer and raises ModelMismatch when the peer does not fit.
    `on_change` is called after the link came up or went down. Every connection is one epoch: the
    peer frees all sessions when a stream ends (law L7), so items of an older epoch are refused.
    """

    def __init__(
        self,
        *,
        dialect: Dialect,
        address: str,
        limits: LinkLimits,
        accept: Callable[[Any], None],
        on_change: Callable[[], None] = lambda: None,
        on_step: Callable[[int, int, Trip], None] | None = None,
    ) -> None:
        self._dialect = dialect
        self._address = address
        self._limits = limits
        self._accept = accept
        self._on_change = on_change
        self._on_step = on_step
        self._ready = ReadyItems()
        self._in_flight: list[Ready] = []
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._sessions = count(1)
        self._task: asyncio.Task[None] | None = None
        self.epoch = 0
        self.connected = False
        self.model: Any = None
        self.refusal: ModelMismatch | None = None
        self.problem = "not connected yet"
        self.step_count = 0

    def start(self) -> None:
        """Connect, and reconnect for ever, in the background."""
        self._task = asyncio.create_task(self._keep_connected())

    async def close(self) -> None:
        """End the stream; the peer frees its sessions."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def new_session(self) -> int:
        """Return a session number that was never used on this link."""
        return next(self._sessions)

    async def ready(self, patience_seconds: float | None) -> int:
        """Wait until the peer is connected (None: for ever); return the epoch.

        Raises:
            ModelMismatch: the peer that is there does not fit.
            PeerAbsent: none came within the patience.
        """
        try:
            async with asyncio.timeout(patience_seconds):
                while not self.connected and self.refusal is None:
                    await self._settled.wait()
        except TimeoutError:
            raise PeerAbsent(
                f"no {self._dialect.peer} at {self._address} for {patience_seconds:g} s: "
                f"{self.problem}"
            ) from None
        if self.refusal is not None:
            raise ModelMismatch(self.refusal.message, **self.refusal.metadata)
        return self.epoch

    def submit(self, epoch: int, rank: Rank, session: int, item: Any, cost: int = 0) -> Answer:
        """Put `item` into the next step; the future gets its result and the step's trip.

        It fails with the item's error, or with LinkLost.
        """
        answer: Answer = asyncio.get_running_loop().create_future()
        if not self.connected or epoch != self.epoch:
            answer.set_exception(LinkLost(f"the {self._dialect.peer} was lost: {self.problem}"))
        else:
            self._ready.add(rank, Ready(session, item, cost, answer))
            self._wake.set()
        return answer

    def release(self, epoch: int, session: int, item: Any) -> None:
        """Put a release into the next step, unless the session was never opened there.

        A peer that was lost has released already (law L7).
        """
        if not self.connected or epoch != self.epoch:
            return
        if not self._ready.forget_open(session):
            self._ready.add(Rank.RELEASE, Ready(session, item, 0, None))
            self._wake.set()

    async def _keep_connected(self) -> None:
        backoff = self._limits.backoff_seconds
        while True:
            epoch = self.epoch
            self._lose(await self._run_until_lost())
            if self.epoch != epoch:
                backoff = self._limits.backoff_seconds
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, self._limits.max_backoff_seconds)

    async def _run_until_lost(self) -> SplitspecError:
        """Connect and run steps; return what ended that, whatever it was.

        An error that got out would end the task, and the link would seem connected for ever.
        """
        try:
            await self._connect_and_run()
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error)
        except SplitspecError as error:
            return error
        except TimeoutError:
            return LinkLost(f"no answer within {self._limits.step_seconds:g} s")
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            return LinkLost(str(error))  # gRPC: the call ended before a write
        except asyncio.CancelledError:
            if self._task is None or self._task.cancelling():  # `close`
                raise
            return LinkLost("the call was cancelled")
        except Exception as error:
            problem = LinkLost(f"{type(error).__name__}: {error}")
            if self.connected or problem.message != self.problem:
                logger.exception("%s at %s: a bug", self._dialect.peer, self._address)
            return problem

    async def _connect_and_run(self) -> NoReturn:
        # NOTE: a channel of its own each time: gRPC's shared one has a backoff that we cannot see.
        options = [*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            stub = self._dialect.stub(channel)
            model = await stub.GetModel(
                self._dialect.model_request(), timeout=self._limits.connect_seconds
            )
            if model is None:  # what gRPC returns for bytes that are no message
                raise LinkLost("the handshake's answer is undecodable")
            self._accept(model)
            call = stub.RunSteps()
            call.add_done_callback(lambda _: self._wake.set())
            self._up(model)
            try:
                await self._run_steps(call)
            finally:
                call.cancel()

    def _up(self, model: Any) -> None:
        logger.info("%s at %s connected", self._dialect.peer, self._address)
        self.model = model
        self.refusal = None
        self.epoch += 1
        self.connected = True
        self._settled.set()
        self._on_change()

    def _lose(self, problem: SplitspecError) -> None:
        """Fail everything that waits; what was in flight is unknown, and replay mends that."""
        was_connected, self.connected = self.connected, False
        if was_connected or problem.message != self.problem:
            logger.warning("%s at %s: %s", self._dialect.peer, self._address, problem.message)
        self.problem = problem.message
        self.refusal = problem if isinstance(problem, ModelMismatch) else None
        lost = [*self._in_flight, *self._ready.clear()]
        self._in_flight = []
        for ready in lost:
            if ready.answer is not None and not ready.answer.done():
                ready.answer.set_exception(
                    LinkLost(f"the {self._dialect.peer} was lost: {problem.message}")
                )
        if self.refusal is not None:
            self._settled.set()
        else:
            self._settled.clear()
        self._on_change()

    async def _run_steps(self, call: Any) -> NoReturn:
        """Run one step after the other until something is raised."""
        numbers = count(1)
        while True:
            await self._wake.wait()
            self._wake.clear()
            if call.done():
                raise await _ending(call)
            while batch := self._ready.take(
                item_limit=ITEMS_A_SLOT * self.model.slot_count, budget=self._limits.step_budget
            ):
                await self._run_step(call, next(numbers), batch)
                if self._ready:
                    await asyncio.sleep(0)  # sessions that this answer woke join the next step

    async def _run_step(self, call: Any, number: int, batch: list[Ready]) -> None:
        self._in_flight = batch
        request = self._dialect.step_request(step=number, items=[ready.item for ready in batch])
        sent = perf_counter()
        async with asyncio.timeout(self._limits.step_seconds):
            await call.write(request)
            reply = await call.read()
        if reply is grpc.aio.EOF:
            raise await _ending(call)
        if reply is None:
            raise LinkLost(f"the answer to step {number} is undecodable")
        trip = Trip(sent, perf_counter(), _service_seconds(reply.timings))
        if reply.step != number or [r.session for r in reply.results] != [
            ready.session for ready in batch
        ]:
            raise LinkLost(f"the answer does not belong to step {number}")
        self._in_flight = []
        self.step_count += 1
        for ready, result in zip(batch, reply.results, strict=True):
            answer = ready.answer
            if answer is None or answer.done():
                continue
            if result.HasField("error"):
                answer.set_exception(error_from_item(result.error))
            else:
                answer.set_result((result, trip))
        if self._on_step is not None:
            self._on_step(request.ByteSize(), reply.ByteSize(), trip)


async def _ending(call: Any) -> SplitspecError:
    """Return why a stream ended, as an error."""
    try:
        await call.code()
        return LinkLost(f"the stream ended: {(await call.code()).name} {await call.details()}")
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
        return LinkLost("the stream was cancelled")


def _service_seconds(timings: Any) -> float:
    return sum(map(seconds, (timings.queue, timings.device, timings.copy)))


def seconds(duration: duration_pb2.Duration) -> float:
    """Return a Duration as seconds."""
    return duration.seconds + duration.nanos * 1e-9
