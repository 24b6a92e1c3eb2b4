"""Which layers have a window and which are causal, as every format says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graph_runtime.architecture import MOST
from graph_runtime.config_values import boolean, integer, refused
from graph_runtime.dflash.keys import NESTED, DFlashKeys
from graph_runtime.drafts.keys import is_given, size
from splitspec.errors import UserError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_SWA, _SWA_SIZE = "use_swa", "swa_window_size"
_NON_CAUSAL = "sliding_window_non_causal"


def layer_types(layer: Mapping[str, Any], n_layers: int) -> list[str]:
    """Return each layer's type: as stated, or as Qwen computes them.

    Raises:
        UserError: not one known type a layer.
    """
    types = layer.get("layer_types")
    if types is None:
        if not boolean(layer, "use_sliding_window"):
            return [_FULL] * n_layers
        most = MOST["max_window_layers"]
        first = integer(layer, "max_window_layers", least=0, most=most)
        return [_SLIDING if i >= first else _FULL for i in range(n_layers)]
    known = (_FULL, _SLIDING)
    if (
        not isinstance(types, list)
        or len(types) != n_layers
        or not all(isinstance(kind, str) and kind in known for kind in types)
    ):
        raise refused("layer_types", types, f"a list of {n_layers}, each {_FULL} or {_SLIDING}")
    return types


def sliding_windows(keys: DFlashKeys, types: Sequence[str]) -> tuple[int | None, ...]:
    """Return each layer's window; None: it sees the whole context.

    NOTE: ModelOpt and MiMo say `use_swa` of the whole draft and call its layers full.

    Raises:
        UserError: there are sliding layers and no window, or no use of it, or two windows.
    """
    window = None
    if _SLIDING in types:
        if is_given(keys.layer, "use_sliding_window") and not boolean(
            keys.layer, "use_sliding_window"
        ):
            raise refused("use_sliding_window", False, f"true or null: layer_types has {_SLIDING}")
        window = size(keys.layer, "sliding_window")
    if not boolean(keys.nested, _SWA):
        if is_given(keys.nested, _SWA_SIZE) and not is_given(keys.nested, _SWA):
            raise refused(f"{NESTED}.{_SWA}", None, f"true or false where {_SWA_SIZE} is stated")
        return tuple(window if kind == _SLIDING else None for kind in types)
    everywhere = integer(keys.nested, _SWA_SIZE, least=1, most=MOST["sliding_window"])
    if window is not None and window != everywhere:
        raise UserError(
            f"config.json: sliding_window is {window}, and {NESTED}.{_SWA_SIZE} is {everywhere}; "
            "expected one value"
        )
    return (everywhere,) * len(types)


def causality(keys: DFlashKeys, types: Sequence[str]) -> tuple[bool, ...]:
    """Return for each layer whether a slot sees no later slot of its block.

    NOTE: z-lab and ModelOpt: what is stated holds for every layer; else a layer is causal exactly
    where it slides. speculators: only sliding layers can be causal, and are unless the file says
    that they are not. DeepSpec: no layer ever is.

    Raises:
        UserError: two places disagree, or a key is set that the format does not have.
    """
    stated = keys.flag("is_causal", "causal")
    non_causal = keys.flag(_NON_CAUSAL)
    if keys.layout == "z-lab":
        if non_causal and _SLIDING in types and stated is not False:
            raise refused(_NON_CAUSAL, True, "false or null: it is a key of speculators files")
        return tuple(kind == _SLIDING if stated is None else stated for kind in types)
    if stated:
        raise refused("is_causal", True, f"false or null in a {keys.layout} file")
    if keys.layout == "deepspec":
        return (False,) * len(types)
    return tuple(kind == _SLIDING and not non_causal for kind in types)
