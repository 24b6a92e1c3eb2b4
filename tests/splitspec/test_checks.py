"""The checks that every process shares."""

from __future__ import annotations

import math
from typing import Any

import pytest

from splitspec.checks import (
    check_sampling,
    check_step,
    refuse_unknown,
    refuse_unknown_within,
    require_seed,
    top_p_of,
)
from splitspec.errors import InvalidArgument
from splitspec.v1 import drafter_pb2, generation_pb2, sampling_pb2

UNKNOWN = bytes([0xF8, 0x3F, 0x01])  # field 1023, varint 1


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0},
        {"temperature": 100.0, "top_p": 1e-9, "min_p": 1.0, "top_k": 2**32 - 1, "seed": 2**64 - 1},
    ],
)
def test_values_up_to_their_limits_are_taken(values: dict[str, Any]) -> None:
    check_sampling(sampling_pb2.SamplingParameters(**values))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-1e-9, 100.001, math.inf, math.nan)],
        *[("top_p", value) for value in (0.0, -0.5, 1.0001, math.nan)],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan, -math.inf)],
        *[(f"{kind}_penalty", 0.0) for kind in ("frequency", "presence", "repetition")],
        ("grammar", ""),
        ("min_tokens", 0),
        ("logit_bias", {3: 1.0}),
    ],
)
def test_values_beyond_and_fields_not_implemented_are_refused_by_name(
    field: str, value: Any
) -> None:
    with pytest.raises(InvalidArgument, match=rf"^sampling\.{field} is "):
        check_sampling(sampling_pb2.SamplingParameters(**{field: value}))


def test_noise_needs_a_seed_and_greedy_does_not() -> None:
    require_seed(sampling_pb2.SamplingParameters())
    require_seed(sampling_pb2.SamplingParameters(temperature=1.0, seed=0))
    with pytest.raises(InvalidArgument, match=r"^sampling\.seed is not set"):
        require_seed(sampling_pb2.SamplingParameters(temperature=1.0))


def test_an_absent_top_p_is_one() -> None:
    assert top_p_of(sampling_pb2.SamplingParameters()) == 1.0
    assert top_p_of(sampling_pb2.SamplingParameters(top_p=0.5)) == 0.5


def test_unknown_fields_are_found_at_the_top_and_inside() -> None:
    request = generation_pb2.GenerateRequest(text="a")
    request.sampling.MergeFromString(UNKNOWN)
    refuse_unknown("request", request)
    with pytest.raises(InvalidArgument, match=r"^request\.sampling is .*field 1023"):
        refuse_unknown_within("request", request)
    with pytest.raises(InvalidArgument, match=r"^sampling is .*field 1023"):
        check_sampling(request.sampling)


def test_steps_ascend_and_have_at_most_the_items_that_sessions_need() -> None:
    step = drafter_pb2.DrafterRunStepsRequest(step=4, items=[drafter_pb2.DraftItem()] * 3)
    check_step(step, 3, 3)
    with pytest.raises(InvalidArgument, match=r"^step is 4; expected above 4"):
        check_step(step, 4, 3)
    with pytest.raises(InvalidArgument, match=r"^items count is 3; expected 0\.\.2"):
        check_step(step, 3, 2)
    step.MergeFromString(UNKNOWN)
    with pytest.raises(InvalidArgument, match="field 1023"):
        check_step(step, 3, 3)
