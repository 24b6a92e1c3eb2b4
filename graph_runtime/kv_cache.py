"""Keys and values of every slot, one cache a layer."""

from __future__ import annotations

import torch

ATTENTION_BLOCK = 64
"""Rows attend to a slice of the cache whose length is a multiple of this."""


class KVCache:
    """K and V of one layer: `[slots, n_kv_heads, S, D]`, S rounded up to whole blocks.

    Rollback is not advancing a length: what lies beyond a row's position is never read into it.
    """

    def __init__(
        self,
        *,
        slot_count: int,
        n_kv_heads: int,
        max_context_length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the cache, zeroed: a masked position must hold a finite value."""
        length = padded_length(max_context_length)
        shape = (slot_count, n_kv_heads, length, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, slot: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, n_kv_heads, D] at positions [start, start + T) of `slot`.

        The rest of the last block is cleared: it holds rolled-back rows, and a masked weight of 0
        times a stray NaN would still be NaN.
        """
        end = start + k.shape[0]
        tail = padded_length(end)
        self.k[slot, :, start:end] = k.transpose(0, 1)
        self.v[slot, :, start:end] = v.transpose(0, 1)
        self.clear(slot, end, tail)

    def clear(self, slot: int, start: int, end: int) -> None:
        """Set positions [start, end) of `slot` to zero."""
        self.k[slot, :, start:end] = 0
        self.v[slot, :, start:end] = 0

    def read(self, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of K and V [n_kv_heads, length, D] of `slot`."""
        return self.k[slot, :, :length], self.v[slot, :, :length]

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        """Copy positions [0, length) of slot `source` to slot `destination`."""
        self.k[destination, :, :length] = self.k[source, :, :length]
        self.v[destination, :, :length] = self.v[source, :, :length]


def padded_length(length: int) -> int:
    """Return `length` rounded up to whole attention blocks."""
    return -(-length // ATTENTION_BLOCK) * ATTENTION_BLOCK
