"""Peers that die, hang, drop the stream or disagree: no token is lost or repeated (L1-L4, L7)."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from splitspec.errors import (
    CommittedLengthMismatch,
    EngineFailed,
    InvalidArgument,
    SplitspecError,
)
from splitspec.wire_errors import error_from_rpc
from tests.coordinator.fakes.stand import PROMPT, Answer, Stand, request, stand
from tests.coordinator.fakes.target import continuation

TOKENS = 24
SEED = 77
REQUEST: dict[str, Any] = {
    "sampling": {"temperature": 0.8, "seed": SEED},
    "max_tokens": TOKENS,
    "draft_count": 3,
}
EXPECTED = continuation(PROMPT, SEED, TOKENS)
# open, two prefill chunks, and 6 to 23 rounds, each with one step
LONGEST = 12


async def refused(s: Stand, **fields: Any) -> SplitspecError:
    """Return the error that a request ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await s.generate(**fields)
    return error_from_rpc(caught.value)


def check(answer: Answer) -> None:
    """Check that nothing was lost, repeated or changed."""
    assert answer.token_ids == EXPECTED
    counts = answer.statistics.acceptance_length_counts
    assert sum((i + 1) * n for i, n in enumerate(counts)) == TOKENS - 1  # L3


@pytest.mark.parametrize("wants_rows", [False, True])
@pytest.mark.parametrize("how", ["die", "die after", "drop"])
async def test_l4_the_verifier_may_be_lost_at_any_step(how: str, wants_rows: bool) -> None:
    async with stand(drafter="coin-flip", wants_rows=wants_rows) as s:
        for i in range(1, LONGEST):
            s.verifier.faults = {s.verifier.step_count + i: how}
            answer = await s.generate(**REQUEST)
            check(answer)
            if not s.verifier.faults:
                assert answer.statistics.replay_count == 1
            await s.settle()


@pytest.mark.parametrize("wants_rows", [False, True])
@pytest.mark.parametrize("how", ["die", "die after", "drop"])
async def test_l4_the_drafter_may_be_lost_at_any_step(how: str, wants_rows: bool) -> None:
    async with stand(drafter="coin-flip", wants_rows=wants_rows) as s:
        assert s.drafter is not None
        for i in range(1, LONGEST):
            s.drafter.faults = {s.drafter.step_count + i: how}
            check(await s.generate(**REQUEST))
            await s.settle()
            await _until(lambda: s.drafter is not None and s.drafter._server is not None)
            await asyncio.sleep(0.1)


async def _until(holds: Any) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("wants_rows", [False, True])
async def test_l4_both_may_be_lost_at_once(wants_rows: bool) -> None:
    async with stand(drafter="coin-flip", wants_rows=wants_rows) as s:
        assert s.drafter is not None
        for i in (1, 3, 5, 8):
            s.verifier.faults = {s.verifier.step_count + i: "die"}
            s.drafter.faults = {s.drafter.step_count + i: "die"}
            check(await s.generate(**REQUEST))
            await s.settle()


@pytest.mark.parametrize("wants_rows", [False, True])
async def test_a_lost_drafter_is_picked_up_again_within_the_request(wants_rows: bool) -> None:
    async with stand(wants_rows=wants_rows, verifier_model={"max_context_length": 1024}) as s:
        assert s.drafter is not None
        s.verifier.step_seconds = 0.01
        s.drafter.faults = {s.drafter.step_count + 6: "die"}
        answer = await s.generate(max_tokens=500, draft_count=3)
        assert answer.token_ids == continuation(PROMPT, None, 500)
        statistics = answer.statistics
        assert 1 < statistics.target_only_round_count < statistics.round_count
        # Three rounds of drafts before the loss; everything else was drafted after it.
        assert statistics.draft_token_count > 30
        assert statistics.replay_count == (1 if wants_rows else 0)


@pytest.mark.parametrize("wants_rows", [False, True])
async def test_a_request_that_starts_without_the_drafter_gets_it_when_it_comes(
    wants_rows: bool,
) -> None:
    async with stand(wants_rows=wants_rows) as s:
        assert s.drafter is not None
        await s.drafter.kill()
        s.verifier.step_seconds = 0.02
        asyncio.get_running_loop().call_later(0.2, s.drafter.die)
        answer = await s.generate(max_tokens=100, draft_count=3)
        assert answer.token_ids == continuation(PROMPT, None, 100)
        assert answer.statistics.target_only_round_count > 1
        assert answer.statistics.draft_token_count > 0


