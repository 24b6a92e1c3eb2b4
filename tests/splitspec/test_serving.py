"""A process's life: bound, loading, serving, draining, gone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from splitspec import probe, serving
from splitspec.errors import Draining, EngineFailed, NotReady, SplitspecError, UserError
from splitspec.serving import Lifecycle, ServiceEntry
from splitspec.v1 import drafter_pb2 as pb
from splitspec.v1.drafter_pb2_grpc import (
    DrafterServicer,
    DrafterStub,
    add_DrafterServicer_to_server,
)

NAME = "splitspec.v1.Drafter"
LIMIT_SECONDS = 20.0


class Echo(DrafterServicer):
    """Answers steps; the stream holds a session from step 2 on."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self.ended: list[str] = []

    async def GetModel(self, request: Any, context: Any) -> pb.DrafterGetModelResponse:
        del request, context
        self._lifecycle.require_serving()
        return pb.DrafterGetModelResponse(method="echo")

    async def RunSteps(self, request_iterator: Any, context: Any) -> None:
        del request_iterator
        step = 0
        try:
            while request := await self._lifecycle.next_request(context, idle=step < 2):
                step = request.step
                await context.write(pb.DrafterRunStepsResponse(step=step))
            self.ended.append("done")
        except SplitspecError as error:
            self.ended.append(error.reason)
            raise
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise


class Running:
    """A process under test, in this event loop."""

    def __init__(self, address: str, **options: Any) -> None:
        self.lifecycle = Lifecycle()
        self.servicer = Echo(self.lifecycle)
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        register = partial(add_DrafterServicer_to_server, self.servicer)
        self.task = asyncio.ensure_future(
            serving.serve(
                address=address,
                services=[ServiceEntry(name=NAME, register=register)],
                lifecycle=self.lifecycle,
                on_ready=self.ready.set_result,
                **{"grace_seconds": 5.0, **options},
            )
        )

    async def end(self) -> None:
        """Return when the process is gone; raise what ended it."""
        async with asyncio.timeout(LIMIT_SECONDS):
            await self.task


@asynccontextmanager
async def running(address: str, **options: Any) -> AsyncIterator[tuple[Running, DrafterStub]]:
    process = Running(address, **options)
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            yield process, DrafterStub(channel)
        finally:
            process.lifecycle.drain()
            await asyncio.wait({process.task}, timeout=LIMIT_SECONDS)


