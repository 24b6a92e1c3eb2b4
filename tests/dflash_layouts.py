"""Write tiny random DFlash drafts in every checkpoint layout, from one set of weights.

Nothing of the product is imported here: a folder is what the layout's own exporter would write.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYOUTS = ("z-lab", "modelopt", "speculators", "deepspec")
"""Those that `write_draft` writes."""
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class DFlashWeights:
    """A draft's weights, and the sizes that its tensors do not tell."""

    tensors: dict[str, torch.Tensor]
    """float32, under the names of the draft's network: `fusion.fc.weight`, `layers.0.self_...`."""
    target_ids: list[int] | None
    """The target id of each draft id; None: they are the same."""
    vocab_size: int
    hidden: int
    target_hidden: int
    intermediate: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_taps: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False

    @property
    def draft_vocab_size(self) -> int:
        """Return Vd."""
        return self.vocab_size if self.target_ids is None else len(self.target_ids)

    def without(self, *names: str) -> DFlashWeights:
        """Return the same weights less some tensors."""
        kept = {name: tensor for name, tensor in self.tensors.items() if name not in names}
        return replace(self, tensors=kept)


def random_weights(
    seed: int,
    *,
    hidden: int = 64,
    target_hidden: int | None = None,
    intermediate: int = 96,
    n_layers: int = 2,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = None,
    vocab_size: int = 300,
    draft_vocab_size: int | None = None,
    n_taps: int = 3,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    logit_scale: float = 0.3,
) -> DFlashWeights:
    """Return random weights under the network's names, own embedding and head included.

    Args:
        seed: same arguments and seed, same weights.
        draft_vocab_size: rows of the head, whose target ids are drawn; None: all of the target's.
    """
    # Neither the stream of a tiny target of the same seed nor that of an EAGLE-3 draft.
    generator = torch.Generator().manual_seed(2_000_003 + seed)
    target_hidden = target_hidden or hidden
    head_dim = head_dim or hidden // n_heads
    tensors: dict[str, torch.Tensor] = {}

    def normal(name: str, *shape: int, std: float) -> None:
        tensors[name] = torch.randn(*shape, generator=generator) * std

    def linear(name: str, fan_out: int, fan_in: int, *, bias: bool = False) -> None:
        normal(f"{name}.weight", fan_out, fan_in, std=1.3 / math.sqrt(fan_in))
        if bias:
            normal(f"{name}.bias", fan_out, std=0.2)

    def norm(name: str, width: int) -> None:
        tensors[f"{name}.weight"] = 1.0 + 0.1 * torch.randn(width, generator=generator)

    normal("embed_tokens.weight", vocab_size, hidden, std=logit_scale)
    linear("fusion.fc", hidden, n_taps * target_hidden)
    norm("fusion.norm", hidden)
    for i in range(n_layers):
        layer = f"layers.{i}"
        norm(f"{layer}.input_layernorm", hidden)
        linear(f"{layer}.self_attn.q_proj", n_heads * head_dim, hidden, bias=qkv_bias)
        linear(f"{layer}.self_attn.k_proj", n_kv_heads * head_dim, hidden, bias=qkv_bias)
        linear(f"{layer}.self_attn.v_proj", n_kv_heads * head_dim, hidden, bias=qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, n_heads * head_dim, bias=o_bias)
        norm(f"{layer}.self_attn.q_norm", head_dim)
        norm(f"{layer}.self_attn.k_norm", head_dim)
        norm(f"{layer}.post_attention_layernorm", hidden)
        linear(f"{layer}.mlp.gate_proj", intermediate, hidden, bias=mlp_bias)
        linear(f"{layer}.mlp.up_proj", intermediate, hidden, bias=mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, intermediate, bias=mlp_bias)
    norm("norm", hidden)
    normal("lm_head.weight", draft_vocab_size or vocab_size, hidden, std=logit_scale)
    target_ids = None
    if draft_vocab_size is not None:
        drawn = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size]
        target_ids = sorted(drawn.tolist())
    return DFlashWeights(
        tensors=tensors,
        target_ids=target_ids,
        vocab_size=vocab_size,
        hidden=hidden,
        target_hidden=target_hidden,
        intermediate=intermediate,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        n_taps=n_taps,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
    )


