"""The one thread that owns the device: one hand-off in and one out a step."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Job = tuple[Callable[[], Any], Callable[[Any, Exception | None], None]]


class EngineThread:
    """Runs jobs in order on one thread."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        # Daemon: a device call that hangs must not keep a failed process alive.
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    async def call(self, job: Callable[[], T]) -> T:
        """Run `job` after those that wait and return what it returns, or raise what it raises.

        A caller that is cancelled leaves; the job still runs.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(value: Any, error: Exception | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(value)
            else:
                done.set_exception(error)

        def answer(value: Any, error: Exception | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, value, error)

        self._jobs.put((job, answer))
        return await done

    def post(self, job: Callable[[], None]) -> None:
        """Run `job` after those that wait; nobody waits for it. It must not raise."""
        self._jobs.put((job, _unheard))

    def close(self, timeout_seconds: float) -> None:
        """End the thread after the jobs that wait; give up on a job that hangs."""
        self._jobs.put(None)
        self._thread.join(timeout_seconds)

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, answer = entry
            try:
                value = job()
            except Exception as error:
                answer(None, error)
            else:
                answer(value, None)


def _unheard(value: Any, error: Exception | None) -> None:
    del value
    if error is not None:
        logger.error("a job that nobody waits for failed", exc_info=error)
