"""The target in plain torch: the reference, and what runs where executorch is not installed.

Row invariance (law L4) is by construction. The packed rows of a step are cut into tiles of exactly
`TILE_ROWS` rows, and the decoder runs once a tile, so no linear ever sees another shape. Attention
runs once for every group of a tile's rows that share a slot and a padded context length, padded to
`TILE_ROWS` rows too: its shape is a function of a row's own position. What remains is that a matrix
product gives a row the same bits wherever in the tile it lies, which the tests check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from graph_runtime.architecture import DecoderConfig
from graph_runtime.decoder import Decoder
from graph_runtime.kv_cache import KVCache, padded_length
from graph_runtime.target import Span, SpanOutput, TargetInfo

TILE_ROWS = 8
"""A verify window of 7 drafts is one tile."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Rows [first, first + count) of a tile: consecutive positions of one slot."""

    slot: int
    start: int
    first: int
    count: int


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Rows of a run that attend to the same slice [0, length) of the cache."""

    slot: int
    rows: torch.Tensor
    """[R] int64 indices into the tile, R <= TILE_ROWS."""
    length: int
    mask: torch.Tensor
    """[TILE_ROWS, length] bool: what a row may attend to, windows aside."""
    distance: torch.Tensor
    """[TILE_ROWS, length] int64: row position less key position."""


class _Tile:
    """What one tile's rows are; the attention modules of all layers read it."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        self.groups: list[_Group] = []

    def set(self, runs: list[_Run], device: torch.device) -> None:
        """Take the next tile's runs."""
        self.runs = runs
        self.groups = [group for run in runs for group in _groups(run, device)]


def _groups(run: _Run, device: torch.device) -> list[_Group]:
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
            _Group(slot=run.slot, rows=rows, length=length, mask=distance >= 0, distance=distance)
        )
        done += count
    return groups


class CachedAttention(nn.Module):
    """Attention of one layer over the slots' caches, for the rows of the current tile."""

    def __init__(self, cache: KVCache, tile: _Tile, sliding_window: int | None) -> None:
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
        for run in self.tile.runs:
            rows = slice(run.first, run.first + run.count)
            self.cache.write(run.slot, run.start, k[rows], v[rows])
        mixed = torch.zeros_like(q)
        for group in self.tile.groups:
            mixed[group.rows] = self._attend(q, group)[: len(group.rows)]
        return mixed

    def _attend(self, q: torch.Tensor, group: _Group) -> torch.Tensor:
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


class TorchTarget:
    """A `Target` (see graph_runtime/target.py) on a CPU or a CUDA device."""

    def __init__(self, decoder: Decoder, caches: list[KVCache], tile: _Tile, info: TargetInfo):
        """Wrap a loaded decoder; use `build_decoder` and `graph_runtime.load` instead."""
        self._decoder = decoder
        self._caches = caches
        self._tile = tile
        self._info = info
        self._device = decoder.norm.weight.device

    @property
    def info(self) -> TargetInfo:
        """Return what is loaded."""
        return self._info

    @torch.no_grad()
    def step(self, spans: Sequence[Span]) -> list[SpanOutput]:
        """Run one packed step; outputs are in the order of `spans`."""
        self._check(spans)
        hidden, rows = self._hidden(spans)
        logits = self._logits(hidden, spans)
        outputs = []
        first = logits_first = 0
        for span in spans:
            end = first + len(span.token_ids)
            logits_end = logits_first + span.logits_count
            outputs.append(
                SpanOutput(
                    logits=logits[logits_first:logits_end],
                    rows=rows[first:end] if span.wants_rows else None,
                )
            )
            first, logits_first = end, logits_end
        return outputs

    @torch.no_grad()
    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        """Copy K/V of positions [0, length) from slot `source` to slot `destination`."""
        assert 0 <= length <= self._info.max_context_length, length
        for cache in self._caches:
            cache.copy_prefix(source, destination, length)

    def _check(self, spans: Sequence[Span]) -> None:
        """Assert what the engine promises: distinct slots, positions inside the context."""
        slots = [span.slot for span in spans]
        assert spans, "a packed step has at least one span"
        assert len(set(slots)) == len(slots), f"a slot appears twice: {slots}"
        for span in spans:
            count = len(span.token_ids)
            assert 0 <= span.slot < self._info.slot_count, span
            assert count >= 1, span
            assert 0 <= span.start <= self._info.max_context_length - count, span
            assert 0 <= span.logits_count <= count, span

    def _hidden(self, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the decoder tile by tile: last layer's output [N, H] and rows [N, row_width]."""
        tokens = [token for span in spans for token in span.token_ids]
        positions = [span.start + i for span in spans for i in range(len(span.token_ids))]
        padding = [0] * (-len(tokens) % TILE_ROWS)
        packed = torch.tensor([tokens + padding, positions + padding], device=self._device)
        outputs = []
        for first in range(0, len(tokens), TILE_ROWS):
            self._tile.set(_runs(spans, first), self._device)
            tile = packed[:, first : first + TILE_ROWS]
            outputs.append(self._decoder.hidden(tile[0], tile[1]))
        hidden, rows = (torch.cat(parts)[: len(tokens)] for parts in zip(*outputs, strict=True))
        return hidden, rows

    def _logits(self, hidden: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """Return the wanted logits of all spans, [sum of logits_count, V] float32."""
        wanted = []
        end = 0
        for span in spans:
            end += len(span.token_ids)
            wanted.append(hidden[end - span.logits_count : end])
        picked = torch.cat(wanted)
        count = len(picked)
        picked = nn.functional.pad(picked, (0, 0, 0, -count % TILE_ROWS))
        tiles = [self._decoder.head(tile).float() for tile in picked.split(TILE_ROWS)]
        return torch.cat(tiles)[:count]


def _runs(spans: Sequence[Span], first: int) -> list[_Run]:
    """Return the runs of the tile that starts at packed row `first`."""
    runs = []
    span_first = 0
    for span in spans:
        span_end = span_first + len(span.token_ids)
        low, high = max(span_first, first), min(span_end, first + TILE_ROWS)
        if low < high:
            start = span.start + low - span_first
            runs.append(_Run(slot=span.slot, start=start, first=low - first, count=high - low))
        span_first = span_end
    return runs


def build_decoder(
    config: DecoderConfig,
    *,
    tap_layers: tuple[int, ...],
    max_context_length: int,
    slot_count: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Decoder, list[KVCache], _Tile]:
    """Build a decoder with unset weights and its caches: what a TorchTarget is made of."""
    tile = _Tile()
    caches = [
        KVCache(
            slot_count=slot_count,
            n_kv_heads=config.n_kv_heads,
            max_context_length=max_context_length,
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
        )
        for _ in range(config.n_layers)
    ]
    decoder = Decoder(
        config,
        attentions=[
            CachedAttention(cache, tile, window)
            for cache, window in zip(caches, config.sliding_windows, strict=True)
        ],
        tap_layers=tap_layers,
        max_context_length=max_context_length,
    )
    decoder.to(device=device, dtype=dtype)
    return decoder.eval().requires_grad_(False), caches, tile
