"""What a draft has to know of its target; reference values of Gemma's from `transformers`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from graph_runtime.dflash.checkpoint import load_checkpoint, load_fusion
from graph_runtime.drafts.source import DraftSource
from graph_runtime.drafts.target import DraftTarget, read_target
from splitspec.errors import UserError
from tests.dflash_layouts import random_weights, write_draft
from tests.tiny import write_tiny_model, write_tiny_tokenizer

FAMILIES = ("gemma", "gemma2", "gemma3_text")
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def gemma(family: str, **config: Any) -> Any:
    """Return a tiny random model of `transformers`."""
    import transformers

    kinds = {
        "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
        "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    }
    make_config, make_model = kinds[family]
    torch.manual_seed(0)
    return make_model(make_config(**{**SIZES, **config})).eval()


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


def write_config(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SIZES, **config}))
    return folder


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_target_that_the_decoder_runs_is_neither_scaled_nor_capped(
    family: str, tied: bool, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path, family=family, tied=tied)
    assert read_target(folder) == DraftTarget(hidden_size=64, n_layers=4, vocab_size=300, tied=tied)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_gemma_s_scale_is_what_transformers_multiplies_its_embedding_with(
    family: str, tmp_path: Path
) -> None:
    model = gemma(family)
    seen: list[torch.Tensor] = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    tokens = torch.tensor([[5, 7, 299]])
    model(tokens)
    target = read_target(saved(model, tmp_path))
    table = model.get_input_embeddings().weight
    torch.testing.assert_close(seen[0], table[tokens] * target.embedding_scale)
    assert (target.hidden_size, target.n_layers, target.vocab_size) == (48, 4, 300)
    assert target.tied
    assert target.embedding_scale == math.sqrt(48)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gemma", {}),
        ("gemma2", {}),
        ("gemma2", {"final_logit_softcapping": 0.5}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma3_text", {}),
        ("gemma3_text", {"final_logit_softcapping": 0.5}),
    ],
    ids=str,
)
@torch.inference_mode()
def test_gemma_s_cap_is_what_transformers_caps_its_logits_with(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    model = gemma(family, **config)
    raw: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *seen: raw.append(seen[2]))
    logits = model(torch.tensor([[5, 7, 299]])).logits
    cap = read_target(saved(model, tmp_path)).final_softcap
    expected = raw[0] if cap is None else cap * torch.tanh(raw[0] / cap)
    torch.testing.assert_close(logits, expected)
    assert cap is not None or torch.equal(logits, raw[0])


def test_gemma_2_caps_at_30_where_its_file_says_nothing(tmp_path: Path) -> None:
    assert read_target(write_config(tmp_path, model_type="gemma2")).final_softcap == 30.0
    null = write_config(tmp_path, model_type="gemma2", final_logit_softcapping=None)
    assert read_target(null).final_softcap is None
    for family in ("gemma", "gemma3_text"):
        assert read_target(write_config(tmp_path, model_type=family)).final_softcap is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0; expected a number above 0"),
        ({"final_logit_softcapping": "30"}, "final_logit_softcapping is '30'"),
        ({"hidden_size": None}, r"hidden_size is None; expected an integer in \[1, "),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"architectures": ["Gemma2ForSequenceClassification"]}, "expected .'Gemma2ForCausalLM'"),
        ({"model_type": "gemma9"}, "architectures is .'gemma9'.; supported"),
        ({"model_type": ["gemma2"]}, "wrong type"),
    ],
    ids=str,
)
def test_a_broken_target_is_one_line_that_names_it(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = write_config(tmp_path / "t", **{"model_type": "gemma2", **config})
    with pytest.raises(UserError, match=said) as caught:
        read_target(folder)
    assert str(caught.value).startswith(f"target {folder}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_a_dflash_draft_for_gemma_loads_with_its_embedding_scale_and_cap(
    family: str, layout: str, tmp_path: Path
) -> None:
    model = gemma(family)
    target = saved(model, tmp_path / "t")
    folder = write_draft(tmp_path / "d", random_weights(1, hidden=48), layout=layout)
    draft = load_checkpoint(DraftSource(folder=folder, target=target), tmp_path / "cache")
    cap = 30.0 if family == "gemma2" else None
    assert draft.config.embedding_scale == math.sqrt(48)
    assert draft.config.final_softcap == cap
    table = model.get_input_embeddings().weight
    assert torch.equal(draft.tensors["embed_tokens.weight"], table)  # raw: scaled when it is used
    assert torch.equal(draft.tensors["lm_head.weight"], table)


def test_a_scale_or_cap_in_the_draft_s_file_has_to_be_the_target_s(tmp_path: Path) -> None:
    target = write_config(tmp_path / "t", model_type="gemma2")
    weights = random_weights(1, hidden=48)

    def read(**nested: Any) -> None:
        folder = write_draft(tmp_path / "d", weights, nested=nested)
        load_fusion(DraftSource(folder=folder, target=target), tmp_path / "cache")

    read(input_embedding_scale=6.928, final_logit_softcapping=30)
    with pytest.raises(UserError, match=r"input_embedding_scale is 1.0; expected 6.928"):
        read(input_embedding_scale=1.0)
    for cap in (20.0, 0):
        with pytest.raises(UserError, match=rf"final_logit_softcapping is {cap}; expected 30.0"):
            read(final_logit_softcapping=cap)
