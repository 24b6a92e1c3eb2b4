"""The target as the verifier's engine sees it, whatever runs it.

Two runtimes implement `Target`: plain torch (the reference) and ExecuTorch programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """What a loaded target is and the limits it runs with."""

    model_id: str
    model_hash: str
    tokenizer_hash: str
    vocab_size: int
    n_layers: int
    tap_layers: tuple[int, ...]
    """0-based layer outputs, ascending."""
    row_width: int
    """Elements of one raw row: len(tap_layers) * hidden width."""
    row_dtype: torch.dtype
    min_prefill_chunk: int
    max_prefill_chunk: int
    max_context_length: int
    """KV positions of one slot."""
    slot_count: int
    precision: str
    runtime: str


@dataclass(frozen=True, kw_only=True)
class Span:
    """Consecutive tokens of one slot in a packed step.

    Runs `token_ids` at positions [start, start + T) of `slot`, attending positions [0, start) of
    that slot's cache and causally to each other, and writes their K/V there. Positions >= start
    that the cache held before are overwritten or ignored: rollback is not advancing a length.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    logits_count: int
    """How many of the last rows' logits are wanted: 0 (inner prefill chunk), 1, or T (verify)."""
    wants_rows: bool
    """False: the rows are neither computed into an output nor copied."""


@dataclass(frozen=True, kw_only=True)
class SpanOutput:
    """What one span gave."""

    logits: torch.Tensor
    """[logits_count, V] float32, on the target's device."""
    rows: torch.Tensor | None
    """[T, row_width] row_dtype, on the target's device; None when not wanted."""


class Target(Protocol):
    """One loaded target model with a KV cache of `slot_count` slots. Used by one thread.

    A row's logits and hidden states do not depend, bit for bit, on the width of the span it is
    computed in, on other spans, or on what lies in the cache beyond its position (law L4).
    """

    @property
    def info(self) -> TargetInfo:
        """Return what is loaded."""
        ...

    def step(self, spans: Sequence[Span]) -> list[SpanOutput]:
        """Run one packed step; outputs are in the order of `spans`. A slot appears at most once."""
        ...

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        """Copy K/V of positions [0, length) from slot `source` to slot `destination`."""
        ...
