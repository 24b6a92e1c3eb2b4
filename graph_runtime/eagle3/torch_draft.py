"""The draft in plain torch: the reference, and what runs where executorch is not installed.

Every row of a span writes its K and V, in tiles packed over sessions (graph_runtime/tiles.py).
Queries, attention and the MLP run for the spans' last rows only: nothing reads the others' outputs,
since what a committed position feeds on is the target's feature. A session's bits depend on its own
rows only, as the target's do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from graph_runtime.eagle3.config import Eagle3Config
from graph_runtime.eagle3.draft import DraftLengths, DraftSpan
from graph_runtime.eagle3.network import Eagle3Network
from graph_runtime.kv_cache import KVCache
from graph_runtime.tiles import (
    TILE_ROWS,
    CachedAttention,
    Run,
    Tile,
    by_tiles,
    make_row_invariant,
    tile_runs,
)


class TorchDraft:
    """A `Draft` (see graph_runtime/eagle3/draft.py) on a CPU or a CUDA device."""

    def __init__(
        self,
        network: Eagle3Network,
        *,
        lengths: DraftLengths,
        model_hash: str,
        target_ids: torch.Tensor | None,
    ) -> None:
        """Wrap a loaded network of `build_network`; see `graph_runtime.eagle3.load`.

        Args:
            network: with its weights.
            lengths: of slots as many and as long as the network's cache.
            model_hash: SHA-256 of the checkpoint.
            target_ids: [Vd] int64, the target id of each draft id; None: they are the same.
        """
        attention = network.layer.self_attn.attention
        assert isinstance(attention, CachedAttention)
        self._network = network
        self._attention = attention
        self._lengths = lengths
        self._model_hash = model_hash
        self._target_ids = target_ids
        self._device = network.norm.weight.device
        self._dtype = network.norm.weight.dtype

    @property
    def config(self) -> Eagle3Config:
        """Return the draft's shape."""
        return self._network.config

    @property
    def model_hash(self) -> str:
        """Return the SHA-256 of the checkpoint, as hex."""
        return self._model_hash

    @property
    def target_ids(self) -> torch.Tensor | None:
        """Return the target id of each draft id, [Vd] int64; None: they are the same."""
        return self._target_ids

    @torch.no_grad()
    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        """Return features [N, H] float32 of raw rows [N, raw_row_width]."""
        return self._network.fusion(rows.to(self._device))

    @torch.no_grad()
    def run(self, spans: Sequence[DraftSpan]) -> torch.Tensor:
        """Run one packed pass; return the recurrent feature [B, H] float32 of each last slot.

        Raises:
            ValueError: a span breaks a rule of the cache (E20); nothing ran.
        """
        assert spans, "a pack has at least one span"
        self._lengths.check(spans)
        x, residual = self._write(spans)
        outputs = [
            self._finish(spans[first : first + TILE_ROWS], x_tile, residual_tile)
            for first, x_tile, residual_tile in zip(
                range(0, len(spans), TILE_ROWS), _tiles(x), _tiles(residual), strict=True
            )
        ]
        self._lengths.write(spans)
        return torch.cat(outputs)[: len(spans)].float()

    @torch.no_grad()
    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits [B, Vd] float32, on the CPU, of recurrent features [B, H]."""
        features = features.to(device=self._device, dtype=self._dtype)
        (logits,) = by_tiles(lambda tile: [self._network.head(tile).float()], features)
        return logits.cpu()

    def reset(self, slot: int) -> None:
        """Forget a slot's cache; what it holds is overwritten before it is read."""
        self._lengths.reset(slot)

    def _write(self, spans: Sequence[DraftSpan]) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V of every row; return x [B, 2H] and residual [B, H] of the last rows."""
        tokens = [token for span in spans for token in span.token_ids]
        positions = [span.start + i for span in spans for i in range(len(span.token_ids))]
        padding = [0] * (-len(tokens) % TILE_ROWS)
        packed = torch.tensor([tokens + padding, positions + padding], device=self._device)
        features = torch.cat([span.features for span in spans])
        features = features.to(device=self._device, dtype=self._dtype)
        joined = []
        for i, tile in enumerate(_tiles(features)):
            first = i * TILE_ROWS
            token_tile, position_tile = packed[:, first : first + TILE_ROWS]
            x, residual = self._network.join(token_tile, tile)
            self._attention.tile.set(tile_runs(spans, first), self._device)
            self._attention.write(*self._network.keys_values(x, position_tile))
            joined.append((x, residual))
        counts = torch.tensor([len(span.token_ids) for span in spans], device=self._device)
        last = counts.cumsum(0) - 1
        xs, residuals = zip(*joined, strict=True)
        return torch.cat(xs)[last], torch.cat(residuals)[last]

    def _finish(
        self, spans: Sequence[DraftSpan], x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """Return the recurrent feature [TILE_ROWS, H] of the last rows of at most 8 spans."""
        ends = [span.start + len(span.token_ids) - 1 for span in spans]
        runs = [
            Run(slot=span.slot, start=end, first=i, count=1)
            for i, (span, end) in enumerate(zip(spans, ends, strict=True))
        ]
        self._attention.tile.set(runs, self._device)
        padded = torch.tensor(ends + [0] * (TILE_ROWS - len(ends)), device=self._device)
        mixed = self._attention.attend(self._network.queries(x, padded))
        return self._network.leave(mixed, residual)


def _tiles(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut rows [N, W] into tiles [TILE_ROWS, W], the last one padded with zeros."""
    padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % TILE_ROWS))
    return padded.split(TILE_ROWS)


def build_network(
    config: Eagle3Config,
    *,
    max_context_length: int,
    slot_count: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Eagle3Network:
    """Build a network with unset weights over a cache: what a TorchDraft is made of."""
    cache = KVCache(
        slot_count=slot_count,
        n_kv_heads=config.n_kv_heads,
        max_context_length=max_context_length,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )
    attention = CachedAttention(cache, Tile(), config.sliding_window)
    network = Eagle3Network(config, attention=attention, max_context_length=max_context_length)
    make_row_invariant(network)
    network.to(device=device, dtype=dtype)
    network.fusion.to(dtype=torch.float32)
    return network.eval().requires_grad_(False)
