"""What the exports of drafts share, whatever the method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graph_runtime.drafts.source import DraftSource
from graph_runtime.programs.export import Source
from graph_runtime.programs.metadata import DRAFT_PRECISIONS
from splitspec.errors import UserError


def check_arguments(precision: str, max_context_length: int) -> None:
    """Refuse what no draft's program can be exported with.

    Raises:
        UserError: the precision is unknown, or the length is no length.
    """
    if precision not in DRAFT_PRECISIONS:
        raise UserError(f"precision is {precision!r}; a draft has {', '.join(DRAFT_PRECISIONS)}")
    if max_context_length < 1:
        raise UserError(f"max context length is {max_context_length}; expected at least 1")


def places_of(source: DraftSource, cache_dir: Path) -> dict[str, Any]:
    """Return, as JSON, what `build` reads from; the rest of `source` is in the key."""
    return {
        "folder": str(source.folder),
        "target": None if source.target is None else str(source.target),
        "tap_layers": source.tap_layers,
        "cache_dir": str(cache_dir),
    }


def read_places(places: Source) -> tuple[dict[str, Any], Path]:
    """Return the fields of a `DraftSource` and the cache folder of what `places_of` wrote."""
    target, taps = places["target"], places["tap_layers"]
    fields = {
        "folder": Path(places["folder"]),
        "target": None if target is None else Path(target),
        "tap_layers": None if taps is None else tuple(taps),
    }
    return fields, Path(places["cache_dir"])
