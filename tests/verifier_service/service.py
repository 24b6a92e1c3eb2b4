"""A verifier on a fake target, served over a real unix socket in this process, and its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from graph_runtime.projection import RowProjection
from splitspec.channels import CLIENT_OPTIONS
from splitspec.errors import EngineFailed
from splitspec.serving import Lifecycle
from splitspec.v1 import rows_pb2, sampling_pb2, verifier_pb2_grpc
from splitspec.v1 import verifier_pb2 as pb
from tests.fakes import FakeTarget
from verifier_service.config import VerifierConfig
from verifier_service.engine import Engine
from verifier_service.server import SERVICE_NAME, serve_verifier

LIMIT_SECONDS = 20.0


@dataclass
class Service:
    """A running service."""

    target: FakeTarget
    lifecycle: Lifecycle
    channel: grpc.aio.Channel
    address: str
    engine: Engine
    task: asyncio.Task[None]
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def stub(self) -> verifier_pb2_grpc.VerifierStub:
        return verifier_pb2_grpc.VerifierStub(self.channel)

    async def health(self) -> int:
        response = await health_pb2_grpc.HealthStub(self.channel).Check(
            health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        )
        return response.status

    async def until_slots(self, count: int, limit_seconds: float = 1.0) -> None:
        """Wait until `count` slots are held."""
        async with asyncio.timeout(limit_seconds):
            while self.engine.used_slot_count != count:
                await asyncio.sleep(0.005)


class Stream:
    """One RunSteps call."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.number = 0

    async def send(self, *items: pb.VerifyItem) -> None:
        self.number += 1
        await self.call.write(pb.VerifierRunStepsRequest(step=self.number, items=items))

    async def run(self, *items: pb.VerifyItem) -> list[pb.VerifyItemResult]:
        await self.send(*items)
        async with asyncio.timeout(LIMIT_SECONDS):
            reply = await self.call.read()
        if reply is grpc.aio.EOF:
            await self.call  # raises the stream's status
        assert reply.step == self.number
        assert len(reply.results) == len(items)
        return list(reply.results)

    async def start(self, session: int, prompt: Sequence[int], **sampling: Any) -> int:
        """Open and prefill; return the prefill bonus."""
        opened, chunk = await self.run(opening(session, **sampling), prefill(session, 0, prompt))
        assert not opened.HasField("error"), opened.error
        assert not chunk.HasField("error"), chunk.error
        return chunk.prefill.bonus_token_id

    async def status(self) -> grpc.StatusCode:
        async with asyncio.timeout(LIMIT_SECONDS):
            return await self.call.code()


def opening(
    session: int, row_kind: rows_pb2.RowKind = rows_pb2.ROW_KIND_RAW_TAPS, **sampling: Any
) -> Any:
    parameters = sampling_pb2.SamplingParameters(**sampling)
    opened = pb.OpenSession(sampling=parameters, row_kind=row_kind)
    return pb.VerifyItem(session=session, committed_length=0, open=opened)


def prefill(session: int, length: int, token_ids: Sequence[int], final: bool = True) -> Any:
    chunk = pb.PrefillChunk(token_ids=token_ids, final=final)
    return pb.VerifyItem(session=session, committed_length=length, prefill=chunk)


def window(session: int, length: int, pending: int, drafts: Sequence[int] = ()) -> Any:
    verify = pb.VerifyWindow(pending_token_id=pending, draft_token_ids=drafts)
    return pb.VerifyItem(session=session, committed_length=length, verify=verify)


def release(session: int) -> Any:
    return pb.VerifyItem(session=session, release=pb.ReleaseSession())


@asynccontextmanager
async def serving(
    folder: Path,
    target: FakeTarget | None = None,
    load: Callable[[Engine], Engine] = lambda engine: engine,
    fusion: RowProjection | None = None,
    **flags: Any,
) -> AsyncIterator[Service]:
    """Serve `target` while the block runs; `load` runs on the engine's thread.

    The block may have ended the service by itself.
    """
    target = target or FakeTarget()
    lifecycle, ready = Lifecycle(), asyncio.Event()
    engine = Engine(target, max_draft_count=7, fusion=fusion)
    config = VerifierConfig(model="fake", address=f"unix:{folder}/verifier.sock", **flags)
    task = asyncio.create_task(
        serve_verifier(
            config, lambda: load(engine), lifecycle=lifecycle, on_ready=lambda _: ready.set()
        )
    )
    options = [*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(config.address, options=options) as channel:
        service = Service(target, lifecycle, channel, config.address, engine, task, ready)
        try:
            await channel.channel_ready()
            yield service
        finally:
            lifecycle.drain()
            if target.gate is not None:
                target.gate.set()
    async with asyncio.timeout(LIMIT_SECONDS):
        try:
            await task
        except EngineFailed:
            assert lifecycle.failure is not None


@asynccontextmanager
async def stream_of(service: Service) -> AsyncIterator[Stream]:
    """Open a stream and cancel it at the end."""
    async with asyncio.timeout(LIMIT_SECONDS):
        await service.ready.wait()
    stream = Stream(service.stub.RunSteps())
    try:
        yield stream
    finally:
        stream.call.cancel()
