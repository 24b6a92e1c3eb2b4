"""What a target can be served with: tap layers and context length that its model has."""

from __future__ import annotations

from graph_runtime.architecture import DecoderConfig
from splitspec.errors import UserError

LEAST_STEP_ROWS = 8
"""An exported step takes this many rows however short its prefill chunks: 7 drafts and the pending
token."""


def default_tap_layers(n_layers: int) -> tuple[int, ...]:
    """Return the low, middle and high layer that EAGLE-3 reads, fewer for tiny models."""
    wanted = (1, n_layers // 2 - 1, n_layers - 4)
    return tuple(sorted({min(max(layer, 0), n_layers - 1) for layer in wanted}))


def check_tap_layers(config: DecoderConfig, tap_layers: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the tap layers to use: those given, or the default.

    Raises:
        UserError: not ascending, or not layers of the model.
    """
    if tap_layers is None:
        return default_tap_layers(config.n_layers)
    in_range = all(0 <= layer < config.n_layers for layer in tap_layers)
    if not tap_layers or not in_range or list(tap_layers) != sorted(set(tap_layers)):
        raise UserError(
            f"tap layers are {list(tap_layers)}; expected ascending numbers in "
            f"[0, {config.n_layers - 1}]"
        )
    return tap_layers


def check_context_length(config: DecoderConfig, max_context_length: int) -> None:
    """Refuse a context that is longer than the model's.

    Raises:
        UserError: names both lengths.
    """
    if not 1 <= max_context_length <= config.max_position_embeddings:
        raise UserError(
            f"max context length is {max_context_length}; "
            f"expected 1 to the model's {config.max_position_embeddings}"
        )
