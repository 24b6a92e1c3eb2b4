"""What `splitspec train rollouts` takes: frozen objects, validated at birth; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from splitspec.commands import check_range
from splitspec.errors import UserError
from splitspec.folders import DEFAULT_CACHE_DIR

PRECISIONS = ("fp32", "bf16", "8da8w")


@dataclass(frozen=True, kw_only=True)
class RowFilters:
    """What a row must be like; the flags of `train rollouts` have the same names and defaults.

    Raises:
        UserError: a value is out of its range; names the flag and the range.
    """

    min_answer_tokens: int = 32
    """Fewer tokens that the target chose in assistant turns: the row is short."""
    max_loop_share: float = 0.5
    """A larger share of those tokens in a repeated 8-gram: the row is looping."""
    held_out_share: float = 0.01
    """Of first user turns, by their hash."""

    def __post_init__(self) -> None:
        check_range("--min-answer-tokens", self.min_answer_tokens, 0, 2**20)
        check_range("--max-loop-share", self.max_loop_share, 0.0, 1.0)
        check_range("--held-out-share", self.held_out_share, 0.0, 0.5)


@dataclass(frozen=True, kw_only=True)
class RolloutsConfig:
    """The flags have the same names and defaults.

    Raises:
        UserError: a value is out of its range; names the flag and the range.
    """

    target: str = "smollm2-135m"
    """A pulled model's name, or an HF-layout folder."""
    out: Path = Path("rollouts")
    """The folder that is written, or continued."""
    passes: int = 12
    rows: int = 2048
    """Of a pass: as many are written at once."""
    length: int = 512
    """Tokens of a row."""
    seed: int = 1
    device: str = "cuda"
    precision: str | None = None
    """None: bf16 on CUDA, fp32 on a CPU."""
    seeds: Path | None = None
    """A file of instructions, one a line; None: the built-in ones."""
    seeded_share: float = 0.4
    """Of rows that begin with an instruction; the target writes the others' first turn too."""
    filters: RowFilters = RowFilters()
    """A flag each. Text that is there need not be written again for others."""
    cache_dir: Path = DEFAULT_CACHE_DIR

    def __post_init__(self) -> None:
        check_range("--passes", self.passes, 1, 100_000)
        check_range("--rows", self.rows, 1, 2**16)
        check_range("--length", self.length, 64, 8192)
        check_range("--seed", self.seed, 0, 2**63 - 1)
        check_range("--seeded-share", self.seeded_share, 0.0, 1.0)
        if self.precision is not None and self.precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise UserError(f"--precision {self.precision!r} is not one of {known}")

    @property
    def chosen_precision(self) -> str:
        """Return the precision: the one given, or the device's."""
        return self.precision or ("bf16" if self.device.startswith("cuda") else "fp32")
