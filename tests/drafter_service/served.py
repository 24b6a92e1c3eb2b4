"""A drafter on a real gRPC server in this process, and one stream to it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from drafter_service.config import DrafterConfig
from drafter_service.drafter import Drafter
from drafter_service.ngram import load
from drafter_service.server import SERVICE_NAME, DrafterServicer
from splitspec import serving, telemetry
from splitspec.channels import CLIENT_OPTIONS
from splitspec.metrics import new_registry
from splitspec.v1 import drafter_pb2 as pb
from splitspec.v1.drafter_pb2_grpc import DrafterStub, add_DrafterServicer_to_server

LIMIT_SECONDS = 20.0


@dataclass
class Served:
    """A served drafter."""

    address: str
    channel: grpc.aio.Channel
    lifecycle: serving.Lifecycle
    task: asyncio.Task[None]

    @property
    def stub(self) -> DrafterStub:
        """Return a client."""
        return DrafterStub(self.channel)

    def stream(self) -> Stream:
        """Open a stream."""
        return Stream(self.stub.RunSteps())

    async def free_slot_count(self) -> int:
        """Take every free slot on a stream of its own and return how many there were."""
        info = await self.stub.GetModel(pb.DrafterGetModelRequest(), timeout=LIMIT_SECONDS)
        stream = self.stream()
        reply = await stream.step(*(opened(i + 1) for i in range(info.slot_count)))
        free = sum(not result.HasField("error") for result in reply.results)
        await stream.finish()
        return free


class Stream:
    """One RunSteps stream."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._steps = itertools.count(1)

    async def step(self, *items: pb.DraftItem) -> pb.DrafterRunStepsResponse:
        """Send one step and return its answer."""
        request = pb.DrafterRunStepsRequest(step=next(self._steps), items=items)
        async with asyncio.timeout(LIMIT_SECONDS):
            await self.call.write(request)
            reply = await self.call.read()
        if reply is grpc.aio.EOF:  # reading a status raises it only while it is on its way
            raise AssertionError(f"the stream ended: {await self.call.code()}")
        assert reply.step == request.step
        assert [r.session for r in reply.results] == [item.session for item in items]
        return reply

    async def finish(self) -> None:
        """Close the sending side and wait for the end."""
        async with asyncio.timeout(LIMIT_SECONDS):
            await self.call.done_writing()
            assert await self.call.read() is grpc.aio.EOF


def opened(session: int, **fields: Any) -> pb.DraftItem:
    """Return an item that opens a session."""
    return pb.DraftItem(session=session, context_length=0, open=pb.OpenDraftSession(**fields))


def draft(
    session: int,
    context_length: int,
    token_ids: Sequence[int] = (),
    *,
    pending: int | None = None,
    count: int = 0,
    **fields: Any,
) -> pb.DraftItem:
    """Return an item that extends and drafts."""
    action = pb.Draft(token_ids=token_ids, pending_token_id=pending, draft_count=count, **fields)
    return pb.DraftItem(session=session, context_length=context_length, draft=action)


def released(session: int) -> pb.DraftItem:
    """Return an item that releases a session; it needs no length."""
    return pb.DraftItem(session=session, release=pb.ReleaseDraftSession())


def ngram(**fields: Any) -> Drafter:
    """Return an ngram drafter."""
    return load(DrafterConfig(**fields))


@asynccontextmanager
async def serving_drafter(
    drafter: Drafter, folder: Path, tracing: telemetry.Tracing = telemetry.OFF
) -> AsyncIterator[Served]:
    """Serve `drafter` on a unix socket in `folder` while the block runs."""
    lifecycle = serving.Lifecycle()
    registry = new_registry()
    servicer = DrafterServicer(lifecycle, tracing, registry)
    register = partial(add_DrafterServicer_to_server, servicer)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(
        serving.serve(
            address=f"unix:{folder}/d.sock",
            services=[serving.ServiceEntry(name=SERVICE_NAME, register=register)],
            lifecycle=lifecycle,
            prepare=partial(servicer.load, lambda: drafter),
            on_ready=ready.set_result,
            registry=registry,
            grace_seconds=0.5,
        )
    )
    waited: set[asyncio.Future[Any]] = {ready, task}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    channel = grpc.aio.insecure_channel(ready.result(), options=CLIENT_OPTIONS)
    try:
        yield Served(ready.result(), channel, lifecycle, task)
    finally:
        await channel.close()
        lifecycle.drain()
        async with asyncio.timeout(LIMIT_SECONDS):
            await asyncio.wait({task})
        servicer.close()
        tracing.close()
