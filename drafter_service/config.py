"""The drafter process's configuration: one frozen object, validated at birth, logged once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from splitspec.commands import check_range
from splitspec.errors import UserError

METHODS = {"ngram": "drafter_service.ngram"}
"""Drafting method -> module with `load(config) -> Drafter`. EAGLE-3 and DFlash join here."""

MAX_SLOT_COUNT = 4096
MAX_DRAFT_COUNT = 1024
MAX_CONTEXT_LENGTH = 2**24


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """What `python -m drafter_service serve` takes; the flags have the same names and defaults.

    Raises:
        UserError: a value is out of its range; names the flag and the range.
    """

    draft: str = "ngram"
    address: str = "127.0.0.1:7102"
    metrics_address: str | None = None
    slot_count: int = 64
    max_context_length: int = 32768
    max_draft_count: int = 7
    ngram_max: int = 4
    ngram_min: int = 1
    otlp_endpoint: str | None = None
    trace_file: Path | None = None

    def __post_init__(self) -> None:
        if self.draft not in METHODS:
            known = ", ".join(sorted(METHODS))
            raise UserError(f"--draft {self.draft!r}: this version drafts with {known} only")
        check_range("--slot-count", self.slot_count, 1, MAX_SLOT_COUNT)
        check_range("--max-context-length", self.max_context_length, 1, MAX_CONTEXT_LENGTH)
        check_range("--max-draft-count", self.max_draft_count, 1, MAX_DRAFT_COUNT)
        check_range("--ngram-max", self.ngram_max, 1, 32)
        check_range("--ngram-min", self.ngram_min, 1, self.ngram_max)
