"""The drafter process's configuration: one frozen object, validated at birth, logged once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from splitspec.commands import check_range
from splitspec.drafts import MODEL_METHODS
from splitspec.errors import UserError
from splitspec.folders import DEFAULT_CACHE_DIR

METHODS = {
    "dflash": "drafter_service.dflash",
    "eagle3": "drafter_service.eagle3",
    "ngram": "drafter_service.ngram",
}
"""Drafting method -> module with `load(config, stop) -> Drafter`."""

DEFAULT_SLOT_COUNTS = {"dflash": 8, "eagle3": 8, "ngram": 64}
DEFAULT_CONTEXT_LENGTHS = {"dflash": 1024, "eagle3": 1024, "ngram": 32768}
"""By method: a KV cache is `slot_count` times `max_context_length` positions, an index is not."""
DEFAULT_DRAFT_COUNTS = {"eagle3": 7, "ngram": 7}
"""By method; dflash: as many as its block drafts, which the checkpoint tells."""
MAX_DRAFT_COUNTS = {"dflash": 1024, "eagle3": 7, "ngram": 1024}
MAX_BLOCK_LENGTH = 1025
"""Beyond any block that a draft was trained with: the real limit is the checkpoint's."""
DEFAULT_DRAFT_SAMPLINGS = {"dflash": "argmax", "eagle3": "coupled"}
"""How a session drafts that leaves it to the method. At temperature 0 both are the argmax. Sampled
answers accepted more coupled drafts of eagle3 (benchmarks/LOG.md), whose tokens are each drafted
after the one before; the tokens of a dflash block are drafted apart from each other."""
DEFAULT_PRECISIONS = {"executorch": "8da8w", "torch": "fp32"}
"""Runtime -> a draft's precision when none is asked for: its errors cost acceptance, never text.
8da8w was faster than 8da4w with a small head, and accepted more often (benchmarks/LOG.md)."""

ROW_KINDS = ("raw", "fused")
ROW_DTYPES = ("float32", "bfloat16", "float16")
DRAFT_SAMPLINGS = ("argmax", "coupled")
EMBEDDINGS = ("auto", "own", "target")
FEEDBACKS = ("auto", "pre-norm", "post-norm")

MAX_SLOT_COUNT = 4096
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
    slot_count: int | None = None
    """None: the method's default."""
    max_context_length: int | None = None
    """None: the method's default."""
    max_draft_count: int | None = None
    """None: the method's default; dflash: as many as its block drafts."""
    ngram_max: int = 4
    ngram_min: int = 1
    draft_model: Path | None = None
    """dflash, eagle3: the folder of the draft's checkpoint."""
    block_length: int | None = None
    """dflash: slots of a block, the pending token's included; None: as trained."""
    target: str | None = None
    """dflash, eagle3: a pulled model or an HF-layout folder, for what the checkpoint has not."""
    runtime: str = "executorch"
    precision: str | None = None
    """None: the runtime's default."""
    threads: int | None = None
    device: str = "cpu"
    rows: str = "raw"
    row_dtype: str = "float32"
    draft_sampling: str | None = None
    """How a session drafts that leaves it to the method; None: the method's default."""
    tap_layers: tuple[int, ...] | None = None
    """None: as the checkpoint says."""
    embeddings: str = "auto"
    feedback: str = "auto"
    """eagle3: what a draft step is fed."""
    cache_dir: Path = DEFAULT_CACHE_DIR
    otlp_endpoint: str | None = None
    trace_file: Path | None = None

    def __post_init__(self) -> None:
        self._check_method()
        check_range("--slot-count", self.chosen_slot_count, 1, MAX_SLOT_COUNT)
        check_range("--max-context-length", self.chosen_context_length, 1, MAX_CONTEXT_LENGTH)
        if self.max_draft_count is not None:
            check_range("--max-draft-count", self.max_draft_count, 1, MAX_DRAFT_COUNTS[self.draft])
        if self.block_length is not None:
            check_range("--block-length", self.block_length, 2, MAX_BLOCK_LENGTH)
        check_range("--ngram-max", self.ngram_max, 1, 32)
        check_range("--ngram-min", self.ngram_min, 1, self.ngram_max)
        _check_choice("--runtime", self.runtime, tuple(DEFAULT_PRECISIONS))
        _check_choice("--rows", self.rows, ROW_KINDS)
        _check_choice("--row-dtype", self.row_dtype, ROW_DTYPES)
        if self.draft_sampling is not None:
            _check_choice("--draft-sampling", self.draft_sampling, DRAFT_SAMPLINGS)
        _check_choice("--embeddings", self.embeddings, EMBEDDINGS)
        _check_choice("--feedback", self.feedback, FEEDBACKS)
        if self.threads is not None:
            check_range("--threads", self.threads, 1, 1024)

    def _check_method(self) -> None:
        """Check the method and what goes with one method only.

        Raises:
            UserError: names the flag and the method that it goes with.
        """
        if self.draft not in METHODS:
            known = ", ".join(sorted(METHODS))
            raise UserError(f"--draft {self.draft!r}: this version drafts with {known} only")
        has_model = self.draft in MODEL_METHODS
        if has_model and self.draft_model is None:  # the command line finds those that ship
            raise UserError(f"--draft {self.draft} needs --draft-model, the folder of a checkpoint")
        if not has_model and self.draft_model is not None:
            raise UserError(
                f"--draft-model {str(self.draft_model)!r}: --draft {self.draft} has no model; "
                f"--draft {' and '.join(MODEL_METHODS)} have"
            )
        if self.block_length is not None and self.draft != "dflash":
            raise UserError(
                f"--block-length {self.block_length}: --draft {self.draft} has no blocks; "
                "--draft dflash has"
            )
        if self.feedback != "auto" and self.draft == "dflash":
            raise UserError(
                f"--feedback {self.feedback!r}: a dflash block is one pass, which nothing is fed "
                "back to; --draft eagle3 has steps"
            )

    @property
    def chosen_slot_count(self) -> int:
        """Return how many sessions can be open at once."""
        return DEFAULT_SLOT_COUNTS[self.draft] if self.slot_count is None else self.slot_count

    @property
    def chosen_context_length(self) -> int:
        """Return the longest context of one session."""
        if self.max_context_length is None:
            return DEFAULT_CONTEXT_LENGTHS[self.draft]
        return self.max_context_length

    @property
    def chosen_draft_count(self) -> int | None:
        """Return the most draft tokens a round; None: as many as the draft's block drafts."""
        if self.max_draft_count is None:
            return DEFAULT_DRAFT_COUNTS.get(self.draft)
        return self.max_draft_count

    @property
    def chosen_draft_sampling(self) -> str:
        """Return how a session drafts that leaves it to the method, of those with a model."""
        return self.draft_sampling or DEFAULT_DRAFT_SAMPLINGS[self.draft]

    @property
    def chosen_precision(self) -> str:
        """Return the precision to draft in."""
        return self.precision or DEFAULT_PRECISIONS[self.runtime]


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """Check a flag that takes one of a few words.

    Raises:
        UserError: names the flag, the value and the words.
    """
    if value not in known:
        raise UserError(f"{name} {value!r} is not {', '.join(known[:-1])} or {known[-1]}")
