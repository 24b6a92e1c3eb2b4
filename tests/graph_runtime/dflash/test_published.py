"""The `config.json` of drafts as they are published, at their real sizes; no tensor is read."""

from __future__ import annotations

from typing import Any

import pytest

from graph_runtime.dflash.config import DFlashConfig
from graph_runtime.dflash.config_reader import read_dflash_config
from graph_runtime.dflash.keys import read_keys
from graph_runtime.dflash.layouts import find_layout, is_dflash
from graph_runtime.drafts.target import DraftTarget
from tests.dflash_layouts import FULL, SLIDING

NAMES = ("fc.weight", "hidden_norm.weight", "norm.weight")
TARGET = DraftTarget(hidden_size=4096, n_layers=36, vocab_size=151936, tied=False)
LAYER: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": [FULL] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
ZLAB: dict[str, Any] = {
    **LAYER,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "num_target_layers": 36,
    "tie_word_embeddings": False,
}
NEWER_ZLAB: dict[str, Any] = {
    **{key: value for key, value in ZLAB.items() if key not in ("block_size", "rope_theta")},
    "dflash_config": {
        "block_size": 16,
        "mask_token_id": 248077,
        "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
    },
    "hidden_size": 2048,
    "layer_types": [*[SLIDING] * 5, FULL],
    "num_hidden_layers": 6,
    "num_target_layers": 40,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "sliding_window": 4096,
    "use_sliding_window": True,
    "vocab_size": 248320,
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "block_size": 8,
    "draft_vocab_size": 151936,
    "mask_token_id": 151669,
    "max_anchors": 3072,
    "sliding_window_non_causal": False,
    "target_hidden_size": None,
    # Written whatever the projector is.
    "projector_type": "dflash",
    "pure_draft_prefix_len": 1,
    "emb_dim": 256,
    "gru_hidden_dim": 1024,
    "shift_label": False,
    "transformer_layer_config": LAYER,
    "tie_word_embeddings": False,
}
DEEPSPEC: dict[str, Any] = {
    **LAYER,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "enable_confidence_head": False,
    "markov_rank": 0,
    "mask_token_id": 151669,
    "num_anchors": 512,
    "num_target_layers": 36,
    "target_layer_ids": [1, 9, 17, 25, 33],
}


def read(content: dict[str, Any], n_taps: int, target: DraftTarget | None = TARGET) -> DFlashConfig:
    assert is_dflash(content, NAMES)
    keys = read_keys(find_layout(content, NAMES), content)
    hidden = keys.layer["hidden_size"]
    shapes = {"fusion.fc.weight": (hidden, n_taps * hidden)}
    return read_dflash_config(keys, shapes, target=target, taps=None)


@pytest.mark.parametrize(
    ("content", "layout", "block_size", "draft_count"),
    [
        (ZLAB, "z-lab", 16, 15),
        (SPECULATORS, "speculators", 8, 7),
        (DEEPSPEC, "deepspec", 7, 7),
    ],
    ids=["z-lab", "speculators", "deepspec"],
)
def test_three_formats_for_one_target_read_the_same_five_layers(
    content: dict[str, Any], layout: str, block_size: int, draft_count: int
) -> None:
    config = read(content, 5)
    assert config.layout == layout
    assert config.tap_layers == (1, 9, 17, 25, 33)
    assert config.block_size == block_size
    assert config.max_draft_count(block_size) == draft_count
    assert config.mask_token_id == 151669
    assert config.sliding_windows == (None,) * 5
    assert config.causal == (False,) * 5
    assert (config.vocab_size, config.draft_vocab_size) == (151936, 151936)


def test_a_newer_draft_has_its_block_size_nested_more_taps_than_layers_and_windows() -> None:
    config = read(NEWER_ZLAB, 8, target=None)
    assert config.tap_layers == (1, 6, 11, 16, 22, 27, 32, 37)
    assert config.block_size == 16
    assert config.sliding_windows == (*(4096,) * 5, None)
    assert config.causal == (*(True,) * 5, False)
    assert config.rope.theta == 1e7
