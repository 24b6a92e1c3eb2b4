"""Which of the target's layers a draft reads, in the one numbering: 0-based layer outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graph_runtime.drafts.taps import FLAG, check_taps, count_taps, hf_layer_ids, layer_ids
from graph_runtime.drafts.target import TargetSizes
from splitspec.errors import UserError

_IDS = "target_layer_ids"
_NESTED_IDS = f"dflash_config.{_IDS}"
_HF_IDS = "aux_hidden_state_layer_ids"
_EAGLE_IDS = f"eagle_{_HF_IDS}"


def stated_tap_layers(
    layout: str, top: Mapping[str, Any], nested: Mapping[str, Any]
) -> tuple[int, ...] | None:
    """Return the tap layers that a file states as 0-based layer outputs; None: it states none.

    NOTE: the number k is the output of layer k in `target_layer_ids`, but the input of layer k (HF
    `hidden_states[k]`), so the output of layer k - 1, in speculators' `aux_hidden_state_layer_ids`.
    A file that has the other convention's key besides its own has to mean the same layers.

    Raises:
        UserError: no list of ascending layers, or the embedding's output, which no verifier offers;
            or a place for them that other layouts have, and that says something else.
    """
    own = {"speculators": _HF_IDS, "deepspec": _IDS}.get(layout, _NESTED_IDS)
    places = {
        _NESTED_IDS: layer_ids(_NESTED_IDS, nested.get(_IDS)),
        _IDS: layer_ids(_IDS, top.get(_IDS)),
        _HF_IDS: hf_layer_ids(_HF_IDS, top.get(_HF_IDS)),
        _EAGLE_IDS: hf_layer_ids(_EAGLE_IDS, top.get(_EAGLE_IDS)),
    }
    for key, layers in places.items():
        if layers is not None and layers != places[own]:
            raise UserError(
                f"config.json: {key} states tap layers where a {layout} file has {own}, and the "
                f"two name different layers; give {FLAG}"
            )
    return places[own]


def resolve_tap_layers(
    stated: tuple[int, ...] | None,
    fc: tuple[int, ...] | None,
    *,
    target_hidden: int,
    target: TargetSizes | None,
    default: tuple[int, ...] | None,
    override: tuple[int, ...] | None,
) -> tuple[int, ...]:
    """Return the tap layers: those of the override, the file or the default, checked.

    Args:
        stated: what the file states, see `stated_tap_layers`.
        fc: shape of fc.weight, whose inputs tell how many taps there are.
        target_hidden: width of one tap.
        target: its shape, where it is known.
        default: see `default_tap_layers`; None: the layout or the file leaves it open.
        override: what the user gave.

    Raises:
        UserError: they are unknown, no layers of the target, or not as many as fc takes.
    """
    if fc is None:
        raise UserError("missing tensor fc.weight")
    taps = stated if override is None else layer_ids(FLAG, list(override))
    count_taps(fc, target_hidden)
    if taps is None:
        taps = default
    if taps is None:
        raise UserError(
            f"config.json: target_layer_ids are missing, and nothing else names the tap layers; "
            f"give {FLAG}"
        )
    return check_taps(taps, fc, target_hidden=target_hidden, target=target)


def default_tap_layers(n_target_layers: int, n_layers: int) -> tuple[int, ...] | None:
    """Return the layers that a z-lab draft reads where its file names none.

    One a draft layer, from the second to the fourth from the end at equal distances.

    Args:
        n_target_layers: of the target.
        n_layers: of the draft.

    Returns:
        None: the target is too shallow for it.
    """
    if n_layers == 1:
        return (n_target_layers // 2,)
    if n_target_layers < 4:
        return None
    span = n_target_layers - 4
    taps = tuple(round(1 + i * span / (n_layers - 1)) for i in range(n_layers))
    return taps if len(set(taps)) == n_layers else None
