"""How every splitspec process serves gRPC: health, reflection, errors, drain, one way out.

A service writes handlers that raise `SplitspecError`; everything between them and the process's
exit code is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from splitspec.channels import SERVER_OPTIONS
from splitspec.errors import Draining, EngineFailed, NotReady, UserError
from splitspec.metrics import serving_metrics
from splitspec.wire_errors import (
    ErrorInterceptor,
    abort,
    error_from_item,
    error_from_rpc,
    item_error,
    status_of,
)

__all__ = [
    "Lifecycle",
    "ServiceEntry",
    "abort",
    "bind",
    "error_from_item",
    "error_from_rpc",
    "item_error",
    "run_service",
    "serve",
    "status_of",
]

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""How long a drain waits for calls in flight."""
FAILURE_GRACE_SECONDS = 1.0
"""After a device fault calls cannot finish; this is for their error statuses to leave."""


class Lifecycle:
    """Where a process is between loading and gone. `serve` drives it, servicers read it."""

    def __init__(self) -> None:
        self.ready = False
        self.draining = False
        self.failure: EngineFailed | None = None
        self.set_health: Callable[[bool], Awaitable[None]] | None = None
        """Set by `serve`: says SERVING or NOT_SERVING between ready and drain, for a service that
        needs a peer (the coordinator its verifier)."""
        self._stopping = asyncio.Event()
        self._idle: set[asyncio.Task[Any]] = set()

    def require_serving(self) -> None:
        """Raise NotReady while loading and Draining after a stop was asked for."""
        if self.failure is not None:
            raise self.failure
        if self.draining:
            raise Draining("the service is shutting down")
        if not self.ready:
            raise NotReady("the service is still loading")

    def drain(self) -> None:
        """Begin to stop: nothing new is taken, idle streams end, calls in flight may finish."""
        self.draining = True
        self._stopping.set()
        for task in self._idle:
            task.cancel()

    def fail(self, error: EngineFailed) -> None:
        """Report a device fault: the service reports NOT_SERVING and its process exits."""
        logger.error("the engine failed: %s", error.message)
        self.failure = self.failure or error
        self.drain()

    async def stopping(self) -> None:
        """Return once `drain` or `fail` was called."""
        await self._stopping.wait()

    async def next_request(self, context: Any, *, idle: bool) -> Any | None:
        """Read a stream's next request; None when the client has sent its last.

        `idle` says that the stream holds no session. An idle stream does not outlive the service:

        Raises:
            Draining: the stream is idle and the service stops.
        """
        task = asyncio.current_task()
        assert task is not None
        if idle and self.draining:
            raise Draining("the service is shutting down")
        if idle:
            self._idle.add(task)
        try:
            request = await context.read()
        except asyncio.CancelledError:
            if idle and self.draining and not context.cancelled():
                task.uncancel()
                raise Draining("the service is shutting down") from None
            raise
        finally:
            self._idle.discard(task)
        return None if request is grpc.aio.EOF else request


@dataclass(frozen=True, kw_only=True)
class ServiceEntry:
    """One gRPC service of a process."""

    name: str
    """Full name, e.g. "splitspec.v1.Drafter"."""
    register: Callable[[grpc.aio.Server], None]
    """Adds the servicer to a server, e.g. partial(add_DrafterServicer_to_server, servicer)."""


async def serve(
    *,
    address: str,
    services: Sequence[ServiceEntry],
    lifecycle: Lifecycle,
    prepare: Callable[[], Awaitable[None]] | None = None,
    finish: Callable[[], Awaitable[None]] | None = None,
    on_ready: Callable[[str], None] | None = None,
    metrics_address: str | None = None,
    registry: CollectorRegistry | None = None,
    grace_seconds: float = GRACE_SECONDS,
) -> None:
    """Serve until SIGTERM, SIGINT or a failure; returns after a clean drain.

    The port is bound first and health says NOT_SERVING while `prepare` loads, then SERVING, and
    `on_ready` gets the bound address. At the end health says NOT_SERVING before anything else, and
    `finish` returns when the calls in flight are done: until then new ones are refused by the
    servicer and by name, where gRPC's own stop would cancel them.

    Raises:
        UserError: an address cannot be bound, or `prepare` met a user's mistake.
        EngineFailed: the engine reported a device fault.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[ErrorInterceptor()])
    probe = health.aio.HealthServicer()
    names = ["", *(entry.name for entry in services)]
    await _set_health(probe, names, health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(probe, server)
    for entry in services:
        entry.register(server)
    reflection.enable_server_reflection(
        [*names[1:], health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    bound = bind(server, address)
    with serving_metrics(metrics_address, registry), _drain_on_signals(lifecycle):
        await server.start()
        try:
            if await _prepared(prepare, lifecycle):
                lifecycle.ready = True
                lifecycle.set_health = partial(_report_health, probe, names)
                await lifecycle.set_health(True)
                logger.info("serving on %s", bound)
                if on_ready is not None:
                    on_ready(bound)
                await lifecycle.stopping()
        finally:
            lifecycle.drain()
            await probe.enter_graceful_shutdown()
            if finish is not None and lifecycle.failure is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(finish(), grace_seconds)
            await server.stop(FAILURE_GRACE_SECONDS if lifecycle.failure else grace_seconds)
    if lifecycle.failure is not None:
        raise lifecycle.failure


async def _prepared(prepare: Callable[[], Awaitable[None]] | None, lifecycle: Lifecycle) -> bool:
    """Run `prepare` unless a stop comes first; return whether it finished."""
    if prepare is None:
        return not lifecycle.draining
    work = asyncio.ensure_future(prepare())
    stop = asyncio.ensure_future(lifecycle.stopping())
    await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if work.done():
        work.result()
        return not lifecycle.draining
    work.cancel()
    return False


async def _report_health(probe: Any, names: Sequence[str], serving: bool) -> None:
    status = health_pb2.HealthCheckResponse
    await _set_health(probe, names, status.SERVING if serving else status.NOT_SERVING)


async def _set_health(probe: Any, names: Sequence[str], status: int) -> None:
    for name in names:
        await probe.set(name, status)


@contextlib.contextmanager
def _drain_on_signals(lifecycle: Lifecycle) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lifecycle.drain)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def bind(server: grpc.aio.Server, address: str) -> str:
    """Bind `address` (host:port or unix:/path) and return it with the real port.

    Raises:
        UserError: it cannot be bound; names the address and why.
    """
    try:
        # NOTE: gRPC logs bind failures to stderr and takes over the unix socket of a live process,
        # so what is in use is found out before it tries.
        if address.startswith("unix:"):
            _check_unix_address(address.removeprefix("unix:"))
        else:
            _check_tcp_address(address)
        port = server.add_insecure_port(address)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot listen on {address}: {reason}") from error
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def _check_unix_address(path: str) -> None:
    with (
        socket.socket(socket.AF_UNIX) as probe,
        contextlib.suppress(FileNotFoundError, ConnectionRefusedError),
    ):
        probe.connect(path)
        raise OSError("another process listens there")


def _check_tcp_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise OSError("expected host:port or unix:/path")
    family, kind, _, _, where = socket.getaddrinfo(
        host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)


def run_service(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end on a uvloop event loop (asyncio's own where uvloop does not exist)."""
    if sys.platform == "win32":
        asyncio.run(main)
        return
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)
