"""Which of the target's layers a draft reads, in the one numbering: 0-based layer outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graph_runtime.architecture import DecoderConfig
from graph_runtime.drafts.taps import FLAG, check_taps, count_taps, hf_layer_ids, layer_ids
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
        return hf_layer_ids(IDS, top.get(IDS))
    if top.get(IDS) is not None:
        raise UserError(
            f"config.json: {IDS} is at the top level, where exporters disagree on whether a "
            "layer's output or its input is meant; give --tap-layers"
        )
    if layout == "deepspec":
        return layer_ids(_DEEPSPEC_IDS, top.get(_DEEPSPEC_IDS))
    return layer_ids(f"eagle_config.{IDS}", nested.get(IDS))


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
    taps = stated if override is None else layer_ids(FLAG, list(override))
    if fc is None:  # whatever layers the file states are not read
        return _last_layer(override, target)
    count_taps(fc, target_hidden)
    if taps is None:
        if target is None:
            raise UserError(
                "config.json names no tap layers and they follow from the target's number of "
                "layers; give --target or --tap-layers"
            )
        taps = default_tap_layers(target.n_layers)
    return check_taps(taps, fc, target_hidden=target_hidden, target=target)


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