def write_draft(
    folder: Path,
    weights: DFlashWeights,
    *,
    layout: str = "z-lab",
    block_size: int = 8,
    mask_token_id: int = 16,
    tap_layers: Sequence[int] = (0, 1, 2),
    n_target_layers: int = 4,
    layer_types: Sequence[str] | None = None,
    sliding_window: int | None = None,
    causal: bool | None = None,
    non_causal: bool | None = None,
    sample_from_anchor: bool | None = None,
    own_embeddings: bool = False,
    block_size_in: str = "top",
    config: dict[str, Any] | None = None,
    nested: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor | None] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write `folder`/config.json and model.safetensors; return the folder.

    Args:
        folder: created when missing.
        weights: see `random_weights`.
        layout: one of LAYOUTS.
        block_size: slots of a trained block, the pending token's included.
        mask_token_id: what the other slots hold.
        tap_layers: 0-based layer outputs, written in the layout's numbering.
        n_target_layers: layers of the target, as files state it; 4 is the tiny target's.
        layer_types: one a layer; None: all slide where there is a sliding window, else none.
            ModelOpt's form of a window says that all are full.
        sliding_window: positions; None: no layer has a window.
        causal: `dflash_config.causal`; None: not written. Not for speculators and DeepSpec.
        non_causal: speculators' `sliding_window_non_causal`; None: not written.
        sample_from_anchor: None: not written. DeepSpec's files never state it: they always do.
        own_embeddings: whether embedding and head are in the file. A reduced vocabulary's head
            always is.
        block_size_in: "top", or "dflash_config" (newer z-lab files).
        config: top-level keys, which win.
        nested: keys of `dflash_config` (z-lab, ModelOpt) or `transformer_layer_config`
            (speculators), which win.
        tensors: tensors by the name in the file, which win; None removes one.
        dtype: of all weights.
    """
    assert len(tap_layers) == weights.n_taps, (tap_layers, weights.n_taps)
    written = {
        **_LAYOUTS[layout](weights, list(tap_layers)),
        **({} if layout == "speculators" else {"num_target_layers": n_target_layers}),
    }
    own = written if layout in ("speculators", "deepspec") else written["dflash_config"]
    (own if block_size_in == "dflash_config" else written)["block_size"] = block_size
    own["mask_token_id"] = mask_token_id
    if causal is not None:
        assert layout in ("z-lab", "modelopt"), layout
        own["causal"] = causal
    if non_causal is not None:
        assert layout == "speculators", layout
        own["sliding_window_non_causal"] = non_causal
    if sample_from_anchor is not None:
        assert layout != "deepspec", layout
        own["sample_from_anchor"] = sample_from_anchor
    layer = written["transformer_layer_config"] if layout == "speculators" else written
    _write_windows(layout, layer, own, weights.n_layers, layer_types, sliding_window)
    if nested:
        inner = "transformer_layer_config" if layout == "speculators" else "dflash_config"
        written.setdefault(inner, {}).update(nested)
    written.update(config or {})
    stored = _stored(weights, own_embeddings=own_embeddings)
    stored = {name: t.to(dtype) if t.is_floating_point() else t for name, t in stored.items()}
    for name, tensor in (tensors or {}).items():
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(written, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


def offsets(target_ids: list[int]) -> torch.Tensor:
    """Return `d2t`: what is added to a draft id to give its target id, [Vd] int64."""
    return torch.tensor([target - i for i, target in enumerate(target_ids)], dtype=torch.int64)


def covered(target_ids: list[int], vocab_size: int) -> torch.Tensor:
    """Return `t2d`: which target ids the draft knows, [V] bool."""
    known = set(target_ids)
    return torch.tensor([i in known for i in range(vocab_size)])


def _stored(weights: DFlashWeights, *, own_embeddings: bool) -> dict[str, torch.Tensor]:
    stored = {}
    for name, tensor in weights.tensors.items():
        if name == "embed_tokens.weight" and not own_embeddings:
            continue
        if name == "lm_head.weight" and not own_embeddings and weights.target_ids is None:
            continue
        if name.startswith("fusion.norm."):
            name = "hidden_" + name.removeprefix("fusion.")
        stored[name.removeprefix("fusion.")] = tensor.clone()
    if weights.target_ids is not None:
        stored["d2t"] = offsets(weights.target_ids)
        stored["t2d"] = covered(weights.target_ids, weights.vocab_size)
    return stored


def _write_windows(
    layout: str,
    layer: dict[str, Any],
    own: dict[str, Any],
    n_layers: int,
    layer_types: Sequence[str] | None,
    sliding_window: int | None,
) -> None:
    if layout == "modelopt" and sliding_window is not None and layer_types is None:
        layer["layer_types"] = [FULL] * n_layers
        own.update(use_swa=True, swa_window_size=sliding_window)
        return
    types = layer_types or [FULL if sliding_window is None else SLIDING] * n_layers
    layer["layer_types"] = list(types)
    layer["sliding_window"] = sliding_window
    layer["use_sliding_window"] = SLIDING in types


def _layer(weights: DFlashWeights) -> dict[str, Any]:
    """Return the keys of a Qwen3 decoder, which every layout has."""
    return {
        "model_type": "qwen3",
        "vocab_size": weights.vocab_size,
        "hidden_size": weights.hidden,
        "intermediate_size": weights.intermediate,
        "num_hidden_layers": weights.n_layers,
        "num_attention_heads": weights.n_heads,
        "num_key_value_heads": weights.n_kv_heads,
        "head_dim": weights.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 2048,
        "max_window_layers": weights.n_layers,
        "attention_bias": weights.o_bias,
        **({"qkv_bias": True} if weights.qkv_bias and not weights.o_bias else {}),
        **({"mlp_bias": True} if weights.mlp_bias else {}),
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "transformers_version": "4.57.3",
        "use_cache": True,
        "initializer_range": 0.02,
    }


def _zlab(weights: DFlashWeights, taps: list[int]) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        **_layer(weights),
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dtype": "bfloat16",
        "dflash_config": {"target_layer_ids": taps},
        **_target_width(weights),
    }


def _modelopt(weights: DFlashWeights, taps: list[int]) -> dict[str, Any]:
    written = _zlab(weights, taps)
    del written["auto_map"], written["dtype"]
    return {**written, "torch_dtype": "bfloat16"}


def _speculators(weights: DFlashWeights, taps: list[int]) -> dict[str, Any]:
    inner = _layer(weights)
    theta = inner.pop("rope_theta")
    del inner["rope_scaling"]
    inner["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "draft_vocab_size": weights.draft_vocab_size,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **_target_width(weights),
    }


def _deepspec(weights: DFlashWeights, taps: list[int]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3DSparkModel"],
        **_layer(weights),
        "target_layer_ids": taps,
        "markov_rank": 0,
        **_target_width(weights),
    }


def _target_width(weights: DFlashWeights) -> dict[str, Any]:
    if weights.target_hidden == weights.hidden:
        return {}
    return {"target_hidden_size": weights.target_hidden}


_LAYOUTS = {
    "z-lab": _zlab,
    "modelopt": _modelopt,
    "speculators": _speculators,
    "deepspec": _deepspec,
}
