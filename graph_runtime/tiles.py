"""Rows in tiles of a fixed height, and attention over the slots' caches for them.

Row invariance (law L4) is by construction. The packed rows of a step are cut into tiles of exactly
`TILE_ROWS` rows, so no linear ever sees another shape. Attention runs once for every group of a
tile's rows that share a slot and a padded context length, padded to `TILE_ROWS` rows too: its shape
is a function of a row's own position. SiLU runs once a row (`silu_by_row`). What remains is that a
matrix product gives a row the same bits wherever in the tile it lies, which the tests check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from graph_runtime.decoder import MLP
from graph_runtime.kv_cache import KVCache, padded_length

TILE_ROWS = 8
"""A verify window of 7 drafts is one tile."""


class PackedSpan(Protocol):
    """Consecutive rows of one slot in a packed step: a target's or a draft's span."""

    @property
    def slot(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True, kw_only=True)
class Run:
    """Rows [first, first + count) of a tile: consecutive positions of one slot."""

    slot: int
    start: int
    first: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows of a run that attend to the same slice [0, length) of the cache."""

    slot: int
    rows: torch.Tensor
    """[R] int64 indices into the tile, R <= TILE_ROWS."""
    length: int
    mask: torch.Tensor
    """[TILE_ROWS, length] bool: what a row may attend to, windows aside."""
    distance: torch.Tensor
    """[TILE_ROWS, length] int64: row position less key position."""


class Tile:
    """What one tile's rows are; the attention modules of all layers read it."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.groups: list[Group] = []

    def set(self, runs: list[Run], device: torch.device) -> None:
        """Take the next tile's runs."""
        self.runs = runs
        self.groups = [group for run in runs for group in _groups(run, device)]


def _groups(run: Run, device: torch.device) -> list[Group]:
    """Split a run where the padded context length changes."""
    groups = []
    done = 0
    while done < run.count:
        position = run.start + done
        length = padded_length(position + 1)
        count = min(run.count - done, length - position)
        queries = position + torch.arange(TILE_ROWS, device=device)
        distance = queries[:, None] - torch.arange(length, device=device)
        first = run.first + done
        rows = torch.arange(first, first + count, device=device)
        groups.append(
            Group(slot=run.slot, rows=rows, length=length, mask=distance >= 0, distance=distance)
        )
        done += count
    return groups


class CachedAttention(nn.Module):
    """Attention of one layer over the slots' caches, for the rows of the current tile."""

    def __init__(self, cache: KVCache, tile: Tile, sliding_window: int | None) -> None:
        """Attend to `cache`; a row sees its last `sliding_window` positions, or all for None."""
        super().__init__()
        self.cache = cache
        self.tile = tile
        self.sliding_window = sliding_window

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,  # noqa: ARG002 - the tile says where each row stands
        slot: torch.Tensor | None,  # noqa: ARG002
    ) -> torch.Tensor:
        """Write k and v [N, n_kv_heads, D], return the mixed values [N, n_heads, D]."""
        self.write(k, v)
        return self.attend(q)

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [N, n_kv_heads, D] of the tile's rows."""
        for run in self.tile.runs:
            rows = slice(run.first, run.first + run.count)
            self.cache.write(run.slot, run.start, k[rows], v[rows])

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """Return the mixed values [N, n_heads, D] of q, like it; padding rows are 0."""
        mixed = torch.zeros_like(q)
        for group in self.tile.groups:
            mixed[group.rows] = self._attend(q, group)[: len(group.rows)]
        return mixed

    def _attend(self, q: torch.Tensor, group: Group) -> torch.Tensor:
        """Return [TILE_ROWS, n_heads, D]: matmul, softmax, matmul; rows past the group's are 0."""
        k, v = self.cache.read(group.slot, group.length)
        n_kv_heads, _, width = k.shape
        n_heads = q.shape[1]
        padded = q.new_zeros(TILE_ROWS, n_heads, width)
        padded[: len(group.rows)] = q[group.rows]
        mask = group.mask
        if self.sliding_window is not None:
            mask = mask & (group.distance < self.sliding_window)
        # Heads that share K/V stack into the rows of one product: [n_kv_heads, share * T, D].
        share = n_heads // n_kv_heads
        stacked = padded.view(TILE_ROWS, n_kv_heads, share, width).permute(1, 2, 0, 3)
        stacked = stacked.reshape(n_kv_heads, share * TILE_ROWS, width) * width**-0.5
        scores = torch.bmm(stacked, k.transpose(1, 2)).float()
        scores = scores.view(n_kv_heads, share, TILE_ROWS, group.length)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1).to(v.dtype)
        mixed = torch.bmm(weights.view(n_kv_heads, share * TILE_ROWS, group.length), v)
        mixed = mixed.view(n_kv_heads, share, TILE_ROWS, width).permute(2, 0, 1, 3)
        return mixed.reshape(TILE_ROWS, n_heads, width)


def tile_runs(spans: Sequence[PackedSpan], first: int) -> list[Run]:
    """Return the runs of the tile that starts at packed row `first`."""
    runs = []
    span_first = 0
    for span in spans:
        span_end = span_first + len(span.token_ids)
        low, high = max(span_first, first), min(span_end, first + TILE_ROWS)
        if low < high:
            start = span.start + low - span_first
            runs.append(Run(slot=span.slot, start=start, first=low - first, count=high - low))
        span_first = span_end
    return runs


def by_tiles(
    compute: Callable[..., Sequence[torch.Tensor]], *rows: torch.Tensor
) -> list[torch.Tensor]:
    """Return what `compute` returns for rows [N, ...], computed a tile at a time.

    Args:
        compute: takes tensors [TILE_ROWS, ...] like `rows` and returns such tensors.
        rows: of equal N, 0 too; the last tile is padded with zeros, whose results are dropped.
    """
    count = len(rows[0])
    tiles = []
    for first in range(0, max(count, 1), TILE_ROWS):
        parts = [part[first : first + TILE_ROWS] for part in rows]
        short = TILE_ROWS - len(parts[0])
        if short:
            parts = [torch.cat((part, part.new_zeros(short, *part.shape[1:]))) for part in parts]
        tiles.append(compute(*parts))
    return [torch.cat(parts)[:count] for parts in zip(*tiles, strict=True)]


def make_row_invariant(network: nn.Module) -> None:
    """Replace the parts of `network`, in place, whose bits depend on a row's place in a tile."""
    for module in network.modules():
        if isinstance(module, MLP):
            module.silu = silu_by_row


def silu_by_row(x: torch.Tensor) -> torch.Tensor:
    """Return SiLU of x [N, W].

    NOTE: a CPU computes most of a tensor in vectors, but the end of every thread's share element by
    element, with another exponential. Shares of a whole tile end where the width, the number of
    threads and the CPU have them end, in some rows and not in others; shares of a row do not.
    """
    if x.is_cuda:
        return F.silu(x)
    return torch.stack([F.silu(row) for row in x])
