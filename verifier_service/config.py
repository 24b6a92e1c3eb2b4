"""The verifier process's configuration: one frozen object, validated at birth, logged once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graph_runtime.limits import LEAST_STEP_ROWS
from splitspec.commands import check_range
from splitspec.errors import UserError
from splitspec.folders import DEFAULT_CACHE_DIR

DEFAULT_PRECISIONS = {"executorch": "8da8w", "torch": "fp32"}
"""Runtime -> precision served when none is asked for: the fastest that costs < 5 % perplexity."""

MAX_SLOT_COUNT = 1024
MAX_CONTEXT_LENGTH = 2**20
MAX_PREFILL_CHUNK = 4096
MAX_DRAFT_COUNT = 63


@dataclass(frozen=True, kw_only=True)
class VerifierConfig:
    """What `python -m verifier_service serve` takes; the flags have the same names and defaults.

    Raises:
        UserError: a value is out of its range; names the flag and the range.
    """

    model: str
    runtime: str = "executorch"
    precision: str | None = None
    """None: the runtime's default."""
    device: str = "cpu"
    address: str = "127.0.0.1:7101"
    metrics_address: str | None = None
    cache_dir: Path = DEFAULT_CACHE_DIR
    slot_count: int = 8
    max_context_length: int = 1024
    max_prefill_chunk: int = 128
    max_draft_count: int = 7
    tap_layers: tuple[int, ...] | None = None
    """None: those of the draft in `fuse_for`, or a low, a middle and a high layer."""
    fuse_for: Path | None = None
    """Draft whose projection ROW_KIND_FUSED rows carry, of any method that has one; None: such rows
    are not offered."""
    threads: int | None = None
    otlp_endpoint: str | None = None
    trace_file: Path | None = None

    def __post_init__(self) -> None:
        if self.runtime not in DEFAULT_PRECISIONS:
            known = " or ".join(DEFAULT_PRECISIONS)
            raise UserError(f"--runtime {self.runtime!r} is not {known}")
        check_range("--slot-count", self.slot_count, 1, MAX_SLOT_COUNT)
        check_range("--max-context-length", self.max_context_length, 2, MAX_CONTEXT_LENGTH)
        check_range("--max-prefill-chunk", self.max_prefill_chunk, 1, MAX_PREFILL_CHUNK)
        check_range("--max-draft-count", self.max_draft_count, 0, MAX_DRAFT_COUNT)
        rows = self.max_draft_count + 1
        # A program takes as many rows as its chunk, and the drafts are no part of what it is.
        if self.runtime == "executorch" and rows > max(self.max_prefill_chunk, LEAST_STEP_ROWS):
            raise UserError(
                f"--max-draft-count {self.max_draft_count} needs --max-prefill-chunk {rows} or "
                f"more; it is {self.max_prefill_chunk}"
            )
        if self.fuse_for is not None and not self.fuse_for.expanduser().is_dir():
            raise UserError(f"--fuse-for {self.fuse_for} is not a folder")
        if self.threads is not None:
            check_range("--threads", self.threads, 1, 1024)

    @property
    def model_id(self) -> str:
        """Return the name a person knows the target by."""
        return Path(self.model).name

    @property
    def chosen_precision(self) -> str:
        """Return the precision to serve."""
        return self.precision or DEFAULT_PRECISIONS[self.runtime]
