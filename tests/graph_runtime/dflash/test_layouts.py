"""Which format a draft is, and everything that is no DFlash or a value that none has: by name."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graph_runtime.config_values import read_config_object
from graph_runtime.dflash.checkpoint import load_checkpoint, load_fusion
from graph_runtime.dflash.config import DFlashConfig
from graph_runtime.dflash.layouts import is_dflash
from graph_runtime.drafts.source import DraftSource
from splitspec.errors import UserError
from tests import eagle3_layouts
from tests.dflash_layouts import LAYOUTS, SLIDING, random_weights, write_draft
from tests.tiny import write_tiny_model

WEIGHTS = random_weights(1)
ONES = torch.ones(64)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"))


def read(folder: Path, target: Path | None = None, **source: Any) -> DFlashConfig:
    return load_fusion(
        DraftSource(folder=folder, target=target, **source), folder.parent / "cache"
    )[0]


def written(tmp_path: Path, layout: str = "z-lab", **variant: Any) -> Path:
    return write_draft(tmp_path / "draft", WEIGHTS, layout=layout, **variant)


def family(folder: Path) -> bool:
    names = set(load_file(folder / "model.safetensors"))
    return is_dflash(read_config_object(folder / "config.json"), names)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("z-lab", {"architectures": None}),
        ("modelopt", {"model_type": "llama", "auto_map": None}),
        ("speculators", {"architectures": ["DFlashDraftModel"]}),
        ("speculators", {"architectures": None}),
        ("speculators", {"speculators_model_type": None}),
        ("deepspec", {"markov_rank": None}),
        ("deepspec", {"enable_confidence_head": False, "num_anchors": 512}),
    ],
)
def test_the_format_is_told_by_type_then_architecture(
    layout: str, changes: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    config = read(written(tmp_path, layout, config=changes), target)
    assert config.layout == ("z-lab" if layout == "modelopt" else layout)
    assert config.tap_layers == (0, 1, 2)


def test_trap_a_speculators_file_that_passes_for_z_lab_s_is_not_read_one_layer_off(
    tmp_path: Path,
) -> None:
    folder = written(tmp_path, "speculators")
    config = json.loads((folder / "config.json").read_text())
    flat = {**config, **config["transformer_layer_config"], "architectures": ["DFlashDraftModel"]}
    del flat["speculators_model_type"]
    (folder / "config.json").write_text(json.dumps(flat))
    with pytest.raises(UserError, match=r"aux_hidden_state_layer_ids states tap layers where a z-"):
        read(folder)


# Other methods


TENSORS = {
    "candidate_selector.hidden_projection.weight": "DFlash2",
    "candidate_selector.predecessor_codebook": "DFlash2",
    "layers.0.attention_conv.base_kernel": "DFlash2",
    "layers.1.mlp_conv.kernel_projection.weight": "DFlash2",
    "markov_head.markov_w1": "DSpark",
    "logit_head.markov_w2.weight": "DSpark",
    "confidence_head.proj.weight": "DSpark",
    "prefix_gru.weight_ih_l0": "Domino",
    "embed_proj.0.weight": "Domino",
    "fusion_weights": "DFlare",
    "layers.0.self_attn.attention_sink_bias": "MiMo",
    "layers.0.self_attn.sinks": "sinks",
    "mask_embedding": "MiMo",
    "layers.0.self_attn.qkv_proj.weight": "Laguna",
    "layers.0.self_attn.g_proj.weight": "Laguna",
    "aux_hidden_norms.0.weight": "Laguna",
    "encoder.fc.weight": "Muse-Glimmer",
    "midlayer.hidden_norm.weight": "EAGLE-3",
    "layers.0.hidden_norm.weight": "EAGLE-3",
    "mask_hidden": "P-EAGLE",
    "model.layers.0.input_layernorm.weight": "a whole model",
    "layers.0.mlp.experts.0.up_proj.weight": "MoE",
    "layers.0.mlp.gate.weight": "MoE",
    "layers.0.self_attn.q_a_proj.weight": "MLA",
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_another_method_are_refused_and_said_whose_they_are(
    layout: str, name: str, tmp_path: Path
) -> None:
    folder = written(tmp_path, layout, tensors={name: ONES})
    with pytest.raises(UserError, match=f"tensor {name}: this is .*{TENSORS[name]}"):
        read(folder)


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "dflash2": ("z-lab", {"architectures": ["DFlash2DraftModel"]}, "this is DFlash2"),
    "dspark": ("z-lab", {"architectures": ["DSparkDraftModel"]}, "this is DSpark"),
    "gemma4 dspark": ("deepspec", {"architectures": ["Gemma4DSparkModel"]}, "this is DSpark"),
    "kimi dspark": ("z-lab", {"architectures": ["K3DSparkModel"]}, "this is DSpark"),
    "domino": ("z-lab", {"architectures": ["DominoDraftModel"]}, "this is Domino"),
    "muse": ("z-lab", {"architectures": ["MuseGlimmerAssistantModel"]}, "Muse-Glimmer"),
    "eagle-3": ("z-lab", {"architectures": ["LlamaForCausalLMEagle3"]}, "this is EAGLE-3"),
    "a model": ("z-lab", {"architectures": ["Qwen3ForCausalLM"]}, "expected a DFlash draft: one"),
    "markov": ("deepspec", {"markov_rank": 256}, "markov_rank is 256; .*DSpark"),
    "confidence": ("deepspec", {"enable_confidence_head": True}, "confidence_head is True; .*DSp"),
    "speculators dspark": ("speculators", {"speculators_model_type": "dspark"}, "this is DSpark"),
    "speculators dflash2": ("speculators", {"speculators_model_type": "dflash2"}, "is DFlash2"),
    "speculators eagle3": ("speculators", {"speculators_model_type": "eagle3"}, "is EAGLE-3"),
    "speculators mlp": ("speculators", {"speculators_model_type": "mlp"}, "is 'mlp'; .*'dflash'"),
    "speculators domino": ("speculators", {"projector_type": "domino"}, "projector_type is 'domin"),
    "other architecture": ("speculators", {"architectures": ["DSparkSpeculator"]}, "is DSpark"),
    "no mark at all": ("deepspec", {"architectures": None}, "architectures is None"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_configs_of_another_method_are_refused_and_said_whose_they_are(
    kind: str, tmp_path: Path
) -> None:
    layout, changes, said = CONFIGS[kind]
    with pytest.raises(UserError, match=said):
        read(written(tmp_path, layout, config=changes))


@pytest.mark.parametrize("projector", ["domino", "dspark", "gru", 3])
def test_another_projector_than_dflash_s_is_refused(projector: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dflash_config.projector_type is .*'dflash' or null"):
        read(written(tmp_path, nested={"projector_type": projector}))
    for own in ("dflash", "", None):
        read(written(tmp_path, nested={"projector_type": own}))


@pytest.mark.parametrize("layout", eagle3_layouts.LAYOUTS)
def test_an_eagle_3_draft_is_refused_and_is_no_dflash(
    layout: str, target: Path, tmp_path: Path
) -> None:
    weights = eagle3_layouts.weights_for(layout, 1)
    folder = eagle3_layouts.write_draft(tmp_path / "d", layout=layout, weights=weights)
    assert not family(folder)
    with pytest.raises(UserError, match=r"EAGLE-3|architectures|eagle3"):
        read(folder, target)


def test_a_whole_model_is_refused_and_is_no_dflash(target: Path) -> None:
    assert not family(target)
    with pytest.raises(UserError, match="whole model"):
        read(target)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_told_from_eagle_3(layout: str, tmp_path: Path) -> None:
    assert family(written(tmp_path, layout))
    assert family(written(tmp_path, layout, config={"architectures": None}))


@pytest.mark.parametrize(
    ("content", "names", "said"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, [], True),
        ({"architectures": ["DSparkDraftModel"]}, [], True),
        ({"architectures": ["Gemma4DSparkModel"]}, [], True),
        ({"architectures": ["MuseGlimmerAssistantModel"]}, [], True),
        ({"speculators_model_type": "dspark"}, [], True),
        ({"speculators_model_type": "eagle3"}, ["hidden_norm.weight"], False),
        ({"architectures": ["Qwen3Eagle3Model"]}, ["hidden_norm.weight"], False),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"], "dflash_config": {}}, [], False),
        ({}, ["candidate_selector.predecessor_codebook"], True),
        ({}, ["fc.weight", "hidden_norm.weight"], True),
        ({}, ["fc.weight", "layers.0.hidden_norm.weight"], False),
        ({}, ["layers.0.self_attn.q_a_proj.weight"], False),
        ({"architectures": 3, "speculators_model_type": 3, "dflash_config": 3}, [], True),
        ({"architectures": [3, None]}, [], False),
        ({}, [], False),
    ],
    ids=str,
)
def test_successors_count_as_dflash_and_nothing_of_eagle_3_does(
    content: dict[str, Any], names: list[str], said: bool
) -> None:
    assert is_dflash(content, names) == said


# Values and keys


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", None),
        ("hidden_size", 0),
        ("intermediate_size", 96.0),
        ("num_hidden_layers", None),
        ("num_hidden_layers", 2**40),
        ("num_attention_heads", True),
        ("num_key_value_heads", 3),
        ("head_dim", [16]),
        ("head_dim", 15),
        ("rms_norm_eps", "1e-5"),
        ("vocab_size", -1),
        ("attention_bias", "false"),
        ("mlp_bias", 1),
        ("rope_theta", "10000"),
        ("rope_scaling", "linear"),
        ("layer_types", "full_attention"),
        ("use_sliding_window", "yes"),
        ("hidden_act", "gelu"),
        ("bias", True),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_a_key_of_a_layer_with_a_wrong_type_or_value_is_one_line_that_names_it(
    layout: str, key: str, value: Any, tmp_path: Path
) -> None:
    place = "nested" if layout == "speculators" else "config"
    types = {} if key == "layer_types" else {"layer_types": None}
    variant = {place: {**types, key: value}}
    folder = written(tmp_path, layout, **variant)
    with pytest.raises(UserError, match=key) as caught:
        read(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", 1),
        ("block_size", 1025),
        ("block_size", 8.0),
        ("mask_token_id", "16"),
        ("mask_token_id", True),
        ("sample_from_anchor", "true"),
        ("shift_label", 1),
        ("target_hidden_size", 64.0),
        ("architectures", "DFlashDraftModel"),
        ("architectures", [3]),
        ("architectures", ["DFlashDraftModel", "DFlashSpeculator"]),
        ("speculators_model_type", 3),
        ("dflash_config", [0, 1, 2]),
        ("draft_vocab_size", "100"),
        ("use_aux_hidden_state", False),
    ],
)
def test_a_key_of_the_draft_with_a_wrong_type_or_value_is_one_line_that_names_it(
    layout: str, key: str, value: Any, tmp_path: Path
) -> None:
    folder = written(tmp_path, layout, config={key: value})
    with pytest.raises(UserError, match=key) as caught:
        read(folder, tap_layers=(0, 1, 2))
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("layout", ["z-lab", "modelopt"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("conv_kernel_size", 2),
        ("selector_rank", 256),
        ("markov_rank", 256),
        ("emb_dim", 256),
        ("attention_sink_bias", True),
        ("attention_value_scale", 0.5),
        ("input_embedding_scale", 8.0),
        ("output_multiplier", 0.25),
        ("final_logit_softcapping", 30.0),
        ("fc_layernorm", True),
        ("something_new", "on"),
        ("something_new", float("nan")),
    ],
)
def test_a_key_of_dflash_config_that_is_on_and_not_computed_is_refused(
    layout: str, key: str, value: Any, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rf"{key} is .*; expected"):
        read(written(tmp_path, layout, nested={key: value}), target)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("conv_kernel_size", 0),
        ("attention_sink_bias", False),
        ("something_new", None),
        ("attention_value_scale", 1.0),
        ("input_embedding_scale", 1),
        ("output_multiplier", 1.0),
        ("final_logit_softcapping", 0.0),
        ("num_anchors", 512),
        ("mask_token", "<|MASK|>"),
    ],
)
def test_a_key_of_dflash_config_that_changes_nothing_is_accepted(
    key: str, value: Any, target: Path, tmp_path: Path
) -> None:
    assert read(written(tmp_path, nested={key: value}), target).embedding_scale == 1.0


@pytest.mark.parametrize("key", ["is_causal", "causal"])
@pytest.mark.parametrize("layout", ["speculators", "deepspec"])
def test_causality_that_a_format_does_not_have_is_refused(
    key: str, layout: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"is_causal is True; .* a {layout} file"):
        read(written(tmp_path, layout, config={key: True}))
    read(written(tmp_path, layout, config={key: False}))


def test_speculators_causality_of_sliding_layers_in_a_z_lab_file_is_refused(tmp_path: Path) -> None:
    keys = {"sliding_window_non_causal": True}
    with pytest.raises(UserError, match="sliding_window_non_causal is True"):
        read(written(tmp_path, sliding_window=32, config=keys))
    read(written(tmp_path, sliding_window=32, causal=False, config=keys))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000])
def test_a_broken_config_is_one_clear_line(text: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json") as caught:
        read(folder)
    assert "\n" not in str(caught.value)


def test_a_speculators_file_without_its_layers_config_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, "speculators", config={"transformer_layer_config": None})
    with pytest.raises(UserError, match="transformer_layer_config"):
        read(folder)


# Damage


JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 10**400, 0.5, float("nan"), float("inf"), "", "x",
    "true", [], [0], [0, 1, 2], ["full_attention"], [SLIDING, SLIDING], {}, {"rope_type": "yarn"},
    [[]], [None, None], "DFlashDraftModel", ["Qwen3DSparkModel"], "dflash",
)  # fmt: skip


def objects(place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield place
    for value in place.values():
        if isinstance(value, dict):
            yield from objects(value)


def damaged(config: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return a config with one to three of its values, wherever they are, replaced by junk."""
    config = copy.deepcopy(config)
    for _ in range(chance.randint(1, 3)):
        place = chance.choice(list(objects(config)))
        keys = [*place, "dflash_config", "use_swa", "swa_window_size", "causal", "is_causal",
                "shift_label", "draft_vocab_size", "target_hidden_size", "output_multiplier",
                "final_logit_softcapping"]  # fmt: skip
        place[chance.choice(keys)] = copy.deepcopy(chance.choice(JUNK))
    return config


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_target", [False, True])
def test_whatever_a_config_holds_it_loads_or_is_one_line(
    layout: str, with_target: bool, target: Path, tmp_path: Path
) -> None:
    folder = written(tmp_path, layout, own_embeddings=True, layer_types=None, sliding_window=32)
    original = json.loads((folder / "config.json").read_text())
    chance = random.Random(f"{layout} {with_target}")
    source = DraftSource(folder=folder, target=target if with_target else None, embeddings="own")
    said: list[str] = []
    for _ in range(60):
        (folder / "config.json").write_text(json.dumps(damaged(original, chance)))
        try:
            load_checkpoint(source, tmp_path / "cache")
        except UserError as error:
            said.append(str(error))
    assert 12 < len(said) < 60
    assert not [line for line in said if "\n" in line or len(line) > 1000]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_the_tensors_are_they_load_or_are_one_line(
    layout: str, target: Path, tmp_path: Path
) -> None:
    folder = write_draft(
        tmp_path / "d",
        random_weights(1, draft_vocab_size=100),
        layout=layout,
        own_embeddings=True,
    )
    original = load_file(folder / "model.safetensors")
    chance = random.Random(layout)
    source = DraftSource(folder=folder, target=target, embeddings="own")
    dtypes = (torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.complex64)
    said: list[str] = []
    for _ in range(60):
        tensors = dict(original)
        for name in chance.sample(sorted(tensors), chance.randint(1, 2)):
            tensor = tensors.pop(name)
            tensors[chance.choice((name, name, f"{name}x", f"x.{name}"))] = chance.choice(
                (
                    lambda t: t.to(chance.choice(dtypes)),
                    lambda t: t[:-1].contiguous(),
                    lambda t: t[None].contiguous(),
                    lambda t: t.sum(),
                    lambda t: t.float() * float("inf"),
                )
            )(tensor)
        save_file(tensors, folder / "model.safetensors")
        try:
            load_checkpoint(source, tmp_path / "cache")
        except UserError as error:
            said.append(str(error))
    assert len(said) > 30
    assert not [line for line in said if "\n" in line]
