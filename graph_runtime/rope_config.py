"""Read how positions turn into angles from an HF `config.json`; needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
