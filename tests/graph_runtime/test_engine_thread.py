"""The thread that owns the device: order, errors, callers that leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from graph_runtime.engine_thread import EngineThread


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    thread = EngineThread()
    yield thread
    thread.close(5)


async def test_jobs_run_in_order_on_one_thread_and_answer(thread: EngineThread) -> None:
    names: list[str] = []

    def job(value: int) -> int:
        names.append(threading.current_thread().name)
        return value

    answers = await asyncio.gather(*(thread.call(partial(job, v)) for v in range(20)))
    assert answers == list(range(20))
    assert set(names) == {"engine"}


async def test_what_a_job_raises_its_caller_gets_and_the_thread_goes_on(
    thread: EngineThread,
) -> None:
    def broken() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await thread.call(broken)
    assert await thread.call(lambda: 1) == 1


async def test_a_caller_that_is_cancelled_leaves_and_its_job_still_runs(
    thread: EngineThread,
) -> None:
    gate, ran = threading.Event(), threading.Event()

    def job() -> None:
        assert gate.wait(20)
        ran.set()

    call = asyncio.create_task(thread.call(job))
    await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gate.set()
    await thread.call(lambda: None)
    assert ran.is_set()


async def test_a_posted_job_that_raises_is_logged_and_the_thread_goes_on(
    thread: EngineThread, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ValueError("no")

    thread.post(broken)
    assert await thread.call(lambda: 2) == 2
    assert "nobody waits" in caplog.text


def test_closing_gives_up_on_a_job_that_hangs() -> None:
    thread, gate = EngineThread(), threading.Event()

    def hang() -> None:
        gate.wait(20)

    thread.post(hang)
    thread.close(0.05)
    gate.set()
