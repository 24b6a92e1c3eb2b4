"""A DFlash draft as the drafter's engine sees it, whatever runs it.

Two runtimes implement `BlockDraft`: plain torch (the reference) and ExecuTorch programs.

The features of committed positions are keys and values of every draft layer and nothing else. They
are projected once, when a position commits. A block `[pending, MASK, ...]` stands at the positions
from the committed length on; each slot sees its own session's context and its own block. The
block's keys and values are dropped after the pass: nothing that may be rejected enters the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from graph_runtime.dflash.config import DFlashConfig
from splitspec.errors import UserError

LEAST_BLOCK_LENGTH = 2
"""The pending token and one mask."""


@dataclass(frozen=True, kw_only=True)
class BlockWork:
    """One session's part of a packed step: its context grows, then a block may be drafted."""

    slot: int
    """The session's lane in the cache."""
    start: int
    """The context held positions [0, start); afterwards it holds [0, start + c)."""
    features: torch.Tensor | None
    """[c, H] float32 features of positions [start, start + c), see `BlockDraft.fuse`; None: c is
    0."""
    pending_token_id: int | None
    """Target id of the token at start + c. Given when draft_count > 0."""
    draft_count: int
    """K: logits wanted; 0: only extend."""

    @property
    def length(self) -> int:
        """Return the context length after this work: the position of the pending token."""
        return self.start + (0 if self.features is None else len(self.features))


class BlockDraft(Protocol):
    """One loaded draft with a context cache of `slot_count` slots. Used by one thread.

    A session's result does not depend, bit for bit, on the other works of the pack.
    """

    @property
    def config(self) -> DFlashConfig:
        """Return the draft's shape."""
        ...

    @property
    def block_length(self) -> int:
        """Return how many slots a block has here: 2 .. config.block_size."""
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
        """Return features [N, H] float32 of raw rows [N, raw_row_width]: fc, then its norm.

        The same numbers, bit for bit, as the verifier's `--fuse-for`, whatever N is.
        """
        ...

    def run(self, works: Sequence[BlockWork]) -> list[torch.Tensor]:
        """Run one packed step; return each work's logits [K, Vd] float32 on the CPU.

        Row k - 1 of a work decides its draft token dk, at position length + k.

        Raises:
            ValueError: a work breaks a rule, see `ContextLengths`; nothing ran.
        """
        ...

    def reset(self, slot: int) -> None:
        """Forget a slot's context."""
        ...


class ContextLengths:
    """How long each slot's context is, and the rules of extending it."""

    def __init__(self, slot_count: int, max_length: int, max_draft_count: int) -> None:
        """Hold `slot_count` empty contexts of at most `max_length` positions."""
        self._lengths = [0] * slot_count
        self._max_length = max_length
        self._max_draft_count = max_draft_count

    def length(self, slot: int) -> int:
        """Return how many positions the context of `slot` holds."""
        return self._lengths[slot]

    def check(self, works: Sequence[BlockWork]) -> None:
        """Check a whole pack before any of it runs.

        Raises:
            ValueError: a slot appears twice, a work starts elsewhere than its context ends, the
                context would be too long, or the block cannot be drafted as asked.
        """
        seen: set[int] = set()
        for work in works:
            if work.slot in seen:
                raise ValueError(f"slot {work.slot} appears twice in one pack")
            seen.add(work.slot)
            held = self._lengths[work.slot]
            if work.start != held:
                raise ValueError(f"a write at {work.start}: the context of the slot ends at {held}")
            if work.length > self._max_length:
                raise ValueError(f"a context of {work.length}; the cache holds {self._max_length}")
            if not 0 <= work.draft_count <= self._max_draft_count:
                raise ValueError(
                    f"draft count {work.draft_count}; the block drafts 0..{self._max_draft_count}"
                )
            if work.draft_count and work.pending_token_id is None:
                raise ValueError("a block needs the pending token")

    def extend(self, works: Sequence[BlockWork]) -> None:
        """Take note of a pack that ran."""
        for work in works:
            self._lengths[work.slot] = work.length

    def reset(self, slot: int) -> None:
        """Forget what `slot` held."""
        self._lengths[slot] = 0


def checked_block_length(config: DFlashConfig, block_length: int | None) -> int:
    """Return the slots of a block at run time; None: as the draft was trained.

    Raises:
        UserError: it is not in 2 .. the trained block_size: slots beyond were never trained.
    """
    if block_length is None:
        return config.block_size
    if not LEAST_BLOCK_LENGTH <= block_length <= config.block_size:
        raise UserError(
            f"--block-length is {block_length}; expected {LEAST_BLOCK_LENGTH} to "
            f"{config.block_size}, the block_size that the draft was trained with"
        )
    return block_length
