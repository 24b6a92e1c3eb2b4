"""Peers that come back different: what still fits is used, what does not is done without."""

from __future__ import annotations

import pytest

from tests.coordinator.fakes.stand import PROMPT, stand
from tests.coordinator.fakes.target import continuation


@pytest.mark.parametrize("taken", [0, 1, 2])
@pytest.mark.parametrize("kind", ["right", "coin-flip"])
async def test_l4_a_verifier_may_come_back_with_shorter_windows(kind: str, taken: int) -> None:
    async with stand(drafter=kind) as s:
        die = s.verifier.die

        def come_back_different() -> None:
            s.verifier.model.max_draft_count = taken
            die()

        s.verifier.die = come_back_different  # type: ignore[method-assign]
        s.verifier.faults = {s.verifier.step_count + 5: "die"}
        answer = await s.generate(max_tokens=60, draft_count=7)
        assert answer.token_ids == continuation(PROMPT, None, 60)
        statistics = answer.statistics
        assert not s.verifier.faults
        assert statistics.replay_count == 1
        if taken:  # the drafter goes on
            assert statistics.target_only_round_count < statistics.round_count / 2
        # A request that names no count, or one that is taken, is served as before.
        assert (await s.generate(max_tokens=9)).token_ids == continuation(PROMPT, None, 9)
        await s.settle()
