"""The configuration is checked at birth, and the flags mirror it."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from splitspec.errors import UserError
from verifier_service.__main__ import serve
from verifier_service.config import VerifierConfig


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("runtime", "tensorrt", "--runtime"),
        ("slot_count", 0, "--slot-count"),
        ("max_context_length", 1, "--max-context-length"),
        ("max_prefill_chunk", 0, "--max-prefill-chunk"),
        ("max_draft_count", -1, "--max-draft-count"),
        ("threads", 0, "--threads"),
    ],
)
def test_a_value_out_of_range_names_its_flag(field: str, value: Any, flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        VerifierConfig(model="m", **{field: value})


def test_a_window_that_no_exported_step_takes_names_both_flags() -> None:
    with pytest.raises(UserError, match="--max-draft-count 20 needs --max-prefill-chunk 21 or"):
        VerifierConfig(model="m", max_draft_count=20, max_prefill_chunk=4)
    VerifierConfig(model="m", max_draft_count=20, max_prefill_chunk=21)
    VerifierConfig(model="m", max_draft_count=7, max_prefill_chunk=1)
    VerifierConfig(model="m", max_draft_count=20, max_prefill_chunk=4, runtime="torch")


def test_flags_and_fields_have_the_same_names() -> None:
    fields = {field.name for field in dataclasses.fields(VerifierConfig)}
    assert set(inspect.signature(serve).parameters) == fields


def test_flags_and_fields_have_the_same_defaults() -> None:
    for field in dataclasses.fields(VerifierConfig):
        parameter = inspect.signature(serve).parameters[field.name]
        if field.default is dataclasses.MISSING:
            assert parameter.default is inspect.Parameter.empty
        else:
            assert parameter.default == field.default, field.name


def test_the_precision_goes_by_the_runtime_unless_one_is_asked_for() -> None:
    assert VerifierConfig(model="m", runtime="torch").chosen_precision == "fp32"
    assert VerifierConfig(model="m", precision="8da4w").chosen_precision == "8da4w"


def test_a_model_is_known_by_its_own_name_not_by_its_path() -> None:
    assert VerifierConfig(model="/models/tiny").model_id == "tiny"
    assert VerifierConfig(model="smollm2-135m").model_id == "smollm2-135m"
