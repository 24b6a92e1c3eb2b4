"""What a fake verifier and a fake drafter share: a socket, and ways to fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from splitspec.channels import SERVER_OPTIONS
from splitspec.errors import CommittedLengthMismatch, InvalidArgument, NoFreeSlot, SessionNotFound
from splitspec.wire_errors import ErrorInterceptor, item_error

__all__ = [
    "CommittedLengthMismatch",
    "InvalidArgument",
    "NoFreeSlot",
    "Peer",
    "SessionNotFound",
    "item_error",
]


class Peer:
    """A gRPC server on a unix socket that can die, hang and come back.

    `faults` maps the number of a step (counted over the peer's whole life, from 1) to what happens
    then: "die" (before the step is run), "die after" (run, but not answered), "hang", "drop" (the
    stream ends), or a SplitspecError that fails the step's verify, prefill or draft items.
    """

    add_to_server: Callable[[Any, grpc.aio.Server], None]

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.sock"
        self.address = f"unix:{self.path}"
        self.faults: dict[int, Any] = {}
        self.revive_seconds: float | None = 0.05
        self.step_seconds = 0.0
        self.service_seconds = 0.0
        """What the peer says that a step took inside it."""
        self.gate = asyncio.Event()
        """Steps wait while it is not set."""
        self.gate.set()
        self.step_count = 0
        self.held: dict[Any, dict[int, Any]] = {}
        """Sessions by stream."""
        self._server: grpc.aio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._alive = asyncio.Event()

    @property
    def session_count(self) -> int:
        """Return the slots that are taken."""
        return sum(len(sessions) for sessions in self.held.values())

    async def start(self) -> None:
        """Serve."""
        self.held.clear()
        self._alive.set()
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[ErrorInterceptor()])
        type(self).add_to_server(self, self._server)
        self.path.unlink(missing_ok=True)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def kill(self) -> None:
        """End at once, as SIGKILL would: every stream breaks."""
        server, self._server = self._server, None
        self._alive.clear()
        if server is not None:
            await server.stop(None)

    async def close(self) -> None:
        """End for good."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.kill()

    def die(self) -> None:
        """Be killed, and come back after `revive_seconds` (None: never)."""
        task = asyncio.get_running_loop().create_task(self._die())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _die(self) -> None:
        await self.kill()
        if self.revive_seconds is not None:
            await asyncio.sleep(self.revive_seconds)
            await self.start()

    async def RunSteps(self, request_iterator: Any, context: Any) -> Any:
        """Answer steps until the stream ends; its sessions end with it."""
        del context
        stream = object()
        self.held[stream] = {}
        try:
            async for request in request_iterator:
                self.step_count += 1
                fault = self.faults.pop(self.step_count, None)
                if fault == "die":
                    self.die()
                if fault == "drop":
                    return
                if fault in ("die", "hang"):
                    await asyncio.sleep(3600)
                await self.gate.wait()
                if self.step_seconds:
                    await asyncio.sleep(self.step_seconds)
                error = fault if isinstance(fault, Exception) else None
                reply = self.run(self.held[stream], request, error)
                reply.timings.device.FromNanoseconds(round(self.service_seconds * 1e9))
                if fault == "die after":
                    self.die()
                    await asyncio.sleep(3600)
                yield reply
        finally:
            self.held.pop(stream, None)

    def run(self, sessions: dict[int, Any], request: Any, error: Any) -> Any:
        """Run one step."""
        raise NotImplementedError
