"""What shapes a DFlash draft, by flag or by the target's own config; needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from graph_runtime.architecture import MOST, DecoderConfig
from graph_runtime.limits import check_tap_layers
from splitspec.commands import check_range
from splitspec.errors import UserError

MOST_LAYERS = 5
BLOCK_LENGTH = 8
ANCHORS = 64
_LONGEST_BLOCK = 64
_MOST_ANCHORS = 4096


@dataclass(frozen=True, kw_only=True)
class DFlashOptions:
    """What a user may choose; None: chosen for the target.

    Raises:
        UserError: a value is out of its range; names the flag, the value and the range.
    """

    layers: int | None
    """None: five, or as many as a smaller target has."""
    block_length: int
    """Slots of a block, the pending token's with it."""
    mask_token_id: int | None
    """None: see `choose_mask_token`."""
    anchors: int
    """Blocks that a step takes of a row."""

    def __post_init__(self) -> None:
        if self.layers is not None:
            check_range("--layers", self.layers, 1, MOST["num_hidden_layers"])
        check_range("--block-length", self.block_length, 2, _LONGEST_BLOCK)
        if self.mask_token_id is not None:
            check_range("--mask-token-id", self.mask_token_id, 0, MOST["vocab_size"])
        check_range("--anchors", self.anchors, 1, _MOST_ANCHORS)


@dataclass(frozen=True, kw_only=True)
class DFlashSettings:
    """A draft's shape, and how many blocks a step takes of a row."""

    tap_layers: tuple[int, ...]
    n_layers: int
    block_size: int
    mask_token_id: int
    anchor_count: int


def settings_for(
    target: DecoderConfig,
    options: DFlashOptions,
    *,
    tap_layers: tuple[int, ...] | None,
    mask_token_id: int,
) -> DFlashSettings:
    """Return what the options mean for a target.

    Args:
        target: its shape.
        options: of the user.
        tap_layers: None: see `default_tap_layers`.
        mask_token_id: the one of the options, or the one that was chosen.

    Raises:
        UserError: a value is out of the target's range; names the flag, the value and the range.
    """
    layers = options.layers or min(MOST_LAYERS, target.n_layers)
    check_range("--layers", layers, 1, target.n_layers)
    check_range("--mask-token-id", mask_token_id, 0, target.vocab_size - 1)
    return DFlashSettings(
        tap_layers=check_tap_layers(target, tap_layers or default_tap_layers(target.n_layers)),
        n_layers=layers,
        block_size=options.block_length,
        mask_token_id=mask_token_id,
        anchor_count=options.anchors,
    )


def default_tap_layers(n_layers: int) -> tuple[int, ...]:
    """Return five layers at equal distances from the second to the fourth from the end.

    Of a target of less than eight layers up to the last, and as many as there are.
    """
    first = min(1, n_layers - 1)
    last = n_layers - 4 if n_layers >= 8 else n_layers - 1
    return tuple(sorted({math.ceil(first + i * (last - first) / 4) for i in range(5)}))


def choose_mask_token(folder: Path, held: Container[int]) -> int:
    """Return the mask token for a target's tokenizer where none is given.

    It is the special token of the highest id that the text does not hold: an id that the target has
    an embedding for and that no answer needs.

    Args:
        folder: of the target.
        held: the ids in the rollouts.

    Raises:
        UserError: there is none, or tokenizer.json is not readable.
    """
    path = folder / "tokenizer.json"
    try:
        added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens", [])
        special = sorted((int(t["id"]) for t in added if t.get("special")), reverse=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a readable tokenizer: {error}") from error
    free = next((token for token in special if token not in held), None)
    if free is None:
        raise UserError(
            f"--mask-token-id is not given, and the text holds all {len(special)} special tokens "
            f"of {path}; give the id of a token that answers do not need"
        )
    return free
