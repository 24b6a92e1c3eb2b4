"""Lists of a target's layers, whatever method's file or user states them."""

from __future__ import annotations

from typing import Any

import pytest

from graph_runtime.drafts.taps import check_taps, count_taps, hf_layer_ids, layer_ids
from graph_runtime.drafts.target import DraftTarget
from splitspec.errors import UserError

TARGET = DraftTarget(hidden_size=64, n_layers=4, vocab_size=300, tied=True)


def test_one_layer_has_numbers_that_differ_by_one_in_the_two_conventions() -> None:
    assert layer_ids("ids", [1, 2, 4]) == hf_layer_ids("ids", [2, 3, 5]) == (1, 2, 4)
    assert layer_ids("ids", None) is hf_layer_ids("ids", None) is None


def test_the_embedding_s_output_has_a_number_in_one_convention_and_is_refused() -> None:
    assert layer_ids("ids", [0, 4095]) == (0, 4095)
    assert hf_layer_ids("ids", [1, 4096]) == (0, 4095)
    with pytest.raises(UserError, match=r"ids is \[0, 2\]; .* 0 is the embedding's output"):
        hf_layer_ids("ids", [0, 2])


@pytest.mark.parametrize("value", [[], [2, 1], [1, 1], [True], ["1"], [1.0], 3, {}, [-1], [4097]])
def test_what_is_no_list_of_ascending_layers_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"ids is .*; expected a list .* in \[0, 4095\]"):
        layer_ids("ids", value)
    with pytest.raises(UserError, match=r"ids is .*; expected a list .* in \[1, 4096\]"):
        hf_layer_ids("ids", value)
    with pytest.raises(UserError, match=r"^--tap-layers is .* in \[0, 4095\]$"):
        layer_ids("--tap-layers", value)


def test_fc_tells_the_number_of_taps() -> None:
    assert count_taps((64, 192), 64) == 3
    for fc in ((64, 190), (64,), (64, 64, 64)):
        with pytest.raises(UserError, match=r"fc.weight is \[64.*a multiple of .* 64"):
            count_taps(fc, 64)
    assert check_taps((0, 1, 3), (64, 192), target_hidden=64, target=TARGET) == (0, 1, 3)
    with pytest.raises(UserError, match=r"takes 3 taps of width 64, but .* \[0, 1\]"):
        check_taps((0, 1), (64, 192), target_hidden=64, target=TARGET)
    with pytest.raises(UserError, match=r"\[0, 1, 4\], but the target has the layers 0\.\.3"):
        check_taps((0, 1, 4), (64, 192), target_hidden=64, target=TARGET)
