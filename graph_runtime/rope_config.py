"""Read how positions turn into angles from an HF `config.json`; needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from graph_runtime.config_values import boolean, integer, number, refused
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
_MOST_CONTEXT = 2**31


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
    parameters = {**_object(config, "rope_scaling"), **_object(config, "rope_parameters")}
    kind = parameters.pop("rope_type", None) or parameters.get("type") or "default"
    parameters.pop("type", None)
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = config.get("rope_theta")
    # Yarn divides by its logarithm, and no model turns faster at higher dimensions.
    theta = number(parameters, "rope_theta", 10000.0, above=1.0)
    del parameters["rope_theta"]
    if parameters.pop("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise UserError("config.json: RoPE partial_rotary_factor is not 1; supported: 1")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise refused("rope_type", kind, f"one of {', '.join(_KEYS)}")
    for key, value in sorted(parameters.items()):
        if value and key not in _KEYS[kind]:
            raise UserError(
                f"config.json: RoPE {key} is {value!r:.80}, unknown to rope_type {kind!r}"
            )
    if kind in ("llama3", "yarn"):
        stated = (config.get(_ORIGINAL), parameters.get(_ORIGINAL))
        context = next((value for value in stated if value), config["max_position_embeddings"])
        parameters[_ORIGINAL] = context
    return _READERS[kind](theta, parameters)


def _object(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise refused(key, value, "an object or null")
    return value or {}


def _default(theta: float, parameters: dict[str, Any]) -> RopeScaling:  # noqa: ARG001
    return RopeScaling(kind="default", theta=theta)


def _linear(theta: float, parameters: dict[str, Any]) -> RopeScaling:
    return RopeScaling(kind="linear", theta=theta, factor=number(parameters, "factor"))


def _llama3(theta: float, parameters: dict[str, Any]) -> RopeScaling:
    low = number(parameters, "low_freq_factor")
    return RopeScaling(
        kind="llama3",
        theta=theta,
        factor=number(parameters, "factor"),
        original_context=integer(parameters, _ORIGINAL, least=1, most=_MOST_CONTEXT),
        low_freq_factor=low,
        # The blend between them divides by their distance.
        high_freq_factor=number(parameters, "high_freq_factor", above=low),
    )


def _yarn(theta: float, parameters: dict[str, Any]) -> RopeScaling:
    return RopeScaling(
        kind="yarn",
        theta=theta,
        factor=number(parameters, "factor"),
        original_context=integer(parameters, _ORIGINAL, least=1, most=_MOST_CONTEXT),
        beta_fast=number(parameters, "beta_fast", 32.0),
        beta_slow=number(parameters, "beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(parameters),
        truncate=boolean(parameters, "truncate", default=True),
    )


_READERS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}


def _yarn_attention_factor(parameters: dict[str, Any]) -> float:
    if parameters.get("attention_factor") is not None:
        return number(parameters, "attention_factor")
    factor = number(parameters, "factor")

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        mscale, mscale_all_dim = number(parameters, "mscale"), number(parameters, "mscale_all_dim")
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)
