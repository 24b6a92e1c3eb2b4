"""A wrong flag is one clear line that names it."""

from __future__ import annotations

from typing import Any

import pytest

from drafter_service.config import DrafterConfig
from splitspec.errors import UserError


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"draft": "/models/eagle"}, "--draft '/models/eagle'"),
        ({"slot_count": 0}, "--slot-count 0"),
        ({"max_context_length": -1}, "--max-context-length -1"),
        ({"max_draft_count": 0}, "--max-draft-count 0"),
        ({"ngram_max": 0}, "--ngram-max 0"),
        ({"ngram_max": 2, "ngram_min": 3}, "--ngram-min 3 is not in 1..2"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_flag(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        DrafterConfig(**fields)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_draft_that_is_not_there_yet_says_what_is() -> None:
    with pytest.raises(UserError, match="ngram only"):
        DrafterConfig(draft="eagle3")
