"""A round is lossless (L4), keeps the laws, and shares steps: a hash target behind real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from coordinator.drafter import NoDrafter
from coordinator.rounds import prefill
from coordinator.sessions import Session
from splitspec.v1 import generation_pb2 as pb
from splitspec.v1 import rows_pb2, sampling_pb2, verifier_pb2
from tests.coordinator.fakes.stand import PROMPT, Stand, stand
from tests.coordinator.fakes.target import continuation

SAMPLINGS: dict[str, tuple[dict[str, Any], int | None]] = {
    "greedy": ({}, None),
    "seeded": ({"temperature": 0.7, "top_p": 0.9, "seed": 2**63 + 11}, 2**63 + 11),
}


@pytest.mark.parametrize("wants_rows", [False, True])
@pytest.mark.parametrize("kind", ["right", "wrong", "coin-flip", None])
async def test_l4_the_tokens_are_the_targets_own_for_every_k(
    kind: str | None, wants_rows: bool
) -> None:
    async with stand(drafter=kind, wants_rows=wants_rows) as s:
        for sampling, seed in SAMPLINGS.values():
            expected = continuation(PROMPT, seed, 30)
            for count in range(8):
                before = s.verifier.verify_item_count
                answer = await s.generate(sampling=sampling, max_tokens=30, draft_count=count)
                assert answer.token_ids == expected
                # L5: one target pass a round.
                assert s.verifier.verify_item_count - before == answer.statistics.round_count
                _check_statistics(answer.statistics, kind, count)
        await s.settle()


def _check_statistics(statistics: pb.GenerationStatistics, kind: str | None, count: int) -> None:
    counts = statistics.acceptance_length_counts
    assert sum(counts) == statistics.round_count
    # L3: every token but the prefill bonus came from a round.
    assert sum((i + 1) * n for i, n in enumerate(counts)) == 29
    assert statistics.output_token_count == 30
    assert statistics.mean_acceptance_length == pytest.approx(29 / statistics.round_count)
    if kind is None or count == 0:
        assert statistics.round_count == statistics.target_only_round_count == 29
        assert statistics.draft_method == ""
    if kind == "right" and count:
        assert statistics.accepted_token_count == statistics.draft_token_count > 0
        assert statistics.round_count == -(-29 // (count + 1))
        assert statistics.draft_method == "right"
    if kind == "wrong":
        assert statistics.accepted_token_count == 0


@pytest.mark.parametrize("count", [0, 1, 3, 7])
@pytest.mark.parametrize("prompt_length", [1, 100, 119, 126, 127])
async def test_the_context_is_filled_exactly(count: int, prompt_length: int) -> None:
    async with stand() as s:
        prompt = [10 + i % 50 for i in range(prompt_length)]
        answer = await s.generate(prompt=prompt, draft_count=count)
        assert len(answer.token_ids) == 128 - prompt_length
        assert answer.finish.reason == pb.FINISH_REASON_LENGTH
        assert answer.token_ids == continuation(prompt, None, 128 - prompt_length)


@pytest.mark.parametrize("smallest", [1, 3])
async def test_a_prompt_is_cut_into_chunks_that_the_verifier_takes(smallest: int) -> None:
    async with stand(verifier_model={"min_prefill_chunk": smallest}) as s:
        for length in range(smallest, 40):
            prompt = list(range(5, 5 + length))
            answer = await s.generate(prompt=prompt, max_tokens=4)
            assert answer.token_ids == continuation(prompt, None, 4)


@pytest.mark.parametrize("wants_rows", [False, True])
async def test_prefill_rows_reach_the_drafter_chunk_by_chunk(wants_rows: bool) -> None:
    async with stand(wants_rows=wants_rows) as s:
        assert s.drafter is not None
        await s.generate(prompt=list(range(5, 45)), max_tokens=8)
        assert s.drafter.extend_count == 5


class _RecordingVerifier:
    """A verifier lane that writes down what is asked of it, in the drafter lane's list too."""

    max_draft_count = 7

    def __init__(self, calls: list[tuple[str, int]]) -> None:
        self.calls = calls

    async def open(self, session: Session, row_kind: rows_pb2.RowKind) -> None:
        del session, row_kind

    def chunks(self, begin: int, end: int) -> Iterable[tuple[int, int]]:
        return [(at, min(at + 4, end)) for at in range(begin, end, 4)]

    async def prefill(self, session: Session, end: int) -> verifier_pb2.PrefillResult:
        self.calls.append(("prefill to", end))
        rows = rows_pb2.Rows(start=session.committed_length, count=end - session.committed_length)
        return verifier_pb2.PrefillResult(bonus_token_id=9, rows=rows)


class _RecordingDrafter(NoDrafter):
    """A drafter lane that writes down when it is handed rows and when it sends them on."""

    def __init__(self, calls: list[tuple[str, int]]) -> None:
        self.calls = calls

    def keep(self, rows: rows_pb2.Rows | None) -> None:
        assert rows is not None
        self.calls.append(("rows", rows.count))

    def extend(self, session: Session) -> None:
        self.calls.append(("extend to", session.committed_length))


