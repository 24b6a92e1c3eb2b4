"""DFlash drafts recomputed longhand: no cache, explicit masks, one head at a time, float64.

Nothing of the product is imported here. Every call starts from the features of the whole context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.dflash_layouts import DFlashWeights

EPS = 1e-5
"""Of the norms, as `write_draft` writes it."""
THETA = 10000.0


def fused(weights: DFlashWeights, rows: torch.Tensor, *, eps: float = EPS) -> torch.Tensor:
    """Return features [N, H] float64 of raw rows [N, taps * Ht]."""
    projected = rows.double() @ _weight(weights, "fusion.fc").T
    return _norm(projected, _weight(weights, "fusion.norm"), eps)


def block_logits(
    weights: DFlashWeights,
    *,
    features: torch.Tensor,
    pending: int,
    block_length: int,
    mask_token_id: int,
    windows: Sequence[int | None] | None = None,
    causal: Sequence[bool] | None = None,
    embedding: torch.Tensor | None = None,
    head: torch.Tensor | None = None,
    embedding_scale: float = 1.0,
    softcap: float | None = None,
    rope_theta: float = THETA,
    rope: dict[str, Any] | None = None,
    eps: float = EPS,
    tokens: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the logits [B, Vd] float64 of every slot of a block, slot 0's too.

    Args:
        weights: the draft's.
        features: [P, H] of the context: positions 0 .. P - 1.
        pending: token of slot 0, at position P.
        block_length: B, slots of the block.
        mask_token_id: token of the other slots.
        windows: one a layer: how many of the newest context positions its slots see; None in the
            list is all, None for the list is all in every layer. The block is seen at any distance.
        causal: one a layer: whether a slot sees no later slot; None: no layer is.
        embedding: [V, H] of the target; None: the draft's own.
        head: [Vd, H] of the target; None: the draft's own.
        embedding_scale: embedded tokens are multiplied by it.
        softcap: logits become cap * tanh(logits / cap).
        rope_theta: base of the plain RoPE.
        rope: `rope_parameters` as in an HF config.json, less theta.
        eps: of every norm.
        tokens: of all slots, in place of pending and masks.
    """
    context = features.double()
    block = list(tokens) if tokens is not None else [pending] + [mask_token_id] * (block_length - 1)
    assert len(block) == block_length, block
    table = _weight(weights, "embed_tokens") if embedding is None else embedding.double()
    turn = _Turn(weights.head_dim, {"rope_theta": rope_theta, **(rope or {})})
    x = table[block] * embedding_scale
    for i in range(weights.n_layers):
        window = windows[i] if windows is not None else None
        seen = _seen(len(context), block_length, window, causal is not None and causal[i])
        layer = f"layers.{i}"
        u = _norm(x, _weight(weights, f"{layer}.input_layernorm"), eps)
        x = x + _attention(weights, f"{layer}.self_attn", context, u, seen, turn, eps)
        u = _norm(x, _weight(weights, f"{layer}.post_attention_layernorm"), eps)
        gate = _linear(weights, f"{layer}.mlp.gate_proj", u)
        up = _linear(weights, f"{layer}.mlp.up_proj", u)
        x = x + _linear(weights, f"{layer}.mlp.down_proj", gate / (1 + (-gate).exp()) * up)
    x = _norm(x, _weight(weights, "norm"), eps)
    logits = x @ (_weight(weights, "lm_head") if head is None else head.double()).T
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def _seen(context: int, block_length: int, window: int | None, causal: bool) -> torch.Tensor:
    """Return which of the context's and the block's positions a slot sees, [B, P + B] bool."""
    seen = torch.zeros(block_length, context + block_length, dtype=torch.bool)
    for slot in range(block_length):
        for position in range(context):
            seen[slot, position] = window is None or position >= context - window
        for other in range(block_length):
            seen[slot, context + other] = other <= slot if causal else True
    return seen


def _attention(
    weights: DFlashWeights,
    name: str,
    context: torch.Tensor,
    block: torch.Tensor,
    seen: torch.Tensor,
    turn: _Turn,
    eps: float,
) -> torch.Tensor:
    """Return what attention adds, [B, H], of context features [P, H] and block inputs [B, H]."""
    width, length = weights.head_dim, len(context)
    rows = torch.cat((context, block))
    q_all = _linear(weights, f"{name}.q_proj", block)
    k_all, v_all = (_linear(weights, f"{name}.{part}_proj", rows) for part in "kv")
    mixed = []
    for head in range(weights.n_heads):
        kv_head = head // (weights.n_heads // weights.n_kv_heads)
        q = q_all[:, head * width : (head + 1) * width]
        k = k_all[:, kv_head * width : (kv_head + 1) * width]
        v = v_all[:, kv_head * width : (kv_head + 1) * width]
        q = turn(_norm(q, _weight(weights, f"{name}.q_norm"), eps), first=length)
        k = turn(_norm(k, _weight(weights, f"{name}.k_norm"), eps), first=0)
        scores = (q @ k.T / width**0.5).masked_fill(~seen, float("-inf"))
        mixed.append(scores.softmax(dim=1) @ v)
    return _linear(weights, f"{name}.o_proj", torch.cat(mixed, dim=1))


class _Turn:
    """RoPE: dimension i turns with i + D/2.

    Angles are rounded to float32, as every implementation does.
    """

    def __init__(self, width: int, parameters: dict[str, Any]) -> None:
        self.magnitude = 1.0
        if parameters.get("rope_type", "default") == "default":
            turns = [parameters["rope_theta"] ** (-2 * i / width) for i in range(width // 2)]
            self.frequencies = torch.tensor(turns, dtype=torch.float32)
        else:
            config = LlamaConfig(
                head_dim=width, rope_parameters=parameters, max_position_embeddings=2048
            )
            scaled = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
            self.frequencies, self.magnitude = scaled

    def __call__(self, x: torch.Tensor, *, first: int) -> torch.Tensor:
        """Turn x [N, D], whose row i is position first + i."""
        positions = torch.arange(first, first + len(x), dtype=torch.float32)
        angles = (positions[:, None] * self.frequencies).double()
        left, right = x.chunk(2, dim=1)
        cos, sin = angles.cos() * self.magnitude, angles.sin() * self.magnitude
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=1)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / ((x * x).mean(dim=1, keepdim=True) + eps).sqrt()


def _linear(weights: DFlashWeights, name: str, x: torch.Tensor) -> torch.Tensor:
    bias = weights.tensors.get(f"{name}.bias")
    y = x @ _weight(weights, name).T
    return y if bias is None else y + bias.double()


def _weight(weights: DFlashWeights, name: str) -> torch.Tensor:
    return weights.tensors[f"{name}.weight"].double()
