"""What a draft's config.json says, in every layout: taps, block, windows, causality, sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from graph_runtime.dflash.checkpoint import load_fusion
from graph_runtime.dflash.config import DFlashConfig
from graph_runtime.dflash.taps import default_tap_layers
from graph_runtime.drafts.source import DraftSource
from graph_runtime.rope_config import RopeScaling
from splitspec.errors import UserError
from tests.dflash_layouts import FULL, LAYOUTS, SLIDING, random_weights, write_draft
from tests.tiny import write_tiny_model

WEIGHTS = random_weights(1)
ZLAB_IDS = "dflash_config.target_layer_ids"
HF_IDS = "aux_hidden_state_layer_ids"
ALIKE = ("z-lab", "modelopt")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"))


def read(folder: Path, target: Path | None = None, **source: Any) -> DFlashConfig:
    return load_fusion(
        DraftSource(folder=folder, target=target, **source), folder.parent / "cache"
    )[0]


def written(tmp_path: Path, layout: str = "z-lab", **variant: Any) -> Path:
    weights = variant.pop("weights", WEIGHTS)
    return write_draft(tmp_path / "draft", weights, layout=layout, **variant)


def place(layout: str) -> str:
    """Return the writer's argument for keys of the decoder's layers."""
    return "nested" if layout == "speculators" else "config"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_tells_the_draft_s_whole_shape(
    layout: str, target: Path, tmp_path: Path
) -> None:
    weights = random_weights(1, n_layers=3, draft_vocab_size=100)
    assert read(written(tmp_path, layout, weights=weights), target) == DFlashConfig(
        layout="z-lab" if layout == "modelopt" else layout,
        hidden_size=64,
        target_hidden_size=64,
        intermediate_size=96,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        vocab_size=300,
        draft_vocab_size=100,
        tap_layers=(0, 1, 2),
        rope=RopeScaling(kind="default", theta=10000.0),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=True,
        block_size=8,
        mask_token_id=16,
        sample_from_anchor=layout == "deepspec",
        sliding_windows=(None, None, None),
        causal=(False, False, False),
        embedding_scale=1.0,
        final_softcap=None,
    )


# Tap layers


def test_trap_tap_ids_off_by_one_the_same_numbers_name_other_layers_in_speculators_files(
    tmp_path: Path,
) -> None:
    zlab = written(tmp_path / "z", nested={"target_layer_ids": [1, 2, 3]})
    deepspec = written(tmp_path / "d", "deepspec", config={"target_layer_ids": [1, 2, 3]})
    speculators = written(tmp_path / "s", "speculators", config={HF_IDS: [1, 2, 3]})
    assert read(zlab).tap_layers == read(deepspec).tap_layers == (1, 2, 3)
    assert read(speculators).tap_layers == (0, 1, 2)


@pytest.mark.parametrize("taps", [(0, 1, 2), (0, 2, 3), (1, 2, 3)])
def test_trap_the_same_draft_written_in_every_convention_reads_the_same_layers(
    taps: tuple[int, ...], target: Path, tmp_path: Path
) -> None:
    for layout in LAYOUTS:
        folder = written(tmp_path / layout, layout, tap_layers=taps)
        assert read(folder, target).tap_layers == taps


@pytest.mark.parametrize(
    ("layout", "keys", "own"),
    [
        ("z-lab", {HF_IDS: [0, 1, 2]}, ZLAB_IDS),
        ("z-lab", {HF_IDS: [2, 3, 4]}, ZLAB_IDS),
        ("z-lab", {"target_layer_ids": [1, 2, 3]}, ZLAB_IDS),
        ("speculators", {"target_layer_ids": [1, 2, 3]}, HF_IDS),
        ("speculators", {"dflash_config": {"target_layer_ids": [1, 2, 3]}}, HF_IDS),
        ("deepspec", {HF_IDS: [2, 3, 4]}, "target_layer_ids"),
        ("deepspec", {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}, "target_layer_ids"),
    ],
)
def test_trap_tap_ids_of_another_convention_that_say_something_else_are_refused(
    layout: str, keys: dict[str, Any], own: str, tmp_path: Path
) -> None:
    folder = written(tmp_path, layout, config=keys)
    said = f"a {layout} file has {own}, .* --tap-layers|embedding's output"
    with pytest.raises(UserError, match=said):
        read(folder)
    assert read(folder, tap_layers=(0, 1, 2)).tap_layers == (0, 1, 2)


def test_tap_ids_that_say_the_same_in_both_conventions_are_no_conflict(tmp_path: Path) -> None:
    both = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "target_layer_ids": [0, 1, 2]}
    assert read(written(tmp_path, config=both)).tap_layers == (0, 1, 2)


def test_the_embedding_s_output_is_no_layer_s_and_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, "speculators", config={HF_IDS: [0, 2, 3]})
    with pytest.raises(UserError, match=rf"{HF_IDS} is \[0, 2, 3\]; .*embedding's output"):
        read(folder)


@pytest.mark.parametrize(
    ("n_target_layers", "n_layers", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 1, (18,)),
        (3, 2, None),
        (4, 2, None),
    ],
)
def test_the_formula_for_missing_taps_gives_the_layers_of_published_drafts(
    n_target_layers: int, n_layers: int, expected: tuple[int, ...] | None
) -> None:
    assert default_tap_layers(n_target_layers, n_layers) == expected


def test_without_ids_a_z_lab_draft_s_taps_follow_from_the_target_s_layers(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target", n_layers=12)
    weights = random_weights(1, n_layers=3)
    missing = {"nested": {"target_layer_ids": None}, "weights": weights}
    folder = written(tmp_path, n_target_layers=12, **missing)
    assert read(folder, target).tap_layers == read(folder).tap_layers == (1, 5, 9)
    unstated = written(tmp_path, config={"num_target_layers": None}, **missing)
    assert read(unstated, target).tap_layers == (1, 5, 9)
    with pytest.raises(UserError, match=r"target_layer_ids are missing.* give --tap-layers"):
        read(unstated)
    assert read(unstated, tap_layers=(0, 2, 5)).tap_layers == (0, 2, 5)


@pytest.mark.parametrize(
    ("layout", "key"), [("speculators", HF_IDS), ("deepspec", "target_layer_ids")]
)
def test_without_ids_no_other_layout_s_taps_are_guessed(
    layout: str, key: str, target: Path, tmp_path: Path
) -> None:
    folder = written(tmp_path, layout, config={key: None})
    with pytest.raises(UserError, match="give --tap-layers"):
        read(folder, target)


@pytest.mark.parametrize(
    "ids", [[2, 1, 3], [1, 1, 3], [True, 2, 3], [1.0, 2, 3], ["1", 2, 3], [-1, 2, 3], [], {}, 3]
)
@pytest.mark.parametrize("layout", ["z-lab", "speculators", "deepspec"])
def test_an_invalid_list_of_taps_is_refused(layout: str, ids: Any, tmp_path: Path) -> None:
    variant = {
        "z-lab": {"nested": {"target_layer_ids": ids}},
        "speculators": {"config": {HF_IDS: ids}},
        "deepspec": {"config": {"target_layer_ids": ids}},
    }[layout]
    with pytest.raises(UserError, match=r"layer_ids is .*; expected a list of ascending layers"):
        read(written(tmp_path, layout, **variant))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tap_beyond_the_target_s_layers_is_refused(
    layout: str, target: Path, tmp_path: Path
) -> None:
    assert read(written(tmp_path, layout, tap_layers=(0, 1, 3)), target).tap_layers == (0, 1, 3)
    folder = written(tmp_path, layout, tap_layers=(0, 1, 4))
    with pytest.raises(UserError, match=r"\[0, 1, 4\], but the target has the layers 0\.\.3"):
        read(folder, target)


def test_the_number_of_taps_is_told_by_the_inputs_of_fc(tmp_path: Path) -> None:
    folder = written(tmp_path, nested={"target_layer_ids": [1, 3]})
    with pytest.raises(UserError, match=r"fc.weight is \[64, 192\], so it takes 3 taps .*\[1, 3\]"):
        read(folder)
    folder = written(tmp_path, tensors={"fc.weight": torch.zeros(64, 190)})
    with pytest.raises(UserError, match=r"fc.weight is \[64, 190\]; .* a multiple of .* 64"):
        read(folder)
    six = random_weights(1, n_taps=6)  # more taps than layers, as some published drafts have
    folder = written(tmp_path, weights=six, tap_layers=(0, 2, 4, 6, 8, 10))
    assert read(folder).tap_layers == (0, 2, 4, 6, 8, 10)


@pytest.mark.parametrize("layout", ["z-lab", "modelopt", "deepspec"])
def test_a_target_of_another_depth_than_the_file_states_is_refused(
    layout: str, target: Path, tmp_path: Path
) -> None:
    folder = written(tmp_path, layout, n_target_layers=36)
    with pytest.raises(UserError, match="num_target_layers is 36; expected the target's 4"):
        read(folder, target)
    assert read(folder).tap_layers == (0, 1, 2)


# The block


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place_of_block_size", ["top", "dflash_config"])
@pytest.mark.parametrize("block_size", [2, 7, 8, 16])
def test_the_trained_block_size_is_read_wherever_it_stands(
    layout: str, place_of_block_size: str, block_size: int, tmp_path: Path
) -> None:
    folder = written(tmp_path, layout, block_size=block_size, block_size_in=place_of_block_size)
    assert read(folder).block_size == block_size


def test_two_block_sizes_that_differ_are_ambiguous(tmp_path: Path) -> None:
    folder = written(tmp_path, block_size=8, nested={"block_size": 16})
    with pytest.raises(UserError, match=r"block_size is 8, and dflash_config.block_size is 16"):
        read(folder)
    assert read(written(tmp_path, block_size=8, nested={"block_size": 8})).block_size == 8


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("key", ["block_size", "mask_token_id"])
def test_a_missing_block_size_or_mask_is_refused_and_never_guessed(
    layout: str, key: str, tmp_path: Path
) -> None:
    variant = {"nested": {key: None}} if layout in ALIKE and key == "mask_token_id" else {}
    folder = written(tmp_path, layout, **(variant or {"config": {key: None}}))
    with pytest.raises(UserError, match=rf"{key} is None; expected an integer in \[\d+, \d+\]"):
        read(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", [0, 299])
def test_the_mask_token_may_be_any_id_of_the_target(
    layout: str, mask: int, target: Path, tmp_path: Path
) -> None:
    assert read(written(tmp_path, layout, mask_token_id=mask), target).mask_token_id == mask


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", [-1, 300, 2**31])
def test_a_mask_token_beyond_the_embedding_s_rows_is_refused(
    layout: str, mask: int, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rf"mask_token_id is {mask}; .* in \[0, 299\]"):
        read(written(tmp_path, layout, mask_token_id=mask), target)


def test_the_mask_token_has_to_be_below_the_target_s_vocabulary_and_not_the_draft_s_padding(
    target: Path, tmp_path: Path
) -> None:
    padded = written(tmp_path, mask_token_id=310, config={"vocab_size": 320})
    assert read(padded).mask_token_id == 310
    with pytest.raises(UserError, match=r"mask_token_id is 310; .* in \[0, 299\]"):
        read(padded, target)


def test_trap_a_deepspec_draft_samples_from_the_anchor_and_a_z_lab_draft_does_not(
    tmp_path: Path,
) -> None:
    deepspec = read(written(tmp_path / "d", "deepspec", block_size=7))
    zlab = read(written(tmp_path / "z", "z-lab", block_size=7))
    assert deepspec.sample_from_anchor
    assert not zlab.sample_from_anchor
    assert (deepspec.first_draft_slot, deepspec.max_draft_count(7)) == (0, 7)
    assert (zlab.first_draft_slot, zlab.max_draft_count(7)) == (1, 6)


@pytest.mark.parametrize("layout", ["z-lab", "modelopt", "speculators"])
@pytest.mark.parametrize("stated", [None, False, True])
def test_sample_from_anchor_is_false_unless_stated(
    layout: str, stated: bool | None, tmp_path: Path
) -> None:
    folder = written(tmp_path, layout, sample_from_anchor=stated)
    assert read(folder).sample_from_anchor == bool(stated)


@pytest.mark.parametrize("stated", [False, True])
def test_a_deepspec_file_that_states_sample_from_anchor_is_believed(
    stated: bool, tmp_path: Path
) -> None:
    folder = written(tmp_path, "deepspec", config={"sample_from_anchor": stated})
    assert read(folder).sample_from_anchor == stated


def test_a_shifted_label_that_contradicts_sample_from_anchor_is_refused(tmp_path: Path) -> None:
    shifted = {"shift_label": True}
    folder = written(tmp_path, "speculators", config=shifted)
    with pytest.raises(UserError, match=r"shift_label is True; .* sample_from_anchor"):
        read(folder)
    agreeing = written(tmp_path, "speculators", sample_from_anchor=True, config=shifted)
    assert read(agreeing).sample_from_anchor
    default = written(tmp_path, "speculators", config={"shift_label": False})
    assert not read(default).sample_from_anchor


# Windows and causality


def windows(config: DFlashConfig) -> tuple[Sequence[int | None], Sequence[bool]]:
    return config.sliding_windows, config.causal


MIXED = [SLIDING, FULL]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_types_may_be_mixed_and_only_sliding_layers_have_the_window(
    layout: str, tmp_path: Path
) -> None:
    config = read(written(tmp_path, layout, layer_types=MIXED, sliding_window=32))
    causal = (False, False) if layout == "deepspec" else (True, False)
    assert windows(config) == ((32, None), causal)
    assert config.sliding_window == 32


@pytest.mark.parametrize("layout", ALIKE)
@pytest.mark.parametrize("key", ["is_causal", "causal"])
@pytest.mark.parametrize("stated", [False, True])
def test_a_stated_causality_holds_for_every_layer_of_a_z_lab_draft(
    layout: str, key: str, stated: bool, tmp_path: Path
) -> None:
    variant: dict[str, Any] = {"causal": stated} if key == "causal" else {"config": {key: stated}}
    folder = written(tmp_path, layout, layer_types=MIXED, sliding_window=32, **variant)
    assert windows(read(folder)) == ((32, None), (stated, stated))


def test_two_causalities_that_differ_are_ambiguous(tmp_path: Path) -> None:
    folder = written(tmp_path, causal=False, config={"is_causal": True})
    with pytest.raises(UserError, match=r"is_causal is True, and dflash_config.causal is False"):
        read(folder)


@pytest.mark.parametrize(
    ("non_causal", "causal"),
    [(None, (True, False)), (False, (True, False)), (True, (False, False))],
)
def test_sliding_layers_of_speculators_are_causal_unless_the_file_says_not(
    non_causal: bool | None, causal: tuple[bool, ...], tmp_path: Path
) -> None:
    folder = written(
        tmp_path, "speculators", layer_types=MIXED, sliding_window=32, non_causal=non_causal
    )
    assert windows(read(folder)) == ((32, None), causal)


def test_full_layers_of_speculators_are_never_causal(tmp_path: Path) -> None:
    assert read(written(tmp_path, "speculators", non_causal=False)).causal == (False, False)


@pytest.mark.parametrize("causal", [None, False, True])
def test_use_swa_is_a_window_on_every_layer_without_causality_unless_stated(
    causal: bool | None, tmp_path: Path
) -> None:
    folder = written(tmp_path, "modelopt", sliding_window=32, causal=causal)
    assert windows(read(folder)) == ((32, 32), (bool(causal), bool(causal)))


@pytest.mark.parametrize(
    ("nested", "said"),
    [
        ({"use_swa": True}, "swa_window_size is None"),
        ({"use_swa": True, "swa_window_size": 0}, "swa_window_size is 0"),
        ({"use_swa": "yes", "swa_window_size": 32}, "use_swa is 'yes'"),
        ({"swa_window_size": 32}, r"dflash_config.use_swa is None; expected true or false"),
    ],
)
def test_a_half_stated_use_swa_is_refused(
    nested: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        read(written(tmp_path, nested=nested))


def test_use_swa_and_sliding_layers_have_to_name_one_window(tmp_path: Path) -> None:
    swa = {"use_swa": True, "swa_window_size": 32}
    both = {"layer_types": MIXED, "nested": swa}
    assert read(written(tmp_path, sliding_window=32, **both)).sliding_windows == (32, 32)
    with pytest.raises(UserError, match=r"sliding_window is 16, and .*swa_window_size is 32"):
        read(written(tmp_path, sliding_window=16, **both))
    off = {"use_swa": False, "swa_window_size": 32}
    assert read(written(tmp_path, nested=off)).sliding_windows == (None, None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"layer_types": [SLIDING]}, "layer_types is .* a list of 2"),
        ({"layer_types": [FULL] * 3}, "layer_types is .* a list of 2"),
        ({"layer_types": [FULL, "chunked_attention"]}, "layer_types is .*chunked_attention"),
        ({"layer_types": [FULL, 3]}, "layer_types is"),
        ({"layer_types": {FULL: 1, SLIDING: 2}}, "layer_types is"),
        ({"layer_types": MIXED, "use_sliding_window": True}, "sliding_window is None"),
        ({"layer_types": MIXED, "use_sliding_window": None, "sliding_window": 0},
         "sliding_window is 0"),
        ({"layer_types": MIXED, "sliding_window": 32}, "use_sliding_window is False"),
        ({"layer_types": None, "use_sliding_window": True, "sliding_window": 32,
          "max_window_layers": None}, "max_window_layers is None"),
    ],
    ids=str,
)  # fmt: skip
def test_trap_sliding_layers_are_never_run_as_full_attention(
    layout: str, keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    variant = {place(layout): keys}
    with pytest.raises(UserError, match=said):
        read(written(tmp_path, layout, **variant))


@pytest.mark.parametrize("layout", ["z-lab", "speculators", "deepspec"])
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"sliding_window": 32}, (None, None)),
        ({"sliding_window": 32, "use_sliding_window": False}, (None, None)),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0}, (32, 32)),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, (None, 32)),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2}, (None, None)),
    ],
    ids=str,
)
def test_without_layer_types_windows_are_those_that_transformers_computes_for_qwen3(
    layout: str, keys: dict[str, Any], expected: tuple[int | None, ...], tmp_path: Path
) -> None:
    from transformers import Qwen3Config

    keys = {"use_sliding_window": None, "layer_types": None, **keys}
    assert read(written(tmp_path, layout, **{place(layout): keys})).sliding_windows == expected
    given = {key: value for key, value in keys.items() if value is not None}
    independent = Qwen3Config(num_hidden_layers=2, **given)
    assert (
        tuple(
            independent.sliding_window if kind == SLIDING else None
            for kind in independent.layer_types
        )
        == expected
    )


def test_layer_types_win_over_max_window_layers(tmp_path: Path) -> None:
    keys = {"max_window_layers": 2}
    folder = written(tmp_path, layer_types=MIXED, sliding_window=32, config=keys)
    assert read(folder).sliding_windows == (32, None)


# Sizes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_target_may_have_another_width_than_the_draft(layout: str, tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target", hidden=96)
    weights = random_weights(1, target_hidden=96)
    config = read(written(tmp_path, layout, weights=weights), target)
    assert (config.hidden_size, config.target_hidden_size) == (64, 96)
    assert config.raw_row_width == 3 * 96
    other = write_tiny_model(tmp_path / "other", hidden=32)
    with pytest.raises(UserError, match=r"target_hidden_size is 96; the target's .* 32"):
        read(tmp_path / "draft", other)


def test_head_dim_may_be_another_than_the_width_over_the_heads(tmp_path: Path) -> None:
    weights = random_weights(1, head_dim=32)
    assert read(written(tmp_path, weights=weights)).head_dim == 32
    folder = written(tmp_path, weights=weights, config={"head_dim": None})
    with pytest.raises(UserError, match=r"k_norm.weight is \[32\]; .* asks for \[16\]"):
        read(folder)


@pytest.mark.parametrize(
    ("bias", "flags"),
    [
        ({"qkv_bias": True, "o_bias": True}, (True, True, False)),
        ({"qkv_bias": True}, (True, False, False)),
        ({"mlp_bias": True}, (False, False, True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_are_those_that_the_config_names(
    layout: str, bias: dict[str, bool], flags: tuple[bool, ...], tmp_path: Path
) -> None:
    config = read(written(tmp_path, layout, weights=random_weights(1, **bias)))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == flags


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_is_the_layer_s_and_mrope_is_plain_for_text(layout: str, tmp_path: Path) -> None:
    parameters = {"rope_theta": 5e5, "rope_type": "default", "mrope_section": [2, 3, 3]}
    keys = {"rope_theta": None, "rope_parameters": parameters}
    folder = written(tmp_path, layout, **{place(layout): keys})
    assert read(folder).rope == RopeScaling(kind="default", theta=5e5)
    both = {"rope_theta": 10000.0, "rope_parameters": parameters}
    with pytest.raises(UserError, match=r"rope_theta is 10000.0, and 500000.0"):
        read(written(tmp_path, layout, **{place(layout): both}))
