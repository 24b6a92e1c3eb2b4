"""Lists of a target's layers as drafts' files and users state them, checked."""

from __future__ import annotations

from graph_runtime.architecture import MOST
from graph_runtime.config_values import refused
from graph_runtime.drafts.target import TargetSizes
from splitspec.errors import UserError

FLAG = "--tap-layers"


def layer_ids(key: str, value: object, *, first: int = 0) -> tuple[int, ...] | None:
    """Return a list of layers, whose lowest has the number `first`; None: there is none.

    NOTE: `first` - 1 passes: the caller has more to say about the embedding's output.

    Raises:
        UserError: it is no list of ascending layers.
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


def hf_layer_ids(key: str, value: object) -> tuple[int, ...] | None:
    """Return 0-based layer outputs of a list that numbers layers as HF `hidden_states` does.

    Raises:
        UserError: as `layer_ids`, or the embedding's output, which no verifier offers.
    """
    ids = layer_ids(key, value, first=1)
    if ids and ids[0] == 0:
        raise refused(key, list(ids), "layers from 1: 0 is the embedding's output, no layer's")
    return None if ids is None else tuple(i - 1 for i in ids)


def count_taps(fc: tuple[int, ...], target_hidden: int) -> int:
    """Return how many taps of width `target_hidden` fc.weight of the shape `fc` takes.

    Raises:
        UserError: no whole number of them.
    """
    if len(fc) != 2 or fc[1] % target_hidden:
        raise UserError(
            f"tensor fc.weight is {list(fc)}; expected inputs that are a multiple of the target's "
            f"hidden_size, {target_hidden}"
        )
    return fc[1] // target_hidden


def check_taps(
    taps: tuple[int, ...], fc: tuple[int, ...], *, target_hidden: int, target: TargetSizes | None
) -> tuple[int, ...]:
    """Return the tap layers, checked against fc and the target.

    Raises:
        UserError: they are not as many as fc takes, or no layers of the target.
    """
    count = count_taps(fc, target_hidden)
    if len(taps) != count:
        raise UserError(
            f"tensor fc.weight is {list(fc)}, so it takes {count} taps of width {target_hidden}, "
            f"but the tap layers are {list(taps)}; give {FLAG}"
        )
    if target is not None and taps[-1] >= target.n_layers:
        raise UserError(
            f"tap layers are {list(taps)}, but the target has the layers 0..{target.n_layers - 1}"
        )
    return taps