async def health(address: str, service: str = "") -> str:
    """Return the peer's health, waiting until it answers."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            try:
                return await probe.peer_health(address, service)
            except NotReady:
                await asyncio.sleep(0.01)


async def test_health_goes_from_not_serving_to_serving_to_not_serving(tmp_path: Path) -> None:
    address, loaded = f"unix:{tmp_path}/s", asyncio.Event()

    async def prepare() -> None:
        await loaded.wait()

    async with running(address, prepare=prepare) as (process, stub):
        assert await health(address) == "NOT_SERVING"
        assert await health(address, NAME) == "NOT_SERVING"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModel(pb.DrafterGetModelRequest())
        assert isinstance(serving.error_from_rpc(caught.value), NotReady)
        loaded.set()
        assert await process.ready == address
        assert await health(address) == "SERVING"
        assert await health(address, NAME) == "SERVING"
        with pytest.raises(SplitspecError) as unknown:
            await probe.peer_health(address, "splitspec.v1.Nothing")
        assert unknown.value.reason == "NOT_FOUND"
        call = stub.RunSteps()
        for step in (1, 2):
            await call.write(pb.DrafterRunStepsRequest(step=step))
            await call.read()
        process.lifecycle.drain()  # the stream holds a session: the process waits for it
        assert await health_while_draining(address) == "NOT_SERVING"
        await call.write(pb.DrafterRunStepsRequest(step=3))
        assert (await call.read()).step == 3
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await process.end()
        assert process.servicer.ended == ["done"]


async def health_while_draining(address: str) -> str:
    """Return NOT_SERVING whether health says so or the port takes no calls any more."""
    try:
        return await probe.peer_health(address)
    except SplitspecError as error:
        if error.reason not in ("NOT_READY", "CANCELLED"):
            raise
        return "NOT_SERVING"


async def test_reflection_lists_the_services(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    async with running(address) as (process, _), grpc.aio.insecure_channel(address) as channel:
        await process.ready
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        reply = await call.read()
        names = {service.name for service in reply.list_services_response.service}
        call.cancel()
    assert names >= {NAME, "grpc.health.v1.Health"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_idle_streams_at_once(tmp_path: Path, number: int) -> None:
    async with running(f"unix:{tmp_path}/s") as (process, stub):
        await process.ready
        silent, used = stub.RunSteps(), stub.RunSteps()
        await used.write(pb.DrafterRunStepsRequest(step=1))
        await used.read()
        await stub.GetModel(pb.DrafterGetModelRequest())
        os.kill(os.getpid(), number)
        for call in (silent, used):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async with asyncio.timeout(LIMIT_SECONDS):
                    await call.read()
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert isinstance(serving.error_from_rpc(caught.value), Draining)
        await process.end()
        assert process.servicer.ended[-1] == "DRAINING"


async def test_a_stream_that_does_not_end_is_cut_when_grace_is_over(tmp_path: Path) -> None:
    async with running(f"unix:{tmp_path}/s", grace_seconds=0.2) as (process, stub):
        await process.ready
        call = stub.RunSteps()
        for step in (1, 2):
            await call.write(pb.DrafterRunStepsRequest(step=step))
            await call.read()
        process.lifecycle.drain()
        await process.end()
        # gRPC ends a cancelled read with an end of stream or with a cancellation of the handler.
        assert process.servicer.ended in (["done"], ["cancelled"])


async def test_a_client_that_cancels_ends_the_handler_and_is_no_drain(tmp_path: Path) -> None:
    async with running(f"unix:{tmp_path}/s") as (process, stub):
        await process.ready
        call = stub.RunSteps()
        await call.write(pb.DrafterRunStepsRequest(step=1))
        await call.read()
        call.cancel()
        async with asyncio.timeout(LIMIT_SECONDS):
            while not process.servicer.ended:
                await asyncio.sleep(0.01)
        # gRPC ends a cancelled read with an end of stream or with a cancellation of the handler.
        assert process.servicer.ended in (["done"], ["cancelled"])


async def test_a_users_mistake_while_loading_ends_the_process_with_it(tmp_path: Path) -> None:
    async def prepare() -> None:
        raise UserError("no such model")

    async with running(f"unix:{tmp_path}/s", prepare=prepare) as (process, _):
        with pytest.raises(UserError, match="no such model"):
            await process.end()
        assert not process.ready.done()


async def test_a_stop_while_loading_ends_the_process_without_serving(tmp_path: Path) -> None:
    async with running(f"unix:{tmp_path}/s", prepare=asyncio.Event().wait) as (process, _):
        await health(f"unix:{tmp_path}/s")
        process.lifecycle.drain()
        await process.end()
        assert not process.ready.done()


async def test_an_engine_failure_reports_not_serving_and_ends_the_process(tmp_path: Path) -> None:
    async with running(f"unix:{tmp_path}/s") as (process, _):
        await process.ready
        process.lifecycle.fail(EngineFailed("the device is gone"))
        with pytest.raises(EngineFailed, match="the device is gone"):
            process.lifecycle.require_serving()
        with pytest.raises(EngineFailed, match="the device is gone"):
            await process.end()


async def test_port_0_is_a_free_port_that_on_ready_is_told() -> None:
    process = Running("127.0.0.1:0")
    address = await process.ready
    assert address.startswith("127.0.0.1:")
    assert not address.endswith(":0")
    assert await health(address) == "SERVING"
    process.lifecycle.drain()
    await process.end()


def _held_tcp(_: Path) -> tuple[socket.socket, str]:
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    holder.listen()
    return holder, f"127.0.0.1:{holder.getsockname()[1]}"


def _held_unix(folder: Path) -> tuple[socket.socket, str]:
    holder = socket.socket(socket.AF_UNIX)
    holder.bind(f"{folder}/s")
    holder.listen()
    return holder, f"unix:{folder}/s"


@pytest.mark.parametrize("hold", [_held_tcp, _held_unix])
async def test_an_address_in_use_is_the_users_mistake(
    tmp_path: Path, hold: Callable[[Path], tuple[socket.socket, str]]
) -> None:
    holder, address = hold(tmp_path)
    with holder, pytest.raises(UserError, match=f"cannot listen on {address}: "):
        await Running(address).end()


@pytest.mark.parametrize(
    "address", ["nonsense", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", "unix:/nowhere/at/all"]
)
async def test_an_address_that_is_none_is_the_users_mistake(address: str) -> None:
    with pytest.raises(UserError, match="cannot listen on") as caught:
        await Running(address).end()
    assert "\n" not in str(caught.value)


async def test_the_metrics_address_is_bound_before_anything_is_loaded(tmp_path: Path) -> None:
    from splitspec.metrics import new_registry

    async def prepare() -> None:
        raise AssertionError("loaded")

    process = Running(
        f"unix:{tmp_path}/s", metrics_address="x", registry=new_registry(), prepare=prepare
    )
    with pytest.raises(UserError, match="metrics address"):
        await process.end()


def test_run_service_runs_on_uvloop_and_raises_what_the_service_raised() -> None:
    import uvloop

    async def main() -> None:
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
        raise UserError("a mistake")

    with pytest.raises(UserError, match="a mistake"):
        serving.run_service(main())


async def test_the_probe_command_tells_health_by_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"unix:{tmp_path}/s"
    async with running(address) as (process, _):
        await process.ready
        assert await asyncio.to_thread(probe.main, [address]) == 0
        assert await asyncio.to_thread(probe.main, [address, NAME]) == 0
        assert await asyncio.to_thread(probe.main, [address, "splitspec.v1.Nothing"]) == 1
    assert await asyncio.to_thread(probe.main, [f"unix:{tmp_path}/nobody"]) == 1
    assert await asyncio.to_thread(probe.main, []) == 2
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["SERVING", "SERVING"]
    assert printed[3].startswith("unreachable: ")
