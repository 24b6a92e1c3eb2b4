"""The synthetic target by plain loops in float64: full attention, no cache, nothing of the product.

What its drafts are shown right with, before the services are asked.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.copy_target import EPS, HEAD_DIM, N_HEADS, N_LAYERS, ROPE_THETA, TAP_LAYERS, VOCAB_SIZE

Weights = dict[str, torch.Tensor]


def read_double(folder: Path) -> Weights:
    """Return a folder's tensors, those of numbers in float64."""
    weights = load_file(folder / "model.safetensors")
    return {n: t.double() if t.is_floating_point() else t for n, t in weights.items()}


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate [N, heads, D] by its positions 0..N-1, half-split."""
    angles = torch.arange(len(x)).double()[:, None] * ROPE_THETA ** (
        -torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def attention(weights: Weights, layer: str, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (
        (x @ weights[f"{layer}.self_attn.{name}_proj.weight"].T).view(-1, N_HEADS, HEAD_DIM)
        for name in "qkv"
    )
    scores = torch.einsum("qhd,khd->hqk", rotated(q), rotated(k)) / HEAD_DIM**0.5
    later = torch.ones(len(x), len(x)).triu(1).bool()
    mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
    return mixed.reshape(len(x), -1) @ weights[f"{layer}.self_attn.o_proj.weight"].T


def mlp(weights: Weights, layer: str, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (weights[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def run_target(weights: Weights, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [N, V] and raw rows [N, taps * H]."""
    x, taps = weights["model.embed_tokens.weight"][tokens], []
    for index in range(N_LAYERS):
        layer = f"model.layers.{index}"
        x = x + attention(weights, layer, norm(x, weights[f"{layer}.input_layernorm.weight"]))
        post = norm(x, weights[f"{layer}.post_attention_layernorm.weight"])
        x = x + mlp(weights, layer, post)
        taps += [x] if index in TAP_LAYERS else []
    logits = norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T
    return logits, torch.cat(taps, dim=-1)


def choice(logits: torch.Tensor, position: int, temperature: float) -> int:
    """Return the choice from logits [V] with a noise a position and target id."""
    uniform = torch.rand(VOCAB_SIZE, generator=torch.Generator().manual_seed(position))
    noise = -(-uniform.double().clamp(1e-9, 1 - 1e-9).log()).log()
    return int((logits + temperature * noise).argmax())
