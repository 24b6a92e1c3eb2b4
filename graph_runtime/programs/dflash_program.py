"""`BlockDraft` on an ExecuTorch program: linears for all rows together, a block at a time.

A block's few rows fill a processor already, so that sessions gain nothing by sharing a call; what
they share is the projection of context rows, and the head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graph_runtime.dflash.checkpoint import DFlashCheckpoint
from graph_runtime.dflash.config import DFlashConfig
from graph_runtime.dflash.draft import BlockWork, ContextLengths
from graph_runtime.dflash.network import block_tokens, build_fusion, softcapped
from graph_runtime.programs.executorch_runtime import Program
from graph_runtime.programs.metadata import DFlashMetadata
from graph_runtime.programs.program_target import load_method
from graph_runtime.programs.rows import run_rows
from graph_runtime.programs.slot_cache import MASKED, SlotCache


class ProgramBlockDraft:
    """Implements `BlockDraft`. Each slot has a cache of its own, which grows with its session."""

    def __init__(
        self,
        program: Program,
        metadata: DFlashMetadata,
        checkpoint: DFlashCheckpoint,
        slot_count: int,
    ) -> None:
        """Load the methods of `program`: this is where weights are packed for the CPU."""
        self._program = program  # the methods borrow from it
        self._context_method = load_method(program, "context")
        self._block_method = load_method(program, "block")
        self._head_method = load_method(program, "head")
        self._metadata = metadata
        self._config = config = checkpoint.config
        self._model_hash = checkpoint.model_hash
        self._target_ids = checkpoint.target_ids
        self._fusion = build_fusion(config, checkpoint.tensors)
        most = config.max_draft_count(metadata.block_length)
        self._lengths = ContextLengths(slot_count, metadata.max_seq_len, most)
        self._slots = [SlotCache(metadata) for _ in range(slot_count)]
        self._masks = [
            BlockMask(metadata, window, bool(causal))
            for window, causal in zip(metadata.mask_windows, metadata.mask_causal, strict=True)
        ]

    @property
    def config(self) -> DFlashConfig:
        """Return the draft's shape."""
        return self._config

    @property
    def block_length(self) -> int:
        """Return how many slots a block has."""
        return self._metadata.block_length

    @property
    def model_hash(self) -> str:
        """Return the SHA-256 of the checkpoint, as hex."""
        return self._model_hash

    @property
    def target_ids(self) -> torch.Tensor | None:
        """Return the target id of each draft id; see `BlockDraft.target_ids`."""
        return self._target_ids

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        """Return features [N, H] of raw rows [N, raw_row_width]; see `BlockDraft.fuse`."""
        with torch.inference_mode():
            return self._fusion(rows)

    def reset(self, slot: int) -> None:
        """Forget a slot's context, and give its memory back."""
        self._lengths.reset(slot)
        self._slots[slot] = SlotCache(self._metadata)

    def run(self, works: Sequence[BlockWork]) -> list[torch.Tensor]:
        """Run one packed step; see `BlockDraft.run`."""
        self._lengths.check(works)
        for work in works:
            room = work.length + self.block_length
            self._slots[work.slot].reserve(room, kept=work.start)
        self._extend(works)
        hidden = [self._block(work) for work in works if work.draft_count]
        self._lengths.extend(works)
        return self._logits(hidden, [work.draft_count for work in works])

    def _extend(self, works: Sequence[BlockWork]) -> None:
        """Project the features of all works together; put K/V where each has its context."""
        new = [(work, self._seen(work.features)) for work in works if work.features is not None]
        new = [(work, features) for work, features in new if len(features)]
        if not new:
            return
        positions = [torch.arange(w.length - len(features), w.length) for w, features in new]
        inputs = [torch.cat([features for _, features in new]).float(), torch.cat(positions)]
        found = run_rows(self._context_method, inputs, self._metadata.max_context_rows)
        first = 0
        for work, features in new:
            rows = slice(first, first + len(features))
            cells = slice(work.length - len(features), work.length)
            slot = self._slots[work.slot]
            for cache, projected in zip(slot.tensors, found, strict=True):
                cache[:, cells, 0] = projected[rows].transpose(0, 1)
                slot.overflowed |= not math.isfinite(float(projected[rows].sum()))
            first = rows.stop

    def _seen(self, features: torch.Tensor) -> torch.Tensor:
        """Return the features that any block may see: of windowed layers alone the last (D16)."""
        return features if self._config.reach is None else features[-self._config.reach :]

    def _block(self, work: BlockWork) -> torch.Tensor:
        """Return the last layer's output [K, H] of the slots that draft."""
        assert work.pending_token_id is not None
        slot, start = self._slots[work.slot], work.length
        if self._config.reach is not None:
            slot.clear_before(start - self._config.reach)
        tokens = block_tokens(self._config, work.pending_token_id, self.block_length)
        (hidden,) = self._block_method.execute(
            [
                torch.tensor(tokens),
                torch.arange(start, start + self.block_length),
                *(mask.at(start, slot.capacity) for mask in self._masks),
                *slot.tensors,
            ]
        )
        slot.overflowed |= not bool(hidden.isfinite().all())
        first = self._config.first_draft_slot
        return hidden[first : first + work.draft_count]

    def _logits(self, hidden: list[torch.Tensor], counts: list[int]) -> list[torch.Tensor]:
        """Return each work's logits [K, Vd] of the hidden rows of those that draft."""
        logits = torch.empty(0, self._config.draft_vocab_size)
        if hidden:
            most = self._metadata.max_head_rows
            (logits,) = run_rows(self._head_method, [torch.cat(hidden)], most)
        if self._config.final_softcap is not None:
            # Row by row, for the reason that `silu_by_row` has.
            for row in logits:
                row.copy_(softcapped(row, self._config.final_softcap))
        return list(logits.split(counts))


class BlockMask:
    """The mask of the layers of one window and causality, wherever the block stands."""

    def __init__(self, metadata: DFlashMetadata, window: int, causal: bool) -> None:
        """Prepare what the masks of all positions are slices of; a window of 0 is none."""
        block, capacity = metadata.block_length, metadata.max_capacity
        self._capacity = capacity
        # Of a block at position 0: C positions before it, and from there on.
        self._around = torch.full((2 * capacity,), MASKED)
        self._around[max(capacity - window, 0) if window else 0 : capacity + block] = 0
        self._inside: torch.Tensor | None = None
        """[group * B, B]: what slots of a causal layer see of their block, for each query head."""
        if causal:
            inside = torch.full((block, block), MASKED).triu(1)
            self._inside = inside.repeat(metadata.n_heads // metadata.n_kv_heads, 1)

    def at(self, start: int, capacity: int) -> torch.Tensor:
        """Return the mask of a block at `start`: [1, 1, capacity], causal [1, group * B, ...]."""
        first = self._capacity - start
        seen = self._around[first : first + capacity].view(1, 1, capacity)
        if self._inside is None:
            return seen
        rows, block = self._inside.shape
        mask = seen.repeat(1, rows, 1)
        mask[0, :, start : start + block] = self._inside
        return mask
