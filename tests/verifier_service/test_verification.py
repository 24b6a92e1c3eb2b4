"""Draft tokens stand while they equal the target's choices."""

from __future__ import annotations

import pytest

from verifier_service.verification import accept


@pytest.mark.parametrize(
    ("draft", "chosen", "expected"),
    [
        ([], [5], 0),
        ([1, 2, 3], [9, 2, 3, 4], 0),
        ([1, 2, 3], [1, 9, 3, 4], 1),
        ([1, 2, 3], [1, 2, 3, 4], 3),  # V6: the bonus is then the last row's
    ],
)
def test_V6_leading_draft_tokens_stand_while_they_equal_the_choice(
    draft: list[int], chosen: list[int], expected: int
) -> None:
    assert accept(draft, chosen) == expected
