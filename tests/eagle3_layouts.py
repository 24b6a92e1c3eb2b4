"""Write tiny random EAGLE-3 drafts in every checkpoint layout, from one set of weights.

Nothing of the product is imported here: a folder is what the layout's own exporter would write.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYOUTS = ("safeailab", "specforge", "eagle-3.1", "speculators", "modelopt", "deepspec")
"""Those that `write_draft` writes; "eagle-3.1" is SpecForge's with a norm a tap."""


@dataclass(frozen=True, kw_only=True)
class DraftWeights:
    """A draft's weights, and the sizes that its tensors do not tell."""

    tensors: dict[str, torch.Tensor]
    """float32, under the names of the draft's network: `fusion.fc.weight`, `layer.self_attn...`."""
    target_ids: list[int] | None
    """The target id of each draft id; None: they are the same."""
    vocab_size: int
    hidden: int
    target_hidden: int
    intermediate: int
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

    def without(self, *names: str) -> DraftWeights:
        """Return the same weights less some tensors."""
        kept = {name: tensor for name, tensor in self.tensors.items() if name not in names}
        return replace(self, tensors=kept)


def random_weights(
    seed: int,
    *,
    hidden: int = 64,
    target_hidden: int | None = None,
    intermediate: int = 96,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = None,
    vocab_size: int = 300,
    draft_vocab_size: int | None = 100,
    n_taps: int = 3,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    hidden_norm: bool = True,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    logit_scale: float = 0.3,
) -> DraftWeights:
    """Return random weights under the network's names, own embedding and head included.

    Args:
        seed: same arguments and seed, same weights.
        draft_vocab_size: rows of the head, whose target ids are drawn; None: all of the target's.
        n_taps: 0 is a draft without fc, fed with the target's last hidden state.
    """
    # Not the stream of a tiny target of the same seed, whose first draw is its embedding too.
    generator = torch.Generator().manual_seed(1_000_003 + seed)
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
    if n_taps:
        linear("fusion.fc", hidden, n_taps * target_hidden)
    if norm_before_fc:
        norm("fusion.input_norm", n_taps * target_hidden)
    for i in range(n_taps if fc_norm else 0):
        norm(f"fusion.fc_norm.{i}", target_hidden)
    norm("layer.input_layernorm", hidden)
    if hidden_norm:
        norm("layer.hidden_norm", hidden)
    linear("layer.self_attn.q_proj", n_heads * head_dim, 2 * hidden, bias=qkv_bias)
    linear("layer.self_attn.k_proj", n_kv_heads * head_dim, 2 * hidden, bias=qkv_bias)
    linear("layer.self_attn.v_proj", n_kv_heads * head_dim, 2 * hidden, bias=qkv_bias)
    linear("layer.self_attn.o_proj", hidden, n_heads * head_dim, bias=o_bias)
    if qk_norm:
        norm("layer.self_attn.q_norm", head_dim)
        norm("layer.self_attn.k_norm", head_dim)
    norm("layer.post_attention_layernorm", hidden)
    linear("layer.mlp.gate_proj", intermediate, hidden, bias=mlp_bias)
    linear("layer.mlp.up_proj", intermediate, hidden, bias=mlp_bias)
    linear("layer.mlp.down_proj", hidden, intermediate, bias=mlp_bias)
    norm("norm", hidden)
    normal("lm_head.weight", draft_vocab_size or vocab_size, hidden, std=logit_scale)
    target_ids = None
    if draft_vocab_size is not None:
        drawn = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size]
        target_ids = sorted(drawn.tolist())
    return DraftWeights(
        tensors=tensors,
        target_ids=target_ids,
        vocab_size=vocab_size,
        hidden=hidden,
        target_hidden=target_hidden,
        intermediate=intermediate,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        n_taps=n_taps,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
    )


def weights_for(layout: str, seed: int, **sizes: Any) -> DraftWeights:
    """Return random weights with what is special about a layout; `sizes` win."""
    special: dict[str, dict[str, Any]] = {
        "eagle-3.1": {"fc_norm": True},
        "speculators": {"qk_norm": True},
        "deepspec": {"qk_norm": True, "n_taps": 5, "draft_vocab_size": None},
    }
    return random_weights(seed, **{**special.get(layout, {}), **sizes})


def default_taps(n_taps: int) -> tuple[int, ...]:
    """Return the tap layers (0-based layer outputs) of a draft for a target of eight layers.

    Three are what SafeAILab's files mean, which state none.
    """
    return {0: (), 1: (6,), 2: (1, 4), 3: (1, 3, 4), 5: (1, 2, 3, 4, 5)}[n_taps]


