"""Rotary position embeddings: default, linear, llama3 and yarn.

Sources: RoFormer (arXiv:2104.09864), linear interpolation (arXiv:2306.15595), YaRN
(arXiv:2309.00071), and Llama 3.1's published frequency rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from splitspec.errors import UserError

_ORIGINAL = "original_max_position_embeddings"
_YARN_KEYS = (
    "factor", _ORIGINAL, "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow",
    "truncate",
)  # fmt: skip
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": _YARN_KEYS,
}
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How positions turn into angles."""

    kind: str
    """"default", "linear", "llama3" or "yarn"."""
    theta: float
    factor: float = 1.0
    original_context: int = 0
    """Positions the model was trained on before scaling; llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cosines and sines; yarn."""
    truncate: bool = True
    """Whether yarn's ramp starts and ends at whole dimensions."""


def rope_from_config(config: dict[str, Any]) -> RopeScaling:
    """Read `rope_parameters` (Transformers 5), or `rope_scaling` and `rope_theta` (older).

    Raises:
        UserError: an unknown kind or key, or a missing or impossible value, named.
    """
    parameters = dict(config.get("rope_scaling") or {})
    parameters.update(config.get("rope_parameters") or {})
    kind = parameters.pop("rope_type", None) or parameters.get("type") or "default"
    parameters.pop("type", None)
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    if parameters.pop("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise UserError("config.json: RoPE partial_rotary_factor is not 1; supported: 1")
    if kind not in _KEYS:
        raise UserError(f"config.json: rope_type is {kind!r}; supported: {', '.join(_KEYS)}")
    if kind in ("llama3", "yarn"):
        parameters.setdefault(_ORIGINAL, config["max_position_embeddings"])
        parameters[_ORIGINAL] = config.get(_ORIGINAL) or parameters[_ORIGINAL]
    for key, value in sorted(parameters.items()):
        if value and key not in _KEYS[kind]:
            raise UserError(f"config.json: RoPE {key} is {value!r}, unknown to rope_type {kind!r}")
    for key in _REQUIRED[kind]:
        if not isinstance(parameters.get(key), int | float) or parameters[key] <= 0:
            raise UserError(
                f"config.json: RoPE {key} is {parameters.get(key)!r}; expected a positive number"
            )
    return RopeScaling(
        kind=kind,
        theta=float(theta),
        factor=float(parameters.get("factor") or 1.0),
        original_context=int(parameters.get(_ORIGINAL) or 0),
        low_freq_factor=float(parameters.get("low_freq_factor") or 1.0),
        high_freq_factor=float(parameters.get("high_freq_factor") or 1.0),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(parameters) if kind == "yarn" else 1.0,
        truncate=bool(parameters.get("truncate", True)),
    )


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


def _yarn_attention_factor(parameters: dict[str, Any]) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])

    def magnitude(weight: float) -> float:
        factor = float(parameters["factor"])
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)
