"""What a draft's config.json says, in every layout: taps, norms, sizes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from graph_runtime.eagle3.checkpoint import Eagle3Source, load_fusion
from graph_runtime.eagle3.config import Eagle3Config
from graph_runtime.rope_config import RopeScaling
from splitspec.errors import UserError
from tests.eagle3_layouts import (
    LAYOUTS,
    DraftWeights,
    default_taps,
    random_weights,
    weights_for,
    write_draft,
)
from tests.tiny import write_tiny_model

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), n_layers=8)


def read(folder: Path, target: Path | None = None, **source: Any) -> Eagle3Config:
    return load_fusion(
        Eagle3Source(folder=folder, target=target, **source), folder.parent / "cache"
    )[0]


def written(tmp_path: Path, layout: str = "specforge", **variant: Any) -> Path:
    weights = variant.pop("weights", None) or weights_for(layout, 1)
    return write_draft(tmp_path / "draft", layout=layout, weights=weights, **variant)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_tells_the_draft_s_whole_shape(
    layout: str, target: Path, tmp_path: Path
) -> None:
    weights = weights_for(layout, 1)
    config = read(written(tmp_path, layout, weights=weights), target)
    assert config == Eagle3Config(
        layout="specforge" if layout == "eagle-3.1" else layout,
        hidden_size=64,
        target_hidden_size=64,
        intermediate_size=96,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        vocab_size=300,
        draft_vocab_size=300 if layout == "deepspec" else 100,
        tap_layers=(1, 2, 3, 4, 5) if layout == "deepspec" else (1, 3, 4),
        rope=RopeScaling(kind="default", theta=10000.0),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=layout in ("speculators", "deepspec"),
        sliding_window=None,
        use_aux_hidden_state=True,
        target_norm_eps=1e-5,
        hidden_norm=True,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=layout == "eagle-3.1",
        post_norm_feedback=layout == "eagle-3.1",
    )


# Tap layers


def test_e19_trap_tap_ids_off_by_one_the_same_numbers_name_other_layers_in_speculators_files(
    tmp_path: Path,
) -> None:
    ids = [2, 4, 5]
    nested = written(tmp_path / "n", "specforge", nested={IDS: ids})
    top_level = written(tmp_path / "t", "speculators", config={IDS: ids})
    assert read(nested).tap_layers == (2, 4, 5)
    assert read(top_level).tap_layers == (1, 3, 4)


@pytest.mark.parametrize(
    ("layout", "variant", "key"),
    [
        ("speculators", {"config": {"eagle_config": {IDS: [1, 3, 4]}}}, f"eagle_config.{IDS}"),
        ("specforge", {"config": {"target_layer_ids": [1, 3, 4]}}, "target_layer_ids"),
        ("speculators", {"config": {"target_layer_ids": [1, 3, 4]}}, "target_layer_ids"),
        ("deepspec", {"config": {"eagle_config": {IDS: [1, 2, 3, 4, 5]}}}, f"eagle_config.{IDS}"),
    ],
)
def test_trap_tap_ids_where_another_layout_has_them_are_ambiguous(
    layout: str, variant: dict[str, Any], key: str, tmp_path: Path
) -> None:
    folder = written(tmp_path, layout, **variant)
    with pytest.raises(UserError, match=rf"{key} states tap layers where a .* --tap-layers"):
        read(folder)
    taps = (1, 2, 3, 4, 5) if layout == "deepspec" else (1, 3, 4)
    assert read(folder, tap_layers=taps).tap_layers == taps


def test_e19_the_embedding_s_output_is_no_layer_s_and_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, "speculators", config={IDS: [0, 4, 5]})
    with pytest.raises(UserError, match=rf"{IDS} is \[0, 4, 5\]; .*embedding's output"):
        read(folder)


@pytest.mark.parametrize("layout", ["safeailab", "speculators", "modelopt"])
@pytest.mark.parametrize("n_layers", [8, 30, 32, 36])
def test_without_ids_the_taps_are_the_target_s_layers_1_n_half_less_1_and_n_less_4(
    layout: str, n_layers: int, tmp_path: Path
) -> None:
    target = write_tiny_model(tmp_path / "target", n_layers=n_layers, hidden=16)
    weights = weights_for(layout, 1, hidden=16)
    if layout == "safeailab":
        folder = written(tmp_path, layout, weights=weights)
    elif layout == "speculators":
        folder = written(tmp_path, layout, weights=weights, config={IDS: None})
    else:
        folder = written(tmp_path, layout, weights=weights, nested={IDS: None})
    assert read(folder, target).tap_layers == (1, n_layers // 2 - 1, n_layers - 4)
    with pytest.raises(UserError, match="give --target or --tap-layers"):
        read(folder)
    assert read(folder, tap_layers=(0, 2, 5)).tap_layers == (0, 2, 5)


def test_given_tap_layers_win_over_the_file_s(tmp_path: Path) -> None:
    assert read(written(tmp_path), tap_layers=(0, 1, 2)).tap_layers == (0, 1, 2)


@pytest.mark.parametrize(
    "ids", [[3, 1, 4], [1, 1, 4], [True, 3, 4], [1.0, 3, 4], ["1", 3, 4], [-1, 3, 4], [], {}, 3]
)
@pytest.mark.parametrize("layout", ["specforge", "speculators", "deepspec"])
def test_e19_an_invalid_list_of_taps_is_refused(layout: str, ids: Any, tmp_path: Path) -> None:
    key = "target_layer_ids" if layout == "deepspec" else IDS
    place = "nested" if layout == "specforge" else "config"
    folder = written(tmp_path, layout, **{place: {key: ids}})
    with pytest.raises(UserError, match=rf"{key} is .*; expected a list of ascending layers"):
        read(folder)


@pytest.mark.parametrize("most", [4096, 2**40, 2**70])
@pytest.mark.parametrize("layout", ["specforge", "speculators", "deepspec"])
def test_e19_taps_of_layers_that_no_model_has_are_refused(
    layout: str, most: int, tmp_path: Path
) -> None:
    key = "target_layer_ids" if layout == "deepspec" else IDS
    place = "nested" if layout == "specforge" else "config"
    ids = [1, 3, most + (layout == "speculators")]
    folder = written(tmp_path, layout, **{place: {key: ids}})
    with pytest.raises(UserError, match=rf"{key} is .*{ids[-1]}\]; .* in \[\d, 409[56]\]"):
        read(folder)
    with pytest.raises(UserError, match=rf"--tap-layers is .*{most}\]; .* in \[0, 4095\]"):
        read(written(tmp_path), tap_layers=(1, 3, most))
    assert read(written(tmp_path), tap_layers=(1, 3, 4095)).tap_layers == (1, 3, 4095)


@pytest.mark.parametrize("taps", [(3, 1, 4), (1, 1, 4), (-1, 3, 4), ()])
def test_e19_invalid_given_tap_layers_are_refused(taps: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--tap-layers is"):
        read(written(tmp_path), tap_layers=taps)


@pytest.mark.parametrize(("layout", "beyond"), [("specforge", 8), ("speculators", 9)])
def test_e19_a_tap_beyond_the_target_s_layers_is_refused(
    layout: str, beyond: int, target: Path, tmp_path: Path
) -> None:
    place = "nested" if layout == "specforge" else "config"
    last = written(tmp_path / "last", layout, **{place: {IDS: [1, 3, beyond - 1]}})
    assert read(last, target).tap_layers[-1] == 7
    folder = written(tmp_path, layout, **{place: {IDS: [1, 3, beyond]}})
    assert read(folder).tap_layers[-1] == 8
    with pytest.raises(UserError, match=r"but the target has the layers 0\.\.7"):
        read(folder, target)


def test_the_number_of_taps_is_told_by_the_inputs_of_fc(tmp_path: Path) -> None:
    folder = written(tmp_path, nested={IDS: [1, 3]})
    with pytest.raises(UserError, match=r"fc.weight is \[64, 192\], so it takes 3 taps .*\[1, 3\]"):
        read(folder)
    folder = written(tmp_path, tensors={"fc.weight": torch.zeros(64, 190)})
    with pytest.raises(UserError, match=r"fc.weight is \[64, 190\]; .* a multiple of .* 64"):
        read(folder)


def test_a_target_too_shallow_for_the_default_taps_needs_them_given(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target", n_layers=4)
    with pytest.raises(UserError, match=r"the tap layers are \[0, 1\]; give --tap-layers"):
        read(written(tmp_path, "safeailab"), target)


def test_ids_where_exporters_disagree_on_their_meaning_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, "modelopt", config={IDS: [2, 4, 5]})
    with pytest.raises(UserError, match=rf"{IDS} is at the top level.*give --tap-layers"):
        read(folder)
    assert read(folder, tap_layers=(1, 3, 4)).tap_layers == (1, 3, 4)


def test_a_target_of_another_depth_than_deepspec_s_file_states_is_refused(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target", n_layers=9)
    with pytest.raises(UserError, match="num_target_layers is 8; expected the target's 9"):
        read(written(tmp_path, "deepspec"), target)


# Without taps (ModelOpt)


@pytest.mark.parametrize("hidden_norm", [False, True])
@pytest.mark.parametrize("ids", [[], None, [1, 3, 4]])
def test_without_aux_states_the_one_tap_is_the_target_s_last_layer(
    hidden_norm: bool, ids: Any, target: Path, tmp_path: Path
) -> None:
    weights = random_weights(1, n_taps=0, hidden_norm=hidden_norm)
    folder = written(tmp_path, "modelopt", weights=weights, nested={IDS: ids})
    config = read(folder, target)
    assert config.tap_layers == (7,)
    assert not config.use_aux_hidden_state
    assert config.hidden_norm == hidden_norm
    with pytest.raises(UserError, match="give --target"):
        read(folder)
    with pytest.raises(UserError, match=r"--tap-layers is \[6\]; .* last layer, 7"):
        read(folder, target, tap_layers=(6,))


def test_without_taps_the_target_s_final_norm_keeps_its_own_epsilon(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "t", n_layers=8, config={"rms_norm_eps": 1e-3})
    weights = random_weights(1, n_taps=0)
    config = read(written(tmp_path, "modelopt", weights=weights), target)
    assert (config.target_norm_eps, config.rms_norm_eps) == (1e-3, 1e-5)
    with_taps = read(written(tmp_path / "s", "specforge"), target)
    assert with_taps.target_norm_eps == 1e-5


def test_without_aux_states_the_target_has_to_be_as_wide_as_the_draft(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target", hidden=32)
    weights = random_weights(1, n_taps=0, hidden_norm=False)
    with pytest.raises(UserError, match="hidden_size, 32, has to be the draft's, 64"):
        read(written(tmp_path, "modelopt", weights=weights), target)


def test_fc_without_aux_states_is_refused(target: Path, tmp_path: Path) -> None:
    folder = written(tmp_path, "modelopt", nested={"use_aux_hidden_state": False})
    with pytest.raises(UserError, match=r"unexpected tensor fc.weight \[64, 192\].*use_aux"):
        read(folder, target)


# Feedback and norms


def test_trap_norm_output_in_specforge_files_is_ambiguous_and_in_eagle_3_1_is_post_norm_feedback(
    tmp_path: Path,
) -> None:
    ambiguous = written(tmp_path / "a", "specforge", config={"norm_output": True})
    with pytest.raises(UserError, match=r"norm_output is true without fc_norm.*--feedback"):
        read(ambiguous)
    assert not read(ambiguous, feedback="pre-norm").post_norm_feedback
    assert read(ambiguous, feedback="post-norm").post_norm_feedback
    eagle31 = written(tmp_path / "b", "eagle-3.1")
    assert read(eagle31).post_norm_feedback
    assert not read(eagle31, feedback="pre-norm").post_norm_feedback


@pytest.mark.parametrize("layout", ["safeailab", "modelopt", "deepspec"])
def test_norm_output_is_ambiguous_in_every_format_that_does_not_define_it(
    layout: str, target: Path, tmp_path: Path
) -> None:
    folder = written(tmp_path, layout, config={"norm_output": True})
    with pytest.raises(UserError, match="norm_output"):
        read(folder, target)


@pytest.mark.parametrize("stated", [None, False, True])
def test_norm_output_of_speculators_files_is_post_norm_feedback(
    stated: bool | None, tmp_path: Path
) -> None:
    folder = written(tmp_path, "speculators", config={"norm_output": stated})
    assert read(folder).post_norm_feedback == bool(stated)


def test_false_or_absent_norm_output_is_pre_norm_feedback(tmp_path: Path) -> None:
    for i, layout in enumerate(("specforge", "eagle-3.1")):
        folder = written(tmp_path / str(i), layout, config={"norm_output": False})
        assert not read(folder).post_norm_feedback


@pytest.mark.parametrize("layout", ["specforge", "speculators", "modelopt"])
def test_norm_before_residual_is_false_unless_stated(layout: str, tmp_path: Path) -> None:
    key = "norm_before_residual"
    assert not read(written(tmp_path / "a", layout, config={key: None})).norm_before_residual
    assert read(written(tmp_path / "b", layout, norm_before_residual=True)).norm_before_residual


@pytest.mark.parametrize("layout", ["speculators", "modelopt"])
def test_e18_norm_before_fc_is_read_nested_or_not_and_refused_without_its_norm(
    layout: str, tmp_path: Path
) -> None:
    weights = random_weights(1, norm_before_fc=True)
    config = read(written(tmp_path / "a", layout, weights=weights))
    assert config.norm_before_fc
    folder = written(tmp_path / "b", layout, weights=weights, tensors={"input_norm.weight": None})
    with pytest.raises(UserError, match=r"missing tensor input_norm.weight.*norm_before_fc"):
        read(folder)
    place = "nested" if layout == "modelopt" else "config"
    # The writer says true where the tensor is, so it is taken back.
    folder = written(
        tmp_path / "c",
        layout,
        tensors={"input_norm.weight": torch.ones(192)},
        **{place: {"norm_before_fc": False}},
    )
    with pytest.raises(UserError, match=r"unexpected tensor input_norm.weight \[192\]"):
        read(folder)


def test_fc_norm_without_its_norms_and_norms_without_the_flag_are_refused(tmp_path: Path) -> None:
    eagle31 = weights_for("eagle-3.1", 1)
    for key in ("fc_norm", "use_aux_norm"):
        flags = {"fc_norm": None, "use_aux_norm": None, key: True}
        folder = written(tmp_path / key, "eagle-3.1", weights=eagle31, config=flags)
        assert read(folder).fc_norm
    folder = written(tmp_path / "b", "specforge", config={"fc_norm": True})
    with pytest.raises(UserError, match=r"missing tensor fc_norm.0.weight"):
        read(folder)
    folder = written(tmp_path / "c", "eagle-3.1", config={"fc_norm": False})
    with pytest.raises(UserError, match=r"unexpected tensor fc_norm.0.weight \[64\]"):
        read(folder)
    folder = written(tmp_path / "d", "eagle-3.1", tensors={"fc_norm.2.weight": None})
    with pytest.raises(UserError, match=r"missing tensor fc_norm.2.weight"):
        read(folder)
    folder = written(tmp_path / "e", "eagle-3.1", tensors={"fc_norm.3.weight": torch.ones(64)})
    with pytest.raises(UserError, match=r"unexpected tensor fc_norm.3.weight"):
        read(folder)


def test_both_norms_before_fc_are_refused(tmp_path: Path) -> None:
    weights = random_weights(1, norm_before_fc=True, fc_norm=True)
    with pytest.raises(UserError, match="norm_before_fc and fc_norm are both true"):
        read(written(tmp_path, "speculators", weights=weights))


def test_a_flag_that_is_true_in_one_place_and_false_in_another_is_refused(tmp_path: Path) -> None:
    folder = written(
        tmp_path,
        "modelopt",
        config={"norm_before_residual": True},
        nested={"norm_before_residual": False},
    )
    with pytest.raises(UserError, match="norm_before_residual is true in one place"):
        read(folder)


# Sizes


def test_trap_a_2048_position_draft_config_limits_nothing(tmp_path: Path) -> None:
    short = written(tmp_path / "a", config={"max_position_embeddings": 2048})
    longer = written(tmp_path / "b", config={"max_position_embeddings": 131072})
    unstated = written(tmp_path / "c", config={"max_position_embeddings": None})
    assert read(short) == read(longer) == read(unstated)


def test_the_number_of_layers_is_told_by_the_tensors(tmp_path: Path) -> None:
    folder = written(tmp_path, config={"num_hidden_layers": 40})
    assert read(folder) == read(written(tmp_path / "one"))


@pytest.mark.parametrize("layout", ["safeailab", "specforge", "speculators", "modelopt"])
def test_the_target_may_have_another_width_than_the_draft(layout: str, tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target", n_layers=8, hidden=96)
    weights = weights_for(layout, 1, target_hidden=96)
    config = read(written(tmp_path, layout, weights=weights), target)
    assert (config.hidden_size, config.target_hidden_size) == (64, 96)
    assert config.raw_row_width == 3 * 96
    other = write_tiny_model(tmp_path / "other", n_layers=8, hidden=32)
    with pytest.raises(UserError, match=r"target_hidden_size is 96; the target's .* 32"):
        read(tmp_path / "draft", other)


def test_head_dim_may_be_another_than_the_width_over_the_heads(tmp_path: Path) -> None:
    weights = random_weights(1, head_dim=32, qk_norm=True)
    assert read(written(tmp_path, weights=weights)).head_dim == 32
    folder = written(tmp_path, weights=weights, config={"head_dim": None})
    with pytest.raises(UserError, match=r"k_norm.weight is \[32\]; .* asks for \[16\]"):
        read(folder)


@pytest.mark.parametrize(
    ("bias", "flags"),
    [
        ({}, (False, False, False)),
        ({"qkv_bias": True, "o_bias": True}, (True, True, False)),
        ({"qkv_bias": True}, (True, False, False)),
        ({"mlp_bias": True}, (False, False, True)),
    ],
    ids=["none", "attention_bias", "qkv_bias", "mlp_bias"],
)
@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_biases_are_those_that_the_config_names(
    layout: str, bias: dict[str, bool], flags: tuple[bool, ...], tmp_path: Path
) -> None:
    weights = random_weights(1, **bias)
    config = read(written(tmp_path, layout, weights=weights))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == flags


def test_a_bias_that_the_config_does_not_name_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, tensors={"midlayer.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(UserError, match=r"unexpected tensor midlayer.self_attn.q_proj.bias \[64\]"):
        read(folder)


@pytest.mark.parametrize("layout", ["speculators", "deepspec"])
def test_a_qwen3_layer_has_norms_of_q_and_k(layout: str, tmp_path: Path) -> None:
    folder = written(tmp_path, layout, tensors={"layers.0.self_attn.k_norm.weight": None})
    with pytest.raises(UserError, match=r"missing tensor layers.0.self_attn.k_norm.weight"):
        read(folder)
    weights = weights_for(layout, 1, qk_norm=False)
    place = "nested" if layout == "speculators" else "config"
    folder = written(tmp_path, layout, weights=weights, **{place: {"model_type": "qwen3"}})
    with pytest.raises(UserError, match=r"missing tensor layers.0.self_attn.k_norm.weight and 1"):
        read(folder)


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"sliding_window": 32}, None),
        ({"sliding_window": 32, "use_sliding_window": True}, 32),
        ({"sliding_window": 32, "use_sliding_window": False}, None),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 28}, None),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0}, 32),
        ({"sliding_window": 32, "layer_types": ["sliding_attention"]}, 32),
        ({"sliding_window": 32, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 32, "use_sliding_window": True, "layer_types": ["full_attention"]},
         None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_a_window_is_used_only_where_the_layer_slides(
    layout: str, keys: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    place = "nested" if layout == "speculators" else "config"
    assert read(written(tmp_path, layout, **{place: keys})).sliding_window == window


PLAIN = RopeScaling(kind="default", theta=5e5)
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope_theta": 5e5}, PLAIN),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
         PLAIN),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
         PLAIN),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "rope_type": "default",
                                              "mrope_interleaved": True,
                                              "mrope_section": [24, 20, 20]}}, PLAIN),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
         RopeScaling(kind="llama3", theta=5e5, factor=8.0, original_context=8192,
                     low_freq_factor=1.0, high_freq_factor=4.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
         RopeScaling(kind="linear", theta=5e5, factor=2.0)),
    ],
    ids=["theta", "parameters", "mrope", "interleaved mrope", "llama3", "linear"],
)  # fmt: skip
def test_rope_is_read_in_every_form_and_mrope_is_plain_for_text(
    keys: dict[str, Any], rope: RopeScaling, tmp_path: Path
) -> None:
    assert read(written(tmp_path, config=keys)).rope == rope


# What is refused


def changed(weights: DraftWeights, **tensors: torch.Tensor | None) -> dict[str, Any]:
    return {"weights": weights, "tensors": tensors}


NO_NORM = random_weights(1, hidden_norm=False)
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "dflash by speculators": (
        "speculators", {"config": {"speculators_model_type": "dflash"}}, "speculators_model_type"),
    "dflash by architecture": (
        "modelopt", {"config": {"architectures": ["DFlashDraftModel"]}}, "this is DFlash"),
    "dflash by tensor": (
        "modelopt", {"tensors": {"hidden_norm.weight": torch.ones(64)}}, "DFlash"),
    "kimi by architecture": (
        "modelopt", {"config": {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}}, "Deepseek"),
    "mla by tensor": (
        "specforge", {"tensors": {"midlayer.self_attn.q_a_proj.weight": torch.ones(8, 8)}}, "MLA"),
    "p-eagle by mask": (
        "specforge", {"tensors": {"mask_hidden": torch.ones(1, 1, 192)}}, "P-EAGLE"),
    "p-eagle by layer": (
        "modelopt", {"tensors": {"layers.1.input_layernorm.weight": torch.ones(64)}}, "P-EAGLE"),
    "eagle-1 by fc": (
        "modelopt", changed(NO_NORM, **{"fc.weight": torch.ones(64, 128)}), "EAGLE-1 or EAGLE-2"),
    "eagle-1 by q_proj": (
        "modelopt", changed(NO_NORM, **{"layers.0.self_attn.q_proj.weight": torch.ones(64, 64)}),
        "EAGLE-1 or EAGLE-2"),
    "eagle-1 by what is missing": (
        "modelopt", {"embeddings": True, "tensors": {"fc.weight": None, "lm_head.weight": None}},
        "EAGLE-1 or EAGLE-2"),
    "a whole model": (
        "modelopt", {"tensors": {"model.norm.weight": torch.ones(64)}}, "whole model"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_weights_of_another_method_are_refused_and_said_to_be(kind: str, tmp_path: Path) -> None:
    layout, variant, said = OTHERS[kind]
    with pytest.raises(UserError, match=said):
        read(written(tmp_path, layout, **variant))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", None),
        ("hidden_size", 0),
        ("intermediate_size", 96.0),
        ("num_attention_heads", True),
        ("num_key_value_heads", 3),
        ("head_dim", [16]),
        ("head_dim", 15),
        ("rms_norm_eps", "1e-5"),
        ("vocab_size", -1),
        ("draft_vocab_size", "100"),
        ("attention_bias", "false"),
        ("mlp_bias", 1),
        ("norm_before_residual", "true"),
        ("norm_output", 0),
        ("fc_norm", []),
        ("target_hidden_size", 64.0),
        ("rope_theta", "10000"),
        ("rope_scaling", "linear"),
        ("layer_types", "full_attention"),
        ("use_sliding_window", "yes"),
        ("eagle_config", [1, 3, 4]),
        ("architectures", "LlamaForCausalLMEagle3"),
        ("architectures", [3]),
        ("hidden_act", "gelu"),
        ("quantization_config", {"bits": 4}),
        ("bias", True),
        ("speculators_model_type", 3),
    ],
)
def test_a_key_of_a_wrong_type_or_value_is_one_line_that_names_it(
    key: str, value: Any, tmp_path: Path
) -> None:
    folder = written(tmp_path, config={key: value})
    with pytest.raises(UserError, match=key) as caught:
        read(folder, tap_layers=(1, 3, 4))
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallel_draft_step", 2),
        ("use_mtp_layernorm", True),
        ("use_last_layernorm", False),
        ("use_input_layernorm_in_first_layer", False),
        ("use_aux_hidden_state", "true"),
    ],
)
def test_a_modelopt_option_that_is_no_eagle_3_is_refused(
    key: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=key):
        read(written(tmp_path, "modelopt", nested={key: value}))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000])
def test_a_broken_config_is_one_clear_line(text: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json") as caught:
        read(folder)
    assert "\n" not in str(caught.value)


def test_a_speculators_file_without_its_layer_s_config_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, "speculators", config={"transformer_layer_config": None})
    with pytest.raises(UserError, match="transformer_layer_config"):
        read(folder)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("specforge", {"architectures": None}),
        ("modelopt", {"architectures": None}),
        ("safeailab", {"architectures": ["LlamaForCausalLMEagle3"]}),
        ("specforge", {"architectures": ["Eagle3LlamaForCausalLM"]}),
        ("speculators", {"architectures": ["Eagle3DraftModel"]}),
        ("speculators", {"speculators_model_type": None}),
        ("speculators", {"architectures": None}),
    ],
)
def test_the_format_is_told_by_type_then_architecture_then_tensors(
    layout: str, changes: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    config = read(written(tmp_path, layout, config=changes), target)
    assert (config.layout, config.tap_layers) == (layout, default_taps(3))


def test_a_choice_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--embeddings is 'both'; expected one of auto, own"):
        Eagle3Source(folder=tmp_path, embeddings="both")
    with pytest.raises(UserError, match="--feedback is 'none'"):
        Eagle3Source(folder=tmp_path, feedback="none")


def test_a_file_without_tensors_is_said_to_hold_none(tmp_path: Path) -> None:
    folder = written(tmp_path)
    save_file({}, folder / "model.safetensors")
    with pytest.raises(UserError, match="draft: its safetensors hold no tensors"):
        read(folder)


def test_two_rope_thetas_that_differ_are_ambiguous(tmp_path: Path) -> None:
    both = {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500000.0}}
    with pytest.raises(UserError, match=r"rope_theta is 10000.0, and 500000.0 in rope_parameters"):
        read(written(tmp_path, config=both))
    both["rope_theta"] = 500000.0
    assert read(written(tmp_path, config=both)).rope.theta == 500000.0
