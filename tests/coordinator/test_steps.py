"""The link: who goes into a step, in which order, and what a loss does to what waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.batching import Rank
from coordinator.sessions import LinkLost, PeerAbsent
from coordinator.steps import LinkLimits, StepLink
from coordinator.verifier import DIALECT, chunk_spans
from splitspec.errors import NoFreeSlot, SessionNotFound
from splitspec.v1 import rows_pb2
from splitspec.v1 import verifier_pb2 as pb
from tests.coordinator.fakes.verifier import FakeVerifier

OPEN = pb.OpenSession(sampling={}, row_kind=rows_pb2.ROW_KIND_NONE)


class Recorder(FakeVerifier):
    """A verifier that remembers its steps as (session, action) pairs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "t")
        self.steps: list[list[tuple[int, str]]] = []

    def run(self, sessions: Any, request: Any, error: Any) -> Any:
        self.steps.append([(item.session, item.WhichOneof("action")) for item in request.items])
        return super().run(sessions, request, error)


@asynccontextmanager
async def _link(folder: Path, **limits: Any) -> AsyncIterator[tuple[Recorder, StepLink]]:
    peer = Recorder(folder)
    await peer.start()
    link = StepLink(
        dialect=DIALECT,
        address=peer.address,
        limits=LinkLimits(**limits),
        accept=lambda _: None,
    )
    link.start()
    try:
        await link.ready(5)
        yield peer, link
    finally:
        await link.close()
        await peer.close()


def _submit(link: StepLink, rank: Rank, session: int, length: int = 0, **action: Any) -> Any:
    cost = len(action["prefill"].token_ids) if "prefill" in action else 0
    item = pb.VerifyItem(session=session, committed_length=length, **action)
    return link.submit(link.epoch, rank, session, item, cost)


def _prefill(count: int, final: bool = False) -> pb.PrefillChunk:
    return pb.PrefillChunk(token_ids=[5] * count, final=final)


VERIFY = pb.VerifyWindow(pending_token_id=7)


async def _running(link: StepLink, sessions: list[int]) -> None:
    for session in sessions:
        opened = _submit(link, Rank.OPEN, session, open=OPEN)
        await asyncio.gather(opened, _submit(link, Rank.PREFILL, session, prefill=_prefill(1)))


async def test_everything_ready_goes_into_one_step_decode_before_prefill(tmp_path: Path) -> None:
    async with _link(tmp_path) as (peer, link):
        await _running(link, [1, 2])
        peer.steps.clear()
        release = pb.VerifyItem(session=2, release=pb.ReleaseSession())
        waiting = [
            _submit(link, Rank.OPEN, 3, open=OPEN),
            _submit(link, Rank.PREFILL, 3, prefill=_prefill(4)),
            _submit(link, Rank.DECODE, 1, 1, verify=VERIFY),
        ]
        link.release(link.epoch, 2, release)
        await asyncio.gather(*waiting)
        assert peer.steps == [[(2, "release"), (3, "open"), (1, "verify"), (3, "prefill")]]


async def test_what_becomes_ready_while_a_step_runs_waits_and_goes_together(tmp_path: Path) -> None:
    async with _link(tmp_path) as (peer, link):
        await _running(link, [1, 2, 3])
        peer.steps.clear()
        peer.step_seconds = 0.03
        waiting = [_submit(link, Rank.DECODE, 1, 1, verify=VERIFY)]
        await asyncio.sleep(0.01)
        waiting += [_submit(link, Rank.DECODE, s, 1, verify=VERIFY) for s in (2, 3)]
        await asyncio.gather(*waiting)
        assert peer.steps == [[(1, "verify")], [(2, "verify"), (3, "verify")]]


async def test_prefill_keeps_to_its_budget_and_sessions_take_turns(tmp_path: Path) -> None:
    async with _link(tmp_path, step_budget=8) as (peer, link):
        sessions = [1, 2, 3, 4]
        await asyncio.gather(*(_submit(link, Rank.OPEN, s, open=OPEN) for s in sessions))
        await _running(link, [9])
        peer.steps.clear()

        async def prefill(session: int) -> None:
            for i in range(3):
                await _submit(link, Rank.PREFILL, session, 4 * i, prefill=_prefill(4))

        async def decode() -> None:
            for i in range(1, 8):
                await _submit(link, Rank.DECODE, 9, i, verify=VERIFY)

        await asyncio.gather(*(prefill(s) for s in sessions), decode())
        prefills = [[s for s, action in step if action == "prefill"] for step in peer.steps]
        assert max(map(len, prefills)) == 2
        flat = [s for step in prefills for s in step]
        assert flat == sessions * 3
        # No prefill held up the session that decodes: it is in every step until it is done.
        assert all((9, "verify") in step for step in peer.steps[:7])


async def test_an_item_larger_than_the_budget_still_goes(tmp_path: Path) -> None:
    async with _link(tmp_path, step_budget=2) as (_, link):
        opened = _submit(link, Rank.OPEN, 1, open=OPEN)
        prefilled = _submit(link, Rank.PREFILL, 1, prefill=_prefill(6))
        await asyncio.gather(opened, prefilled)


