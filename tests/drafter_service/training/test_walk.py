"""The walk over a text against a loop that serves it round by round."""

from __future__ import annotations

import random

import pytest
import torch

from drafter_service.training.walk import acceptance, merge, taus


def serve(accepted: list[int], roles: list[int], count: int) -> tuple[int, int]:
    """Return the tokens and rounds of serving a row's turns: prefill, then round after round."""
    length = len(roles)
    tokens = rounds = place = 0
    while place < length:
        if roles[place] != 1:
            place += 1
            continue
        # The prefill bonus is the turn's first token: pending, not counted.
        pending = place
        while pending + 1 < length and roles[pending + 1] == 1 and pending + 7 < length:
            rounds += 1
            left = accepted[pending] if accepted[pending] < count else count
            for _ in range(left + 1):
                if pending + 1 < length and roles[pending + 1] == 1:
                    pending += 1
                    tokens += 1
        place = pending + 1
        while place < length and roles[place] == 1:
            place += 1
    return tokens, rounds


@pytest.mark.parametrize("seed", range(20))
def test_a_walk_counts_what_a_sequential_loop_serves(seed: int) -> None:
    draw = random.Random(seed)
    accepted = [[draw.randrange(8) for _ in range(60)] for _ in range(4)]
    roles = [[int(draw.random() < 0.85) for _ in range(60)] for _ in range(4)]
    found = acceptance(torch.tensor(accepted), torch.tensor(roles, dtype=torch.uint8))
    for count in (3, 5, 7):
        served = [serve(a, r, count) for a, r in zip(accepted, roles, strict=True)]
        assert found[count] == tuple(sum(column) for column in zip(*served, strict=True))


def test_a_draft_that_is_always_right_emits_all_k_and_the_bonus_a_round() -> None:
    accepted, roles = torch.full((1, 101), 7), torch.ones(1, 101, dtype=torch.uint8)
    for count, (tokens, rounds) in acceptance(accepted, roles).items():
        assert tokens == rounds * (count + 1)
    assert taus(acceptance(accepted, roles)) == {"3": 4.0, "5": 6.0, "7": 8.0}


def test_a_draft_that_is_never_right_emits_one_token_a_round() -> None:
    accepted, roles = torch.zeros(2, 50, dtype=torch.long), torch.ones(2, 50, dtype=torch.uint8)
    assert taus(acceptance(accepted, roles)) == {"3": 1.0, "5": 1.0, "7": 1.0}


def test_user_turns_are_not_walked_and_a_text_without_assistant_turns_has_no_tau() -> None:
    found = acceptance(torch.full((1, 40), 7), torch.zeros(1, 40, dtype=torch.uint8))
    assert found == {3: (0, 0), 5: (0, 0), 7: (0, 0)}
    assert taus(found) == {}


def test_parts_of_a_text_add_up() -> None:
    assert merge([{3: (4, 2)}, {3: (6, 3)}]) == {3: (10, 5)}
    assert merge([]) == {}
