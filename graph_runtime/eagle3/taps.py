"""Which of the target's layers a draft reads, in the one numbering: 0-based layer outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graph_runtime.architecture import MOST, DecoderConfig
from graph_runtime.config_values import refused
from graph_runtime.limits import default_tap_layers
from splitspec.errors import UserError

IDS = "eagle_aux_hidden_state_layer_ids"
_DEEPSPEC_IDS = "target_layer_ids"


def stated_tap_layers(
    layout: str, top: Mapping[str, Any], nested: Mapping[str, Any]
) -> tuple[int, ...] | None:
    """Return the tap layers that a file states as 0-based layer outputs; None: the default ones.

    NOTE: the number k is the output of layer k in `eagle_config` and DeepSpec's files, but the
    input of layer k (HF `hidden_states[k]`), so the output of layer k - 1, in speculators files.

    Raises:
        UserError: no list of ascending layers, or the embedding's output, which no verifier offers;
            or a place for them that other layouts have.
    """
    nested_ids = f"eagle_config.{IDS}"
    own = {"speculators": IDS, "deepspec": _DEEPSPEC_IDS}.get(layout, nested_ids)
    places = {IDS: top.get(IDS), _DEEPSPEC_IDS: top.get(_DEEPSPEC_IDS), nested_ids: nested.get(IDS)}
    for key, value in places.items():
        if key not in (own, IDS) and value is not None:
            raise UserError(
                f"config.json: {key} states tap layers where a {layout} file has {own}, and the "
                "two number layers differently; give --tap-layers"
            )
    if layout == "speculators":
        ids = _ids(IDS, top.get(IDS), first=1)
        if ids and ids[0] == 0:
            raise refused(IDS, list(ids), "layers from 1: 0 is the embedding's output, no layer's")
        return None if ids is None else tuple(i - 1 for i in ids)
    if top.get(IDS) is not None:
        raise UserError(
            f"config.json: {IDS} is at the top level, where exporters disagree on whether a "
            "layer's output or its input is meant; give --tap-layers"
        )
    if layout == "deepspec":
        return _ids(_DEEPSPEC_IDS, top.get(_DEEPSPEC_IDS))
    return _ids(f"eagle_config.{IDS}", nested.get(IDS))


def resolve_tap_layers(
    stated: tuple[int, ...] | None,
    fc: tuple[int, ...] | None,
    *,
    target_hidden: int,
    target: DecoderConfig | None,
    override: tuple[int, ...] | None,
) -> tuple[int, ...]:
    """Return the tap layers: those of the override, the file or the default, checked.

    Args:
        stated: what the file states, see `stated_tap_layers`.
        fc: shape of fc.weight, whose inputs tell how many taps there are; None: a draft without.
        target_hidden: width of one tap.
        target: its shape, where it is known: the default follows from its number of layers.
        override: what the user gave.

    Raises:
        UserError: they are unknown, no layers of the target, or not as many as fc takes.
    """
    taps = stated if override is None else _ids("--tap-layers", list(override))
    if fc is None:  # whatever layers the file states are not read
        return _last_layer(override, target)
    if len(fc) != 2 or fc[1] % target_hidden:
        raise UserError(
            f"tensor fc.weight is {list(fc)}; expected inputs that are a multiple of the target's "
            f"hidden_size, {target_hidden}"
        )
    if taps is None:
        if target is None:
            raise UserError(
                "config.json names no tap layers and they follow from the target's number of "
                "layers; give --target or --tap-layers"
            )
        taps = default_tap_layers(target.n_layers)
    if len(taps) != fc[1] // target_hidden:
        raise UserError(
            f"tensor fc.weight is {list(fc)}, so it takes {fc[1] // target_hidden} taps of width "
            f"{target_hidden}, but the tap layers are {list(taps)}; give --tap-layers"
        )
    if target is not None and taps[-1] >= target.n_layers:
        raise UserError(
            f"tap layers are {list(taps)}, but the target has the layers 0..{target.n_layers - 1}"
        )
    return taps


def _last_layer(override: tuple[int, ...] | None, target: DecoderConfig | None) -> tuple[int, ...]:
    """Return the one tap of a draft without fc, which is fed the target's last hidden state."""
    if target is None:
        raise UserError(
            "use_aux_hidden_state is false, so the target's last layer and its final norm are "
            "read; give --target"
        )
    last = (target.n_layers - 1,)
    if override is not None and override != last:
        raise UserError(
            f"--tap-layers is {list(override)}; with use_aux_hidden_state false the only tap is "
            f"the target's last layer, {last[0]}"
        )
    return last


def _ids(key: str, value: object, *, first: int = 0) -> tuple[int, ...] | None:
    """Return a list of layers, whose lowest has the number `first`; None: there is none.

    NOTE: `first` - 1 passes: the caller has more to say about the embedding's output.
    """
    if value is None:
        return None
    most = first + MOST["num_hidden_layers"] - 1
    whole = isinstance(value, list) and all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= most for i in value
    )
    if not isinstance(value, list) or not whole or not value or value != sorted(set(value)):
        if key.startswith("--"):
            raise UserError(f"{key} is {value!r}; expected ascending layers in [0, {most}]")
        raise refused(key, value, f"a list of ascending layers in [{first}, {most}], or null")
    return tuple(value)
