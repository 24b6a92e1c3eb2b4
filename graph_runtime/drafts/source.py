"""What a user says about a draft's checkpoint, whatever its method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graph_runtime.drafts.embeddings import EMBEDDINGS
from splitspec.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DraftSource:
    """Where a draft's files are, and what to make of them."""

    folder: Path
    target: Path | None = None
    """HF-layout folder of the target."""
    tap_layers: tuple[int, ...] | None = None
    """0-based layer outputs, in place of the file's."""
    embeddings: str = "auto"
    """"auto", "own" or "target"."""

    def __post_init__(self) -> None:
        """Refuse what is no choice.

        Raises:
            UserError: names the flag, its value and the choices.
        """
        check_choice("--embeddings", self.embeddings, EMBEDDINGS)


def check_choice(flag: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a value that is none of `choices`.

    Raises:
        UserError: names the flag, its value and the choices.
    """
    if value not in choices:
        raise UserError(f"{flag} is {value!r}; expected one of {', '.join(choices)}")
