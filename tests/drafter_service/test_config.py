"""A wrong flag is one clear line that names it."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

from drafter_service.__main__ import serve
from drafter_service.config import DrafterConfig
from splitspec.errors import UserError

DRAFT = Path("/drafts/tiny")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"draft": "/models/eagle"}, "--draft '/models/eagle'"),
        ({"slot_count": 0}, "--slot-count 0 is not in 1..4096"),
        ({"max_context_length": -1}, "--max-context-length -1 is not in 1..16777216"),
        ({"max_draft_count": 0}, "--max-draft-count 0 is not in 1..1024"),
        ({"ngram_max": 0}, "--ngram-max 0"),
        ({"ngram_max": 2, "ngram_min": 3}, "--ngram-min 3 is not in 1..2"),
        ({"draft_model": DRAFT}, "--draft-model '/drafts/tiny': --draft ngram has no model"),
        ({"draft": "eagle3"}, "--draft eagle3 needs --draft-model"),
        ({"draft": "dflash"}, "--draft dflash needs --draft-model"),
        ({"block_length": 4}, "--block-length 4: --draft ngram has no blocks; --draft dflash has"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_flag(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        DrafterConfig(**fields)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"slot_count": 0}, "--slot-count 0 is not in 1..4096"),
        ({"max_draft_count": 8}, "--max-draft-count 8 is not in 1..7"),
        ({"max_draft_count": 0}, "--max-draft-count 0 is not in 1..7"),
        ({"runtime": "onnx"}, "--runtime 'onnx' is not executorch or torch"),
        ({"rows": "taps"}, "--rows 'taps' is not raw or fused"),
        ({"row_dtype": "fp32"}, "--row-dtype 'fp32' is not float32, bfloat16 or float16"),
        ({"draft_sampling": "best"}, "--draft-sampling 'best' is not argmax or coupled"),
        ({"embeddings": "mine"}, "--embeddings 'mine' is not auto, own or target"),
        ({"feedback": "norm"}, "--feedback 'norm' is not auto, pre-norm or post-norm"),
        ({"threads": 0}, "--threads 0 is not in 1..1024"),
        ({"block_length": 4}, "--block-length 4: --draft eagle3 has no blocks"),
    ],
)
def test_a_wrong_value_of_eagle3_is_refused_by_its_flag(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        DrafterConfig(draft="eagle3", draft_model=DRAFT, **fields)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"slot_count": 0}, "--slot-count 0 is not in 1..4096"),
        ({"max_draft_count": 0}, "--max-draft-count 0 is not in 1..1024"),
        ({"block_length": 1}, "--block-length 1 is not in 2..1025"),
        ({"block_length": -8}, "--block-length -8 is not in 2..1025"),
        ({"feedback": "pre-norm"}, "--feedback 'pre-norm': a dflash block is one pass"),
        ({"draft_sampling": "best"}, "--draft-sampling 'best' is not argmax or coupled"),
        ({"runtime": "onnx"}, "--runtime 'onnx' is not executorch or torch"),
        ({"rows": "taps"}, "--rows 'taps' is not raw or fused"),
    ],
)
def test_d19_a_wrong_value_of_dflash_is_refused_by_its_flag(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError) as caught:
        DrafterConfig(draft="dflash", draft_model=DRAFT, **fields)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_flags_and_fields_have_the_same_defaults() -> None:
    for field in dataclasses.fields(DrafterConfig):
        assert inspect.signature(serve).parameters[field.name].default == field.default, field.name


def test_sizes_that_nobody_asks_for_go_by_the_method_and_the_precision_by_the_runtime() -> None:
    ngram = DrafterConfig()
    assert (ngram.chosen_slot_count, ngram.chosen_context_length) == (64, 32768)
    eagle3 = DrafterConfig(draft="eagle3", draft_model=DRAFT)
    assert (eagle3.chosen_slot_count, eagle3.chosen_context_length) == (8, 1024)
    assert eagle3.chosen_precision == "8da8w"
    torch = DrafterConfig(draft="eagle3", draft_model=DRAFT, runtime="torch", slot_count=3)
    assert (torch.chosen_slot_count, torch.chosen_precision) == (3, "fp32")
    dflash = DrafterConfig(draft="dflash", draft_model=DRAFT)
    assert (dflash.chosen_slot_count, dflash.chosen_context_length) == (8, 1024)
    assert dflash.chosen_precision == "8da8w"


def test_how_and_how_many_tokens_are_drafted_goes_by_the_method_where_nobody_says() -> None:
    ngram = DrafterConfig()
    eagle3 = DrafterConfig(draft="eagle3", draft_model=DRAFT)
    dflash = DrafterConfig(draft="dflash", draft_model=DRAFT)
    assert (ngram.chosen_draft_count, eagle3.chosen_draft_count) == (7, 7)
    assert dflash.chosen_draft_count is None, "as many as its block drafts"
    assert eagle3.chosen_draft_sampling == "coupled"
    assert dflash.chosen_draft_sampling == "argmax"
    for other in (eagle3, dflash):
        said = dataclasses.replace(other, max_draft_count=3, draft_sampling="coupled")
        assert (said.chosen_draft_count, said.chosen_draft_sampling) == (3, "coupled")
        assert dataclasses.replace(said, draft_sampling="argmax").chosen_draft_sampling == "argmax"