async def test_rows_of_a_prefill_chunk_are_sent_on_before_the_next_chunk_is_run() -> None:
    calls: list[tuple[str, int]] = []
    session = Session(
        tokens=list(range(10)),
        prompt_length=10,
        output_limit=4,
        draft_count=0,
        sampling=sampling_pb2.SamplingParameters(),
    )
    verifier: Any = _RecordingVerifier(calls)
    assert await prefill(session, verifier, _RecordingDrafter(calls)) == [9]
    assert calls == [
        ("prefill to", 4), ("rows", 4), ("extend to", 4),
        ("prefill to", 8), ("rows", 4), ("extend to", 8),
        ("prefill to", 10), ("rows", 2), ("extend to", 10),
    ]  # fmt: skip


async def test_eight_concurrent_sessions_equal_each_alone_and_share_steps() -> None:
    async with stand(drafter="coin-flip") as s:
        prompts = [[3 + i, 7, 9 + 2 * i] * (i + 1) for i in range(8)]
        expected = [continuation(prompt, 5, 60) for prompt in prompts]
        before = s.verifier.step_count
        s.verifier.step_seconds = 0.003
        answers = await asyncio.gather(*(_run(s, prompt) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == expected
        rounds = sum(answer.statistics.round_count for answer in answers)
        assert s.verifier.step_count - before < rounds / 2


async def _run(s: Stand, prompt: list[int]) -> Any:
    return await s.generate(
        prompt=prompt, max_tokens=60, sampling={"temperature": 1.0, "seed": 5}, draft_count=4
    )


async def test_a_drafter_with_a_shorter_context_is_not_asked_beyond_it() -> None:
    async with stand(drafter_model={"max_context_length": 40}) as s:
        answer = await s.generate(max_tokens=60)
        assert answer.token_ids == continuation(PROMPT, None, 60)
        assert answer.statistics.draft_token_count > 0
        assert answer.statistics.target_only_round_count > 20


async def test_a_seed_is_drawn_and_reported_and_repeats_the_answer() -> None:
    async with stand() as s:
        first = await s.generate(sampling={"temperature": 1.0}, max_tokens=20)
        other = await s.generate(sampling={"temperature": 1.0}, max_tokens=20)
        again = await s.generate(
            sampling={"temperature": 1.0, "seed": first.finish.seed}, max_tokens=20
        )
        assert again.token_ids == first.token_ids != other.token_ids
        assert first.token_ids == continuation(PROMPT, first.finish.seed, 20)


async def test_times_and_lengths_of_a_request_are_filled() -> None:
    async with stand() as s:
        s.verifier.step_seconds = 0.005
        answer = await s.generate(max_tokens=20, draft_count=3)
        statistics = answer.statistics
        assert statistics.prompt_token_count == len(PROMPT)
        first = statistics.time_to_first_token.ToMicroseconds()
        total = statistics.total_time.ToMicroseconds()
        assert 5_000 <= first < total
        assert statistics.tokens_per_second == pytest.approx(19e6 / (total - first), rel=0.01)
        times = statistics.round_times
        parts = (times.draft, times.verify, times.wire, times.coordinator)
        assert sum(part.ToMicroseconds() for part in parts) <= total
        assert times.wire.ToMicroseconds() > 0


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Return the coordinator's own sessions, which hold the rounds' total time."""
    made: list[Session] = []

    def session(**fields: Any) -> Session:
        made.append(Session(**fields))
        return made[-1]

    monkeypatch.setattr("coordinator.server.Session", session)
    return made


@pytest.mark.parametrize("wants_rows", [False, True])
async def test_the_four_parts_of_the_rounds_time_add_up_and_the_wire_has_both_round_trips(
    wants_rows: bool, sessions: list[Session]
) -> None:
    async with stand(wants_rows=wants_rows) as s:
        assert s.drafter is not None
        # Of each step, 4 ms (6 ms) are service and the rest of the 10 ms is wire.
        for peer, service_seconds in ((s.drafter, 0.004), (s.verifier, 0.006)):
            peer.step_seconds, peer.service_seconds = 0.01, service_seconds
        statistics = (await s.generate(max_tokens=33, draft_count=3)).statistics
    (session,) = sessions
    times = statistics.round_times
    drafted_rounds = statistics.round_count - statistics.target_only_round_count
    assert (statistics.round_count, drafted_rounds) == (8, 8)
    seconds = [
        part.ToNanoseconds() / 1e9
        for part in (times.draft, times.verify, times.wire, times.coordinator)
    ]
    assert min(seconds) > 0
    assert sum(seconds) == pytest.approx(session.times.total, abs=4e-9)
    assert seconds[:2] == pytest.approx([8 * 0.004, 8 * 0.006], abs=1e-8)
    assert seconds[2] >= 8 * (0.006 + 0.004) - 0.004  # a timer may be early by a little


async def test_times_and_lengths_of_a_request_without_a_drafter_have_no_draft_time() -> None:
    async with stand(drafter=None) as s:
        s.verifier.step_seconds, s.verifier.service_seconds = 0.003, 0.001
        times = (await s.generate(max_tokens=9)).statistics.round_times
        assert times.draft.ToNanoseconds() == 0
        assert times.verify.ToNanoseconds() == pytest.approx(8e6, abs=10)
        assert times.wire.ToNanoseconds() > 8e6
