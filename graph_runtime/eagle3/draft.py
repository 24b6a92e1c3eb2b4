"""An EAGLE-3 draft as the drafter's engine sees it, whatever runs it.

Two runtimes implement `Draft`: plain torch (the reference) and ExecuTorch programs.

The shifted scheme: draft slot p holds the feature of position p and the embedding of the token at
p + 1, with RoPE position p. The feature is the target's fused row where the position is committed,
and the draft's own recurrent feature where it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from graph_runtime.eagle3.config import Eagle3Config


@dataclass(frozen=True, kw_only=True)
class DraftSpan:
    """Consecutive draft slots of one session in a packed step.

    Writes K/V of draft slots [start, start + T) of the cache slot, attending [0, start) of that
    cache and causally to each other. What the cache held from `start` on is overwritten or stale:
    rollback is not advancing a length.
    """

    slot: int
    """The session's lane in the cache."""
    start: int
    token_ids: Sequence[int]
    """T >= 1 target ids: those of positions start + 1 .. start + T."""
    features: torch.Tensor
    """[T, H] float32 features of positions start .. start + T - 1, on the draft's device or the
    CPU."""


class Draft(Protocol):
    """One loaded draft with a KV cache of `slot_count` slots. Used by one thread.

    A session's result does not depend, bit for bit, on the other spans of the pack.
    """

    @property
    def config(self) -> Eagle3Config:
        """Return the draft's shape."""
        ...

    @property
    def model_hash(self) -> str:
        """Return the SHA-256 of the checkpoint, as hex."""
        ...

    @property
    def target_ids(self) -> torch.Tensor | None:
        """Return the target id of each draft id, [Vd] int64 strictly increasing on the CPU.

        None: they are the same.
        """
        ...

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        """Return features [N, H] float32 of raw rows [N, raw_row_width]: fc and its norms.

        The same numbers, bit for bit, as the verifier's `--fuse-for`, whatever N is.
        """
        ...

    def run(self, spans: Sequence[DraftSpan]) -> torch.Tensor:
        """Run one packed pass; return the recurrent feature [B, H] after each span's last slot.

        Raises:
            ValueError: a span breaks a rule of the cache (E20), see `DraftLengths`; nothing ran.
        """
        ...

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits [B, Vd] float32, on the CPU, of recurrent features [B, H]."""
        ...

    def reset(self, slot: int) -> None:
        """Forget a slot's cache."""
        ...


class DraftLengths:
    """How far each cache slot is valid, and the rules of writing to it (E20)."""

    def __init__(self, slot_count: int, max_length: int) -> None:
        """Hold `slot_count` empty slots of `max_length` positions each."""
        self._lengths = [0] * slot_count
        self._max_length = max_length

    def length(self, slot: int) -> int:
        """Return how many draft slots of `slot` are valid."""
        return self._lengths[slot]

    def check(self, spans: Sequence[DraftSpan]) -> None:
        """Check a whole pack before any of it runs.

        Raises:
            ValueError: a slot appears twice, a span is empty or has another count of features, it
                starts beyond the valid length (a gap), or it ends beyond the cache.
        """
        seen: set[int] = set()
        for span in spans:
            count = len(span.token_ids)
            if span.slot in seen:
                raise ValueError(f"slot {span.slot} appears twice in one pack")
            seen.add(span.slot)
            if count < 1 or len(span.features) != count:
                raise ValueError(f"{count} tokens with {len(span.features)} features")
            valid = self._lengths[span.slot]
            if not 0 <= span.start <= valid:
                raise ValueError(f"a write at {span.start} leaves a gap: {valid} are valid")
            if span.start + count > self._max_length:
                raise ValueError(
                    f"a write ends at {span.start + count}; the cache holds {self._max_length}"
                )

    def write(self, spans: Sequence[DraftSpan]) -> None:
        """Take note of a pack that was written: what lay beyond its spans is stale."""
        for span in spans:
            self._lengths[span.slot] = span.start + len(span.token_ids)

    def reset(self, slot: int) -> None:
        """Forget what `slot` held."""
        self._lengths[slot] = 0
