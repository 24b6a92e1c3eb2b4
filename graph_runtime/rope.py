"""Rotary position embeddings: default, linear, llama3 and yarn.

Sources: RoFormer (arXiv:2104.09864), linear interpolation (arXiv:2306.15595), YaRN
(arXiv:2309.00071), and Llama 3.1's published frequency rule.
"""

from __future__ import annotations

import math

import torch

from graph_runtime.rope_config import RopeScaling


def rope_tables(rope: RopeScaling, head_dim: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of positions [0, length), both [S, D] float32 on the CPU.

    The halves repeat: dimension i turns with dimension i + D/2.
    """
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies(rope, head_dim)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def frequencies(rope: RopeScaling, head_dim: int) -> torch.Tensor:
    """Return the angle a position adds in every pair of dimensions, [D/2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return _yarn(rope, plain, head_dim)


def _llama3(rope: RopeScaling, plain: torch.Tensor) -> torch.Tensor:
    """Keep fast frequencies, divide slow ones by the factor, blend those between."""
    turns = rope.original_context * plain / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1.0 - kept) * plain / rope.factor + kept * plain


def _yarn(rope: RopeScaling, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Blend interpolated and plain frequencies along a ramp over the dimensions."""

    def dimension(turns: float) -> float:
        """Return the dimension that turns `turns` times over the original context."""
        ratio = rope.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    interpolated = ramp.clamp(0.0, 1.0)
    return plain / rope.factor * interpolated + plain * (1.0 - interpolated)
