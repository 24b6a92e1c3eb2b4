"""EAGLE-3 drafts recomputed longhand: full attention, no cache, float64.

Nothing of the product is imported here. Every call starts from the first slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.eagle3_layouts import DraftWeights


@dataclass(frozen=True, kw_only=True)
class Maths:
    """What a draft computes with its weights."""

    norm_before_residual: bool = False
    post_norm_feedback: bool = False
    sliding_window: int | None = None
    rope: dict[str, Any] = field(default_factory=dict)
    """`rope_parameters` as in an HF config.json, less theta."""
    eps: float = 1e-5


def fused(
    weights: DraftWeights, rows: torch.Tensor, target_norm: torch.Tensor | None = None
) -> torch.Tensor:
    """Return features [N, H] float64 of raw rows [N, taps * Ht].

    Args:
        weights: the draft's.
        rows: taps side by side.
        target_norm: weight of the target's final norm, of drafts without fc.
    """
    x = rows.double()
    if weights.n_taps == 0:
        assert target_norm is not None
        return _norm(x, target_norm.double())
    if "fusion.input_norm.weight" in weights.tensors:
        x = _norm(x, _weight(weights, "fusion.input_norm"))
    if "fusion.fc_norm.0.weight" in weights.tensors:
        width = weights.target_hidden
        for i in range(weights.n_taps):
            tap = slice(i * width, (i + 1) * width)
            x = x.clone()
            x[:, tap] = _norm(x[:, tap], _weight(weights, f"fusion.fc_norm.{i}"))
    return x @ _weight(weights, "fusion.fc").T


def chain_logits(
    weights: DraftWeights,
    maths: Maths,
    tokens: Sequence[int],
    features: torch.Tensor,
    steps: int,
) -> torch.Tensor:
    """Return the logits [steps, Vd] float64 of a seed and the chain steps after it.

    Args:
        weights: the draft's.
        maths: what it computes.
        tokens: S + steps - 1 target ids: those of positions 1, 2, ...; whatever was drafted.
        features: [S, H] of positions 0 .. S - 1; the chain's own follow.
        steps: logits wanted.
    """
    features = features.double()
    seed = len(features)
    logits = []
    for step in range(steps):
        hidden = _layer(weights, maths, list(tokens[: seed + step]), features)
        normed = _norm(hidden, _weight(weights, "norm"), maths.eps)
        logits.append(normed[-1] @ _weight(weights, "lm_head").T)
        fed_back = normed if maths.post_norm_feedback else hidden
        features = torch.cat((features, fed_back[-1:]))
    return torch.stack(logits)


def _layer(
    weights: DraftWeights, maths: Maths, tokens: list[int], features: torch.Tensor
) -> torch.Tensor:
    """Return the layer's outputs [S, H]."""
    embedded = _weight(weights, "embed_tokens")[tokens]
    embedded = _norm(embedded, _weight(weights, "layer.input_layernorm"), maths.eps)
    feature = features
    if "layer.hidden_norm.weight" in weights.tensors:
        feature = _norm(features, _weight(weights, "layer.hidden_norm"), maths.eps)
    attended = _attention(weights, maths, torch.cat((embedded, feature), dim=1))
    hidden = attended + (feature if maths.norm_before_residual else features)
    x = _norm(hidden, _weight(weights, "layer.post_attention_layernorm"), maths.eps)
    gate = _linear(weights, "layer.mlp.gate_proj", x)
    up = _linear(weights, "layer.mlp.up_proj", x)
    return hidden + _linear(weights, "layer.mlp.down_proj", gate / (1 + (-gate).exp()) * up)


def _attention(weights: DraftWeights, maths: Maths, x: torch.Tensor) -> torch.Tensor:
    """Return what attention adds, [S, H], of x [S, 2H]; one head at a time."""
    width = weights.head_dim
    q_all = _linear(weights, "layer.self_attn.q_proj", x)
    k_all = _linear(weights, "layer.self_attn.k_proj", x)
    v_all = _linear(weights, "layer.self_attn.v_proj", x)
    mixed = []
    for head in range(weights.n_heads):
        kv_head = head // (weights.n_heads // weights.n_kv_heads)
        q = q_all[:, head * width : (head + 1) * width]
        k = k_all[:, kv_head * width : (kv_head + 1) * width]
        v = v_all[:, kv_head * width : (kv_head + 1) * width]
        if "layer.self_attn.q_norm.weight" in weights.tensors:
            q = _norm(q, _weight(weights, "layer.self_attn.q_norm"), maths.eps)
            k = _norm(k, _weight(weights, "layer.self_attn.k_norm"), maths.eps)
        scores = _turned(q, maths) @ _turned(k, maths).T / width**0.5
        for i in range(len(x)):
            scores[i, i + 1 :] = float("-inf")
            if maths.sliding_window is not None:
                scores[i, : max(0, i - maths.sliding_window + 1)] = float("-inf")
        mixed.append(scores.softmax(dim=1) @ v)
    return _linear(weights, "layer.self_attn.o_proj", torch.cat(mixed, dim=1))


def _turned(x: torch.Tensor, maths: Maths) -> torch.Tensor:
    """Apply RoPE to x [S, D]: row p is position p, dimension i turns with i + D/2.

    Angles are rounded to float32, as every implementation does.
    """
    width = x.shape[1]
    scaling = {"rope_type": "default", "rope_theta": 10000.0, **maths.rope}
    magnitude = 1.0
    if scaling["rope_type"] == "default":
        turns = [scaling["rope_theta"] ** (-2 * i / width) for i in range(width // 2)]
        frequencies = torch.tensor(turns, dtype=torch.float32)
    else:
        config = LlamaConfig(head_dim=width, rope_parameters=scaling, max_position_embeddings=2048)
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    positions = torch.arange(len(x), dtype=torch.float32)
    angles = (positions[:, None] * frequencies).double()
    left, right = x[:, : width // 2], x[:, width // 2 :]
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=1)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return weight * x / ((x * x).mean(dim=1, keepdim=True) + eps).sqrt()


def _linear(weights: DraftWeights, name: str, x: torch.Tensor) -> torch.Tensor:
    bias = weights.tensors.get(f"{name}.bias")
    y = x @ _weight(weights, name).T
    return y if bias is None else y + bias.double()


def _weight(weights: DraftWeights, name: str) -> torch.Tensor:
    return weights.tensors[f"{name}.weight"].double()
