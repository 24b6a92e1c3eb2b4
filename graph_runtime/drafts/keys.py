"""Keys of `config.json` that drafts of every method have, as their exporters write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graph_runtime.architecture import MOST
from graph_runtime.config_values import integer, refused
from graph_runtime.rope_config import RopeScaling, rope_from_config
from splitspec.errors import UserError

_NO_MROPE = ("mrope_section", "mrope_interleaved")


def head_dim(layer: Mapping[str, Any], hidden: int, n_heads: int) -> int:
    """Return D, stated or hidden / n_heads.

    Raises:
        UserError: it is odd, or neither.
    """
    if layer.get("head_dim") is None and hidden % n_heads:
        raise UserError(
            f"config.json: head_dim is missing and hidden_size {hidden} is no multiple of "
            f"num_attention_heads {n_heads}"
        )
    width = hidden // n_heads if layer.get("head_dim") is None else size(layer, "head_dim")
    if width % 2:
        raise refused("head_dim", width, "an even number")
    return width


def kv_heads(layer: Mapping[str, Any], n_heads: int) -> int:
    """Return the number of K/V heads; where it is not stated, that of the query heads.

    Raises:
        UserError: it does not divide them.
    """
    if layer.get("num_key_value_heads") is None:
        return n_heads
    n_kv_heads = size(layer, "num_key_value_heads")
    if n_heads % n_kv_heads:
        raise refused("num_key_value_heads", n_kv_heads, f"a divisor of {n_heads} heads")
    return n_kv_heads


def rope(layer: Mapping[str, Any]) -> RopeScaling:
    """Return the layer's RoPE; a text has equal components in mrope, so that is plain RoPE."""
    config = {"max_position_embeddings": None, **layer}
    for key in ("rope_scaling", "rope_parameters"):
        parameters = dict(object_at(config, key))
        for name in ("type", "rope_type"):
            if parameters.get(name) == "mrope":
                parameters[name] = "default"
        for name in _NO_MROPE:
            parameters.pop(name, None)
        config[key] = parameters
        theta, nested = layer.get("rope_theta"), parameters.get("rope_theta")
        if theta is not None and nested is not None and theta != nested:
            raise UserError(
                f"config.json: rope_theta is {theta!r}, and {nested!r} in {key}; expected one value"
            )
    return rope_from_config(config)


def size(place: Mapping[str, Any], key: str) -> int:
    """Return a size that has to be stated: one of `architecture.MOST`.

    Raises:
        UserError: it is missing or out of its range.
    """
    return integer(place, key, least=1, most=MOST[key])


def object_at(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a nested object, empty where there is none.

    Raises:
        UserError: the key holds something else.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise refused(key, value, "an object or null")
    return value or {}


def is_given(place: Mapping[str, Any], key: str) -> bool:
    """Return whether a key is there and not null."""
    return place.get(key) is not None