async def test_a_late_drafter_costs_one_wait_then_rounds_go_on_without_it() -> None:
    async with stand(draft_seconds=0.1) as s:
        assert s.drafter is not None
        s.drafter.faults = {s.drafter.step_count + 5: "hang"}
        began = asyncio.get_running_loop().time()
        answer = await s.generate(max_tokens=100, draft_count=3)
        assert asyncio.get_running_loop().time() - began < 5  # waiting each time: 9 s
        assert answer.token_ids == continuation(PROMPT, None, 100)
        assert answer.statistics.target_only_round_count > 50


@pytest.mark.parametrize("wants_rows", [False, True])
async def test_a_slow_drafter_catches_up_with_what_it_missed(wants_rows: bool) -> None:
    async with stand(wants_rows=wants_rows, draft_seconds=0.03) as s:
        assert s.drafter is not None
        s.verifier.step_seconds = 0.005
        s.drafter.step_seconds = 0.05
        answer = await s.generate(max_tokens=100, draft_count=3)
        s.drafter.step_seconds = 0.0
        assert answer.token_ids == continuation(PROMPT, None, 100)


async def test_a_hanging_verifier_is_given_up_after_the_step_limit() -> None:
    async with stand(drafter="coin-flip", step_seconds=0.3) as s:
        for i in (1, 2, 6):
            s.verifier.faults = {s.verifier.step_count + i: "hang"}
            answer = await s.generate(**REQUEST)
            check(answer)
            assert answer.statistics.replay_count == 1


async def test_a_verifier_that_stays_away_is_not_ready() -> None:
    async with stand(reconnect_seconds=0.3) as s:
        s.verifier.revive_seconds = None
        s.verifier.faults = {s.verifier.step_count + 5: "die"}
        error = await refused(s, **REQUEST)
        assert error.reason == "NOT_READY"
        assert "verifier" in error.message
        await s.verifier.start()
        check(await s.generate(**REQUEST))


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model_hash", "other"),
        ("precision", "other"),
        ("tokenizer_hash", "other"),
        ("fused_model_hash", "other"),
        ("fused_model_hash", ""),
    ],
)
async def test_a_verifier_that_comes_back_different_is_never_continued_on(
    field: str, other: str
) -> None:
    async with stand(verifier_model={"fused_model_hash": "d1"}) as s:
        before = getattr(s.verifier.model, field)
        setattr(s.verifier.model, field, other)
        s.verifier.faults = {s.verifier.step_count + 5: "die"}
        error = await refused(s, **REQUEST)
        assert error.reason == "MODEL_MISMATCH"
        assert field in error.message
        assert (other or "none") in error.message
        assert before in error.message
        assert not await s.serves()
        setattr(s.verifier.model, field, before)
        await s.wait_serving()
        check(await s.generate(**REQUEST))


async def test_lengths_that_disagree_are_replayed_once_and_fail_the_second_time() -> None:
    async with stand(drafter="coin-flip") as s:
        for i in range(2, LONGEST):
            s.verifier.faults = {s.verifier.step_count + i: CommittedLengthMismatch("fake")}
            answer = await s.generate(**REQUEST)
            check(answer)
            if not s.verifier.faults:
                assert answer.statistics.replay_count == 1
        start = s.verifier.step_count
        s.verifier.faults = {start + i: CommittedLengthMismatch("fake") for i in (4, 9)}
        assert (await refused(s, **REQUEST)).reason == "COMMITTED_LENGTH_MISMATCH"
        await s.settle()


