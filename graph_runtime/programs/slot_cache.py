"""K/V that a program's methods are handed, and what keeps their bits apart from its capacity."""

from __future__ import annotations

from typing import Protocol

import torch

CAPACITY_BLOCK = 64
"""Capacities are multiples of this. The vector loops of the softmax and of the products then split
a row in the same way at any capacity, so that its bits do not depend on it (law L4)."""
MIN_ROWS = 2
"""A single row is run twice: products with one row take other kernels, with other bits (L4)."""
MASKED = -1e30
"""Added to the scores of positions that a row may not see: their softmax is exactly 0."""
_GROWTH = 1.25


def padded_capacity(positions: int) -> int:
    """Return the smallest capacity that holds `positions`."""
    return -(-positions // CAPACITY_BLOCK) * CAPACITY_BLOCK


class CacheShape(Protocol):
    """What shapes a slot's cache: a program's metadata."""

    @property
    def n_layers(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_capacity(self) -> int: ...


class SlotCache:
    """K/V of one slot: for each layer two tensors [n_kv_heads, C, 1, D] float32.

    C grows with the session, so that a short one costs neither the memory nor the attention of a
    long one, and a method is handed the whole tensors without a copy. What lies beyond the valid
    positions is masked, which takes finite values: only after a step that overflowed is it cleared.
    """

    def __init__(self, shape: CacheShape) -> None:
        """Build an empty cache; the first `reserve` allocates."""
        self._shape = shape
        self.capacity = 0
        self.tensors: list[torch.Tensor] = []
        """K of every layer, then V of every layer."""
        self.overflowed = False
        """Whether a step since position 0 may have left values that are not finite."""

    def clear_from(self, position: int) -> None:
        """Make what lies at `position` and beyond finite again: NaN shows through any mask."""
        if not self.overflowed:
            return
        for tensor in self.tensors:
            tensor[:, position:] = 0
        self.overflowed = position > 0

    def clear_before(self, position: int) -> None:
        """Make finite what lies before `position`, which nothing that comes will see."""
        if self.overflowed and position > 0:
            for tensor in self.tensors:
                tensor[:, :position] = 0

    def reserve(self, positions: int, kept: int) -> None:
        """Make room for `positions`, keeping those in [0, kept).

        A session that starts anew (kept = 0) gives back what its predecessor had grown to.
        """
        if kept and positions <= self.capacity:
            return
        wanted = max(positions, int(self.capacity * _GROWTH) if kept else 0)
        capacity = min(padded_capacity(wanted), self._shape.max_capacity)
        assert positions <= capacity, (positions, capacity)
        if capacity == self.capacity:
            return
        shape = (self._shape.n_kv_heads, capacity, 1, self._shape.head_dim)
        old, self.tensors = self.tensors, []
        assert old or not kept, kept
        for i in range(2 * self._shape.n_layers):
            self.tensors.append(torch.zeros(shape))
            if kept:
                self.tensors[i][:, :kept] = old[i][:, :kept]
        self.capacity = capacity

    def copy_from(self, other: SlotCache, length: int) -> None:
        """Copy positions [0, length) of `other`."""
        self.reserve(max(length, 1), kept=0)
        self.clear_from(0)
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine[:, :length] = theirs[:, :length]
        self.overflowed = other.overflowed
