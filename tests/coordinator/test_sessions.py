"""A session's lengths (L1, L3), and the queue in front of the slots."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.sessions import Admission, LinkLost, PeerAbsent, Session
from splitspec.errors import CommittedLengthMismatch, QueueFull, SplitspecError
from splitspec.v1 import sampling_pb2


def _session(**fields: Any) -> Session:
    settings: dict[str, Any] = {
        "tokens": [1, 2, 3],
        "prompt_length": 3,
        "output_limit": 10,
        "draft_count": 7,
        "sampling": sampling_pb2.SamplingParameters(seed=1),
    }
    session = Session(**{**settings, **fields})
    session.committed_length = 3
    return session


def test_l1_and_l3_hold_after_every_round() -> None:
    session = _session()
    assert session.start(9) == [9]
    assert session.commit([4, 5, 6], 2, 7) == [4, 5, 7]
    assert session.tokens == [1, 2, 3, 9, 4, 5, 7]
    assert session.committed_length == 6
    assert session.acceptance_length_counts == [0, 0, 1]
    assert session.commit([], 0, 8) == [8]
    assert session.acceptance_length_counts == [1, 0, 1]
    assert session.target_only_round_count == 1


def test_l3_more_accepted_than_drafted_is_our_own_bug() -> None:
    session = _session()
    session.start(9)
    with pytest.raises(AssertionError, match="L3"):
        session.commit([4], 3, 7)


def test_l1_a_committed_length_that_does_not_go_with_the_tokens_is_our_own_bug() -> None:
    session = _session()
    session.committed_length = 2
    with pytest.raises(AssertionError, match="L1"):
        session.start(9)


def test_k_shrinks_to_what_is_left_to_emit() -> None:
    session = _session(output_limit=6)
    session.start(9)
    assert session.draft_room(7) == 4
    assert session.draft_room(3) == 3  # what the verifier takes
    session.commit([4, 5], 2, 7)
    assert session.draft_room(7) == 1
    session.commit([], 0, 7)
    assert session.draft_room(7) == 0


@pytest.mark.parametrize(
    "errors",
    [
        [CommittedLengthMismatch("a"), CommittedLengthMismatch("b")],
        [LinkLost("a")] * 5,
        [PeerAbsent("a")],
    ],
)
def test_replays_end_where_they_do_not_help(errors: list[SplitspecError]) -> None:
    session = _session()
    session.start(9)
    for error in errors[:-1]:
        session.begin_replay(error)
        assert session.committed_length == 0
    with pytest.raises(type(errors[-1])):
        session.begin_replay(errors[-1])
    assert session.tokens == [1, 2, 3, 9]


def test_a_round_between_losses_makes_replays_worth_it_again() -> None:
    session = _session(output_limit=100)
    session.start(9)
    for _ in range(20):
        session.begin_replay(LinkLost("a"))
        session.committed_length = len(session.tokens) - 1
        session.commit([], 0, 7)


async def _hold(admission: Admission, order: list[int], number: int, release: Any) -> None:
    async with admission.slot(lambda: None):
        order.append(number)
        await release.wait()


async def test_waiting_requests_are_admitted_in_order_of_arrival() -> None:
    admission = Admission(queue_limit=8, wait_seconds=5)
    admission.resize(2)
    order: list[int] = []
    releases = [asyncio.Event() for _ in range(6)]
    tasks = []
    for i in range(6):
        tasks.append(asyncio.create_task(_hold(admission, order, i, releases[i])))
        await asyncio.sleep(0)
    assert order == [0, 1]
    assert (admission.running_count, admission.waiting_count) == (2, 4)
    for release in releases:
        release.set()
    await asyncio.gather(*tasks)
    assert order == list(range(6))
    assert (admission.running_count, admission.waiting_count) == (0, 0)


async def test_a_full_queue_refuses_and_a_wait_has_a_limit() -> None:
    admission = Admission(queue_limit=1, wait_seconds=0.05)
    admission.resize(1)
    order: list[int] = []
    release = asyncio.Event()
    first = asyncio.create_task(_hold(admission, order, 0, release))
    await asyncio.sleep(0)
    second = asyncio.create_task(_hold(admission, order, 1, release))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="queue holds 1"):
        await _hold(admission, order, 2, release)
    with pytest.raises(QueueFull, match="no slot came free"):
        await second
    release.set()
    await first
    assert order == [0]
    assert (admission.running_count, admission.waiting_count) == (0, 0)


async def test_a_cancelled_wait_leaves_the_queue_and_keeps_no_slot() -> None:
    admission = Admission(queue_limit=8, wait_seconds=5)
    admission.resize(1)
    order: list[int] = []
    release = asyncio.Event()
    tasks = [asyncio.create_task(_hold(admission, order, i, release)) for i in range(4)]
    await asyncio.sleep(0.01)
    tasks[1].cancel()
    await asyncio.sleep(0)
    assert admission.waiting_count == 2
    release.set()
    tasks[2].cancel()  # at the moment when its turn may come
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 3]
    assert (admission.running_count, admission.waiting_count) == (0, 0)


async def test_a_verifier_that_comes_back_with_more_slots_admits_more() -> None:
    admission = Admission(queue_limit=8, wait_seconds=5)
    order: list[int] = []
    release = asyncio.Event()
    tasks = [asyncio.create_task(_hold(admission, order, i, release)) for i in range(3)]
    await asyncio.sleep(0)
    assert order == []
    admission.resize(2)
    await asyncio.sleep(0.01)
    assert order == [0, 1]
    release.set()
    await asyncio.gather(*tasks)