async def test_a_cancelled_item_is_not_sent(tmp_path: Path) -> None:
    async with _link(tmp_path) as (peer, link):
        await _running(link, [1])
        peer.steps.clear()
        cancelled = _submit(link, Rank.DECODE, 1, 1, verify=VERIFY)
        cancelled.cancel()
        await _submit(link, Rank.OPEN, 2, open=OPEN)
        assert peer.steps == [[(2, "open")]]


async def test_a_session_that_ends_before_its_open_was_sent_is_never_sent(tmp_path: Path) -> None:
    async with _link(tmp_path) as (peer, link):
        await _running(link, [1])
        peer.steps.clear()
        peer.step_seconds = 0.02
        running = _submit(link, Rank.DECODE, 1, 1, verify=VERIFY)
        await asyncio.sleep(0.005)
        for session in range(10, 60):
            _submit(link, Rank.OPEN, session, open=OPEN)
            release = pb.VerifyItem(session=session, release=pb.ReleaseSession())
            link.release(link.epoch, session, release)
        await running
        await _submit(link, Rank.DECODE, 1, 2, verify=VERIFY)
        assert peer.steps == [[(1, "verify")], [(1, "verify")]]


async def test_a_step_never_holds_more_items_than_services_take(tmp_path: Path) -> None:
    async with _link(tmp_path) as (peer, link):
        opens = [_submit(link, Rank.OPEN, s, open=OPEN) for s in range(1, 101)]
        outcomes = await asyncio.gather(*opens, return_exceptions=True)
        assert sum(isinstance(outcome, NoFreeSlot) for outcome in outcomes) == 92
        assert max(map(len, peer.steps)) == 4 * peer.model.slot_count


async def test_an_item_error_fails_its_future_alone(tmp_path: Path) -> None:
    async with _link(tmp_path) as (_, link):
        await _running(link, [1])
        bad = _submit(link, Rank.DECODE, 5, 1, verify=VERIFY)
        good = _submit(link, Rank.DECODE, 1, 1, verify=VERIFY)
        with pytest.raises(SessionNotFound):
            await bad
        result, trip = await good
        assert result.committed_length == 2
        assert trip.sent < trip.answered


@pytest.mark.parametrize("fault", ["die", "drop", "die after"])
async def test_a_loss_fails_what_waits_and_the_link_comes_back_by_itself(
    tmp_path: Path, fault: str
) -> None:
    async with _link(tmp_path) as (peer, link):
        await _running(link, [1])
        epoch = link.epoch
        peer.faults = {peer.step_count + 1: fault}
        in_flight = _submit(link, Rank.DECODE, 1, 1, verify=VERIFY)
        await asyncio.sleep(0)
        for answer in (in_flight, _submit(link, Rank.DECODE, 1, 1, verify=VERIFY)):
            with pytest.raises(LinkLost):
                await answer
        assert await link.ready(5) > epoch
        with pytest.raises(LinkLost):  # the session went with its stream (L7)
            await link.submit(epoch, Rank.DECODE, 1, pb.VerifyItem(session=1))
        await _running(link, [2])


async def test_a_loss_while_idle_is_noticed_at_once(tmp_path: Path) -> None:
    async with _link(tmp_path) as (peer, link):
        await peer.kill()
        async with asyncio.timeout(1):
            while link.connected:
                await asyncio.sleep(0.005)
        with pytest.raises(PeerAbsent, match=r"no verifier at unix:.* for 0\.05 s"):
            await link.ready(0.05)


async def test_a_step_that_is_not_answered_in_time_is_a_loss(tmp_path: Path) -> None:
    async with _link(tmp_path, step_seconds=0.1) as (peer, link):
        peer.faults = {peer.step_count + 1: "hang"}
        with pytest.raises(LinkLost, match="no answer"):
            await _submit(link, Rank.OPEN, 1, open=OPEN)
        await link.ready(5)
        await _submit(link, Rank.OPEN, 2, open=OPEN)


@pytest.mark.parametrize("lie", ["step", "session", "fewer"])
async def test_an_answer_that_does_not_belong_to_its_step_is_a_loss(
    tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _link(tmp_path) as (peer, link):
        honest = peer.run

        def run(*arguments: Any) -> Any:
            reply = honest(*arguments)
            if lie == "step":
                reply.step += 1
            elif lie == "session":
                reply.results[0].session += 1
            else:
                del reply.results[0]
            return reply

        monkeypatch.setattr(peer, "run", run)
        with pytest.raises(LinkLost, match="does not belong"):
            await _submit(link, Rank.OPEN, 1, open=OPEN)


@given(
    begin=st.integers(0, 50),
    length=st.integers(0, 300),
    smallest=st.integers(1, 16),
    more=st.integers(0, 64),
)
def test_chunks_cover_their_span_within_the_verifiers_range(
    begin: int, length: int, smallest: int, more: int
) -> None:
    largest = 2 * smallest - 1 + more
    spans = list(chunk_spans(begin, begin + length, smallest, largest))
    assert [p for b, e in spans for p in range(b, e)] == list(range(begin, begin + length))
    sizes = [e - b for b, e in spans]
    assert all(size <= largest for size in sizes)
    if length >= smallest:
        assert all(size >= smallest for size in sizes)
