"""A drafter that is too short or full: what a session's lane sends, holds and asks a replay for."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from coordinator.batching import Answer, Rank, Trip
from coordinator.drafter import DrafterPatience, RemoteDrafter
from coordinator.sessions import Session
from coordinator.steps import StepLink
from splitspec.errors import NoFreeSlot
from splitspec.rows import encode_rows
from splitspec.v1 import drafter_pb2, rows_pb2, sampling_pb2
from tests.coordinator.fakes.drafter import Context
from tests.coordinator.fakes.stand import PROMPT, stand
from tests.coordinator.fakes.target import VOCAB_SIZE, continuation, row_bytes
from tests.coordinator.fakes.verifier import RAW

CONTEXT_LENGTH = 20
EAGER = DrafterPatience(retry_seconds=0.0)


@dataclass
class RecordingLink(StepLink):
    """A link that answers opens when told to, and every other item at once."""

    row_kind: rows_pb2.RowKind = RAW.kind
    refuses: bool = False
    holds_opens: bool = False
    items: list[Any] = field(default_factory=list)
    opens: list[Answer] = field(default_factory=list)
    epoch: int = 1
    connected: bool = True

    def __post_init__(self) -> None:
        self.model = drafter_pb2.DrafterGetModelResponse(
            row_kind=self.row_kind, max_draft_count=7, max_context_length=CONTEXT_LENGTH
        )

    def new_session(self) -> int:
        return len(self.items) + 1

    def submit(self, epoch: int, rank: Rank, session: int, item: Any, cost: int = 0) -> Answer:
        del rank, session, cost
        assert epoch == self.epoch
        self.items.append(item)
        answer: Answer = asyncio.get_running_loop().create_future()
        if item.HasField("open"):
            self.opens.append(answer)
            if self.refuses:
                answer.set_exception(NoFreeSlot("every slot is taken"))
            if self.refuses or self.holds_opens:
                return answer
        result = drafter_pb2.DraftItemResult(
            context_length=item.context_length + len(item.draft.token_ids)
        )
        result.draft.draft_token_ids.extend([1] * item.draft.draft_count)
        answer.set_result((result, Trip(0.0, 0.0, 0.0)))
        return answer

    def release(self, epoch: int, session: int, item: Any) -> None:
        del epoch, session
        self.items.append(item)

    @property
    def actions(self) -> list[str]:
        return [item.WhichOneof("action") for item in self.items]


def lane_on(link: RecordingLink) -> RemoteDrafter:
    """Return a lane that tries again at once."""
    return RemoteDrafter(link, EAGER, VOCAB_SIZE)


def running(length: int) -> Session:
    """Return a session with `length` committed tokens and a pending one."""
    tokens = [7] * (length + 1)
    return Session(
        tokens=tokens,
        prompt_length=length,
        output_limit=1000,
        draft_count=4,
        sampling=sampling_pb2.SamplingParameters(),
        committed_length=length,
    )


def prompt(length: int) -> Session:
    """Return a session before its prefill."""
    session = running(length)
    session.tokens.pop()
    session.committed_length = 0
    return session


def rows(start: int, count: int) -> rows_pb2.Rows:
    return encode_rows(RAW, start, row_bytes([7] * count, start))


async def prefilled(lane: RemoteDrafter, length: int) -> Session:
    """Run a prompt of `length` as `rounds.prefill` does."""
    session = prompt(length)
    lane.open(session)
    session.committed_length = length
    lane.keep(rows(0, length))
    lane.extend(session)
    await asyncio.sleep(0)
    session.start(7)
    return session


async def target_round(lane: RemoteDrafter, session: Session) -> list[int]:
    """Run one round in which no draft token stands."""
    drafts = await lane.draft(session, 4)
    lane.keep(rows(session.committed_length, 1))
    session.commit(drafts, 0, 7)
    return drafts


async def test_rows_past_the_drafters_context_are_dropped_and_its_slot_is_given_back() -> None:
    link = RecordingLink()
    lane = lane_on(link)
    session = await prefilled(lane, 10)
    drafts = [len(await target_round(lane, session)) for _ in range(100)]
    # A pending token and its drafts fit: 10..15 leave room for 4, then fewer.
    assert drafts == [4, 4, 4, 4, 4, 4, 3, 2, 1, *[0] * 91]
    assert link.actions == ["open", "draft", *["draft"] * 9, "release"]
    assert sum(item.draft.rows.count for item in link.items) == 18
    assert lane._rows == []
    assert not lane.needs_replay(session)
    lane.open(session)  # a replay because of the verifier
    assert lane.row_kind == rows_pb2.ROW_KIND_NONE
    assert link.actions[-1] == "release"


@pytest.mark.parametrize(("length", "fits"), [(18, True), (19, False), (30, False)])
async def test_a_prompt_that_leaves_no_room_for_a_draft_token_takes_no_slot_and_asks_for_no_rows(
    length: int, fits: bool
) -> None:
    link = RecordingLink()
    lane = lane_on(link)
    lane.open(prompt(length))
    assert (lane.row_kind == RAW.kind) == fits == bool(link.items)
    lane.keep(rows(0, length))
    assert bool(lane._rows) == fits
    session = running(length)
    assert len(await lane.draft(session, 4)) == fits
    assert not lane.needs_replay(session)


async def test_a_full_drafter_is_asked_again_but_a_replay_waits_for_a_granted_slot() -> None:
    link = RecordingLink(refuses=True)
    lane = lane_on(link)
    session = await prefilled(lane, 4)
    for _ in range(3):
        assert not lane.needs_replay(session)
        assert await target_round(lane, session) == []
        await asyncio.sleep(0)
    assert link.actions.count("open") == 4
    link.refuses, link.holds_opens = False, True
    assert await target_round(lane, session) == []
    await asyncio.sleep(0)
    assert not lane.needs_replay(session)
    link.opens[-1].set_result((drafter_pb2.DraftItemResult(), Trip(0.0, 0.0, 0.0)))
    await asyncio.sleep(0)
    assert lane.needs_replay(session)
    before = len(link.items)
    session.committed_length = 0
    lane.open(session)
    assert len(link.items) == before, "the replay keeps the slot that was granted"
    assert lane.row_kind == RAW.kind
    lane.keep(rows(0, session.prefill_end))
    session.committed_length = session.prefill_end
    lane.extend(session)
    assert not lane.needs_replay(session)
    assert await target_round(lane, session) == [1] * 4


async def test_a_slot_that_waits_for_a_replay_takes_no_rows_and_goes_when_the_context_is_full() -> (
    None
):
    link = RecordingLink(refuses=True)
    lane = lane_on(link)
    session = await prefilled(lane, 17)
    link.refuses = False
    await target_round(lane, session)
    await asyncio.sleep(0)
    assert lane.needs_replay(session)
    await target_round(lane, session)
    assert lane._rows == []
    assert not lane.needs_replay(session)
    await target_round(lane, session)
    assert link.actions[-1] == "release"


async def test_a_drafter_that_wants_no_rows_drafts_as_soon_as_it_has_a_slot() -> None:
    link = RecordingLink(row_kind=rows_pb2.ROW_KIND_NONE, refuses=True)
    lane = lane_on(link)
    session = prompt(4)
    lane.open(session)
    session.committed_length = 4
    await asyncio.sleep(0)
    session.start(7)
    link.refuses = False
    assert await lane.draft(session, 4) == [1] * 4
    assert not lane.needs_replay(session)


async def test_l4_rows_are_not_asked_for_where_the_prompt_is_too_long_for_the_drafter() -> None:
    async with stand(wants_rows=True, drafter_model={"max_context_length": 11}) as s:
        answer = await s.generate(max_tokens=20)
        assert answer.token_ids == continuation(PROMPT, None, 20)
        assert s.verifier.opened_kinds == [rows_pb2.ROW_KIND_NONE]


async def test_l4_an_answer_outgrows_the_drafter_whose_slot_is_free_before_it_ends() -> None:
    async with stand(wants_rows=True, drafter_model={"max_context_length": 40}) as s:
        assert s.drafter is not None
        held: list[int] = []

        def look(_: int) -> None:
            assert s.drafter is not None
            held.append(s.drafter.session_count)

        s.verifier.step_seconds = 0.005
        answer = await s.generate(look, max_tokens=100)
        assert answer.token_ids == continuation(PROMPT, None, 100)
        assert answer.statistics.draft_token_count > 0
        assert answer.statistics.replay_count == 0
        assert held[0] == 1
        assert held[-1] == 0
        assert s.drafter.problems == []


async def test_l4_a_session_without_a_drafters_slot_is_replayed_once_and_only_after_one_is_free(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    monkeypatch.setattr(
        "coordinator.links.DrafterPatience", lambda **fields: replace(EAGER, **fields)
    )
    metrics = f"127.0.0.1:{unused_tcp_port}"
    async with stand(
        wants_rows=True, drafter_model={"slot_count": 1}, metrics_address=metrics
    ) as s:
        assert s.drafter is not None
        s.drafter.held["another coordinator"] = {1: Context(None)}
        s.verifier.step_seconds = 0.003
        answer = await s.generate(max_tokens=60, draft_count=3)
        assert answer.statistics.replay_count == answer.statistics.draft_token_count == 0

        def free(count: int) -> None:
            if count > 20:
                assert s.drafter is not None
                s.drafter.held.pop("another coordinator", None)

        answer = await s.generate(free, max_tokens=100, draft_count=3)
        assert answer.token_ids == continuation(PROMPT, None, 100)
        assert answer.statistics.replay_count == 1
        assert answer.statistics.draft_token_count > 0
        assert s.drafter.problems == []
        page = await asyncio.to_thread(_page, metrics)
    assert re.findall(r'replays_total\{cause="(\w+)"\} ([1-9]\S*)', page) == [
        ("drafter_back", "1.0")
    ]


def _page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics") as page:
        return str(page.read().decode())
