"""What `train evaluate` takes: one frozen object, validated at birth. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drafter_service.config import (
    DEFAULT_PRECISIONS,
    DRAFT_SAMPLINGS,
    MAX_CONTEXT_LENGTH,
    MAX_DRAFT_COUNTS,
    MAX_SLOT_COUNT,
)
from splitspec.checks import MAX_TEMPERATURE
from splitspec.commands import check_range
from splitspec.errors import UserError
from splitspec.folders import DEFAULT_CACHE_DIR

MAX_DRAFT_COUNT = max(MAX_DRAFT_COUNTS.values())
"""Of any method; how many the draft itself has is known once it is loaded."""
MAX_PROMPT_COUNT = 2**32


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """One evaluation; the flags have the same names and defaults.

    Raises:
        UserError: a value is out of its range; names the flag, the value and the range.
    """

    draft_model: Path
    """Folder of a checkpoint, which tells its method."""
    prompts: Path
    target: str = "smollm2-135m"
    prompt_count: int | None = None
    """None: all."""
    draft_counts: tuple[int, ...] = (3, 5, 7)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    max_tokens: int = 240
    sessions: int = 1
    max_context_length: int = 1024
    runtime: str = "executorch"
    """The target's, as a verifier's."""
    precision: str | None = None
    """None: the runtime's default, which a verifier serves too."""
    device: str = "cpu"
    draft_runtime: str = "executorch"
    draft_precision: str | None = None
    draft_device: str = "cpu"
    draft_sampling: str | None = None
    """None: the method's default."""
    threads: int | None = None
    """Of the target and of the draft."""
    out: Path | None = None
    cache_dir: Path = DEFAULT_CACHE_DIR

    def __post_init__(self) -> None:
        if self.prompt_count is not None:
            check_range("--prompt-count", self.prompt_count, 1, MAX_PROMPT_COUNT)
        for draft_count in self.draft_counts:
            check_range("--draft-counts", draft_count, 1, MAX_DRAFT_COUNT)
        for temperature in self.temperatures:
            check_range("--temperatures", temperature, 0.0, MAX_TEMPERATURE)
        check_range("--max-tokens", self.max_tokens, 1, MAX_CONTEXT_LENGTH)
        check_range("--sessions", self.sessions, 1, MAX_SLOT_COUNT)
        check_range("--max-context-length", self.max_context_length, 2, MAX_CONTEXT_LENGTH)
        for name, runtime in (("", self.runtime), ("draft-", self.draft_runtime)):
            if runtime not in DEFAULT_PRECISIONS:
                known = " or ".join(DEFAULT_PRECISIONS)
                raise UserError(f"--{name}runtime {runtime!r} is not {known}")
        if self.draft_sampling not in (None, *DRAFT_SAMPLINGS):
            known = " or ".join(DRAFT_SAMPLINGS)
            raise UserError(f"--draft-sampling {self.draft_sampling!r} is not {known}")
        if self.threads is not None:
            check_range("--threads", self.threads, 1, 1024)
        if self.out is not None and not self.out.expanduser().parent.is_dir():
            raise UserError(f"--out: {self.out.parent} is not a folder")

    @property
    def chosen_precision(self) -> str:
        """Return the target's precision."""
        return self.precision or DEFAULT_PRECISIONS[self.runtime]


def parse_counts(value: str) -> tuple[int, ...]:
    """Return the numbers of a flag like "3,5,7".

    Raises:
        UserError: it is no such list.
    """
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= 9 for part in parts):
        raise UserError(f"--draft-counts {value!r} is not a list like 3,5,7")
    return tuple(int(part) for part in parts)


def parse_temperatures(value: str) -> tuple[float, ...]:
    """Return the numbers of a flag like "0,0.7".

    Raises:
        UserError: it is no such list.
    """
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError as error:
        raise UserError(f"--temperatures {value!r} is not a list like 0,0.7") from error
