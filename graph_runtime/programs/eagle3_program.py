"""`Draft` on an ExecuTorch program: linears for the whole pack, attention a session at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graph_runtime.eagle3.checkpoint import Eagle3Checkpoint
from graph_runtime.eagle3.config import Eagle3Config
from graph_runtime.eagle3.draft import DraftLengths, DraftSpan
from graph_runtime.eagle3.network import build_fusion
from graph_runtime.programs.executorch_runtime import Method, Program
from graph_runtime.programs.metadata import Eagle3Metadata
from graph_runtime.programs.program_target import load_method
from graph_runtime.programs.rows import run_rows
from graph_runtime.programs.slot_cache import MASKED, SlotCache


class ProgramDraft:
    """Implements `Draft`. Each slot has a cache of its own, which grows with its session."""

    def __init__(
        self,
        program: Program,
        metadata: Eagle3Metadata,
        checkpoint: Eagle3Checkpoint,
        slot_count: int,
    ) -> None:
        """Load the methods of `program`: this is where weights are packed for the CPU."""
        self._program = program  # the methods borrow from it
        self._enter_method = load_method(program, "enter")
        self._attend_method = load_method(program, "attend")
        self._leave_method = load_method(program, "leave")
        self._head_method = load_method(program, "head")
        self._metadata = metadata
        self._config = checkpoint.config
        self._model_hash = checkpoint.model_hash
        self._target_ids = checkpoint.target_ids
        self._fusion = build_fusion(checkpoint.config, checkpoint.tensors)
        self._lengths = DraftLengths(slot_count, metadata.max_seq_len)
        self._slots = [SlotCache(metadata) for _ in range(slot_count)]
        self._masks = _masks(metadata)

    @property
    def config(self) -> Eagle3Config:
        """Return the draft's shape."""
        return self._config

    @property
    def model_hash(self) -> str:
        """Return the SHA-256 of the checkpoint, as hex."""
        return self._model_hash

    @property
    def target_ids(self) -> torch.Tensor | None:
        """Return the target id of each draft id; see `Draft.target_ids`."""
        return self._target_ids

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        """Return features [N, H] of raw rows [N, raw_row_width]; see `Draft.fuse`."""
        with torch.inference_mode():
            return self._fusion(rows)

    def reset(self, slot: int) -> None:
        """Forget a slot's cache, and give its memory back."""
        self._lengths.reset(slot)
        self._slots[slot] = SlotCache(self._metadata)

    def run(self, spans: Sequence[DraftSpan]) -> torch.Tensor:
        """Run one packed pass; see `Draft.run`."""
        self._lengths.check(spans)
        if not spans:
            return torch.empty(0, self._config.hidden_size)
        q, k, v, residual = self._enter(spans)
        mixed, last = [], []
        first = 0
        for span in spans:
            end = first + len(span.token_ids)
            last.append(end - 1)
            mixed.append(self._attend(span, q[end - 1 : end], k[first:end], v[first:end]))
            first = end
        self._lengths.write(spans)
        alone = len(spans) == len(residual) == 1
        return self._leave(
            mixed[0] if len(mixed) == 1 else torch.cat(mixed),
            residual if alone else residual[last],
        )

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits [B, Vd] of recurrent features [B, H]."""
        return self._rows(self._head_method, [features], self._config.draft_vocab_size)

    def _enter(self, spans: Sequence[DraftSpan]) -> list[torch.Tensor]:
        """Return q, k, v and the residual of all rows of the pack."""
        tokens = torch.tensor([token for span in spans for token in span.token_ids])
        positions = torch.tensor(
            [p for span in spans for p in range(span.start, span.start + len(span.token_ids))]
        )
        features = spans[0].features if len(spans) == 1 else torch.cat([s.features for s in spans])
        features = features.float().contiguous()
        found = run_rows(
            self._enter_method, [tokens, features, positions], self._metadata.max_enter_rows
        )
        return found if len(found) == 4 else [*found, features]  # which are the residual

    def _attend(
        self, span: DraftSpan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Write k and v [T, n_kv_heads, D] of a span; return the mixed values of its last row."""
        slot = self._slots[span.slot]
        end = span.start + len(k)
        slot.reserve(end, kept=span.start)
        slot.clear_from(span.start)
        # NaN and infinities in K/V show through any mask once the positions are stale.
        slot.overflowed |= not math.isfinite(float(k.sum() + v.sum()))
        step = self._metadata.max_enter_rows
        mixed = q
        for first in range(0, len(k), step):
            part = slice(first, first + step)
            start = torch.tensor([span.start + first])
            mask = self._mask(min(span.start + first + step, end) - 1, slot.capacity)
            (mixed,) = self._attend_method.execute(
                [q, k[part], v[part], start, mask, *slot.tensors]
            )
        return mixed

    def _mask(self, position: int, capacity: int) -> torch.Tensor:
        """Return the mask [1, 1, capacity] of what the row at `position` may see."""
        first = self._metadata.max_capacity - 1 - position
        return self._masks[first : first + capacity].view(1, 1, capacity)

    def _leave(self, mixed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._rows(self._leave_method, [mixed, residual], self._config.hidden_size)

    def _rows(self, method: Method, inputs: list[torch.Tensor], width: int) -> torch.Tensor:
        """Return what `method` makes of inputs [B, ...], [B, width]; B may be 0."""
        if not len(inputs[0]):
            return torch.empty(0, width)
        return run_rows(method, inputs, self._metadata.max_leave_rows)[0]


def _masks(metadata: Eagle3Metadata) -> torch.Tensor:
    """Return [2C] of which every row's mask is a slice: masked, then C visible, then masked.

    Position p's slice begins C - 1 - p before the end of what is visible, so that p is the last.
    """
    capacity, window = metadata.max_capacity, metadata.sliding_window
    masks = torch.full((2 * capacity,), MASKED)
    masks[max(capacity - window, 0) if window else 0 : capacity] = 0
    return masks