def write_draft(
    folder: Path,
    *,
    layout: str,
    weights: DraftWeights,
    tap_layers: tuple[int, ...] | None = None,
    norm_before_residual: bool = False,
    post_norm_feedback: bool = False,
    embeddings: bool | None = None,
    dtype: torch.dtype = torch.float32,
    config: dict[str, Any] | None = None,
    nested: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor | None] | None = None,
) -> Path:
    """Write config.json and model.safetensors of a draft in a layout; return `folder`.

    Args:
        folder: created when missing.
        layout: one of LAYOUTS.
        weights: see `random_weights`; what the layout does not store is left out.
        tap_layers: 0-based layer outputs; written in the layout's own numbering.
        norm_before_residual: the residual is the normed feature.
        post_norm_feedback: written as `norm_output`, which "eagle-3.1" always has.
        embeddings: whether they are stored; None: as the layout's exporter does.
        dtype: of the floating-point tensors.
        config: further top-level keys, which win.
        nested: further keys of `eagle_config`, or of speculators' `transformer_layer_config`.
        tensors: changes under the stored names, None removes.
    """
    taps = default_taps(weights.n_taps) if tap_layers is None else tap_layers
    written, inner = _CONFIGS[layout](weights, list(taps))
    inner.update(nested or {})
    if norm_before_residual or layout == "speculators":
        written["norm_before_residual"] = norm_before_residual
    if post_norm_feedback or layout == "eagle-3.1":
        written["norm_output"] = True
    if "fusion.input_norm.weight" in weights.tensors:
        (inner if layout == "modelopt" else written)["norm_before_fc"] = True
    if "fusion.fc_norm.0.weight" in weights.tensors:
        written["fc_norm"] = True
    written.update(config or {})
    stored = _stored(layout, weights, embeddings)
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


def _stored(layout: str, weights: DraftWeights, embeddings: bool | None) -> dict[str, torch.Tensor]:
    layer = "midlayer." if layout in ("safeailab", "specforge", "eagle-3.1") else "layers.0."
    if embeddings is None:
        embeddings = layout in ("speculators", "deepspec")
    stored = {}
    for name, tensor in weights.tensors.items():
        if name == "embed_tokens.weight" and not embeddings:
            continue
        if name.startswith("layer."):
            name = layer + name.removeprefix("layer.")
        stored[name.removeprefix("fusion.")] = tensor.clone()
    if weights.target_ids is not None:
        stored["d2t"] = offsets(weights.target_ids)
        if layout != "modelopt":
            stored["t2d"] = covered(weights.target_ids, weights.vocab_size)
    return stored


def _layer(weights: DraftWeights) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": weights.vocab_size,
        "hidden_size": weights.hidden,
        "intermediate_size": weights.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": weights.n_heads,
        "num_key_value_heads": weights.n_kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "attention_bias": weights.o_bias,
        **({"qkv_bias": True} if weights.qkv_bias and not weights.o_bias else {}),
        **({"mlp_bias": True} if weights.mlp_bias else {}),
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "transformers_version": "4.53.0",
        "use_cache": True,
        "initializer_range": 0.02,
    }


def _safeailab(weights: DraftWeights, taps: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    assert tuple(taps) == default_taps(3), "a SafeAILab file states no taps"
    written = {"architectures": ["LlamaForCausalLM"], **_layer(weights), "torch_dtype": "float16"}
    written["draft_vocab_size"] = weights.draft_vocab_size
    if weights.head_dim * weights.n_heads != weights.hidden:
        written["head_dim"] = weights.head_dim
    if weights.target_hidden != weights.hidden:
        written["target_hidden_size"] = weights.target_hidden
    return written, {}


def _specforge(weights: DraftWeights, taps: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    inner: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": taps, "use_aux_hidden_state": True}
    written = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer(weights),
        "head_dim": weights.head_dim,
        "rope_scaling": None,
        "draft_vocab_size": weights.draft_vocab_size,
        "target_hidden_size": weights.target_hidden,
        "torch_dtype": "bfloat16",
        "eagle_config": inner,
    }
    return written, inner


def _speculators(weights: DraftWeights, taps: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    inner = {**_layer(weights), "head_dim": weights.head_dim}
    if "layer.self_attn.q_norm.weight" in weights.tensors:
        inner["model_type"] = "qwen3"
    theta = inner.pop("rope_theta")
    inner["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    written = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": weights.draft_vocab_size,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if weights.target_hidden != weights.hidden:
        written["target_hidden_size"] = weights.target_hidden
    return written, inner


def _modelopt(weights: DraftWeights, taps: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    inner: dict[str, Any] = {
        "eagle_aux_hidden_state_layer_ids": taps,
        "use_aux_hidden_state": weights.n_taps > 0,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }
    written, _ = _specforge(weights, taps)
    if weights.target_hidden == weights.hidden:
        del written["target_hidden_size"]
    return {**written, "mlp_bias": weights.mlp_bias, "eagle_config": inner}, inner


def _deepspec(weights: DraftWeights, taps: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    written = {
        **_layer(weights),
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "head_dim": weights.head_dim,
        "target_layer_ids": taps,
        "num_target_layers": 8,
        "layer_types": ["full_attention"],
        "sliding_window": None,
        "use_sliding_window": False,
        "ttt_length": 7,
    }
    return written, {}


_CONFIGS = {
    "safeailab": _safeailab,
    "specforge": _specforge,
    "eagle-3.1": _specforge,
    "speculators": _speculators,
    "modelopt": _modelopt,
    "deepspec": _deepspec,
}