async def test_a_device_fault_of_the_verifier_is_replayed_and_a_lasting_one_is_engine_failed() -> (
    None
):
    async with stand(drafter="coin-flip") as s:
        for i in range(2, LONGEST):
            s.verifier.faults = {s.verifier.step_count + i: EngineFailed("device lost")}
            answer = await s.generate(**REQUEST)
            check(answer)
            if not s.verifier.faults:
                assert answer.statistics.replay_count == 1
            s.verifier.faults = {}
            await s.settle()
        start = s.verifier.step_count
        s.verifier.faults = {start + i: EngineFailed("device lost") for i in range(1, 100)}
        error = await refused(s, **REQUEST)
        assert (error.reason, error.message) == ("ENGINE_FAILED", "device lost")
        s.verifier.faults = {}
        await s.settle()
        check(await s.generate(**REQUEST))


async def test_an_item_that_always_kills_the_verifier_fails_its_request_alone() -> None:
    async with stand(drafter="coin-flip") as s:
        start = s.verifier.step_count
        s.verifier.faults = {start + i: "die" for i in range(2, 40, 2)}
        assert (await refused(s, **REQUEST)).reason == "NOT_READY"
        s.verifier.faults = {}
        check(await s.generate(**REQUEST))


@pytest.mark.parametrize(
    "error", [InvalidArgument("bad token"), EngineFailed("fault"), CommittedLengthMismatch("ctx")]
)
async def test_an_item_error_of_the_drafter_costs_drafts_only(error: SplitspecError) -> None:
    async with stand(drafter="coin-flip") as s:
        assert s.drafter is not None
        for i in range(1, LONGEST):
            s.drafter.faults = {s.drafter.step_count + i: error}
            check(await s.generate(**REQUEST))
            await s.settle()


async def test_drafts_outside_the_vocabulary_cost_drafts_only() -> None:
    async with stand(drafter="invalid") as s:
        answer = await s.generate(**REQUEST)
        check(answer)
        assert answer.statistics.draft_token_count == 0


async def test_a_drafter_without_a_free_slot_costs_drafts_only() -> None:
    async with stand(drafter_model={"slot_count": 1}, verifier_model={"slot_count": 4}) as s:
        answers = await asyncio.gather(*(s.generate(**REQUEST) for _ in range(4)))
        for answer in answers:
            check(answer)
        assert any(answer.statistics.draft_token_count for answer in answers)
        await s.settle()


@pytest.mark.parametrize("error", [InvalidArgument("bad"), CommittedLengthMismatch("fake")])
async def test_one_bad_session_never_harms_another(error: SplitspecError) -> None:
    async with stand(drafter="coin-flip") as s:
        s.verifier.step_seconds = 0.002

        async def one(i: int) -> Any:
            try:
                return await s.generate(prompt=[5 + i, 6], max_tokens=60)
            except grpc.aio.AioRpcError as failure:
                return error_from_rpc(failure).reason

        work = [asyncio.create_task(one(i)) for i in range(8)]
        await _until(lambda: s.verifier.session_count == 8)
        s.verifier.faults = {s.verifier.step_count + 2: error}
        for i, outcome in enumerate(await asyncio.gather(*work)):
            if isinstance(outcome, Answer):
                assert outcome.token_ids == continuation([5 + i, 6], None, 60)
            else:
                assert outcome == error.reason == "INVALID_ARGUMENT"
        assert not s.verifier.faults, "the fault came too late"
        await s.settle()


@pytest.mark.parametrize("wants_rows", [False, True])
async def test_l7_a_client_that_goes_away_frees_both_slots_within_a_second(
    wants_rows: bool,
) -> None:
    async with stand(drafter="coin-flip", wants_rows=wants_rows) as s:
        s.verifier.step_seconds = 0.003
        for at in range(0, 60, 7):
            other = asyncio.create_task(s.generate(**REQUEST))
            call = s.stub.Generate(request(**{**REQUEST, "max_tokens": 100}))
            seen = 0
            while seen < at:
                seen += len((await call.read()).token_ids)
            call.cancel()
            check(await other)
            await s.settle(1.0)


async def test_l7_a_client_that_goes_away_before_its_first_token_frees_both_slots() -> None:
    async with stand() as s:
        s.verifier.step_seconds = 0.02
        for delay in range(8):
            call = s.stub.Generate(request(prompt=list(range(5, 60))))
            await asyncio.sleep(delay * 0.01)
            call.cancel()
            await s.settle(1.0)
        s.verifier.step_seconds = 0.0
        check(await s.generate(**REQUEST))
