"""The target in plain torch: the reference, and what runs where executorch is not installed.

Row invariance (law L4) is by construction: the decoder runs once a tile (graph_runtime/tiles.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from graph_runtime.architecture import DecoderConfig
from graph_runtime.decoder import Decoder
from graph_runtime.kv_cache import KVCache
from graph_runtime.target import Span, SpanOutput, TargetInfo
from graph_runtime.tiles import TILE_ROWS, CachedAttention, Tile, make_row_invariant, tile_runs


class TorchTarget:
    """A `Target` (see graph_runtime/target.py) on a CPU or a CUDA device."""

    def __init__(self, decoder: Decoder, caches: list[KVCache], tile: Tile, info: TargetInfo):
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
            self._tile.set(tile_runs(spans, first), self._device)
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


def build_decoder(
    config: DecoderConfig,
    *,
    tap_layers: tuple[int, ...],
    max_context_length: int,
    slot_count: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Decoder, list[KVCache], Tile]:
    """Build a decoder with unset weights and its caches: what a TorchTarget is made of."""
    tile = Tile()
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
    make_row_invariant(decoder)
    decoder.to(device=device, dtype=dtype)
    return decoder.eval().requires_grad_(False), caches, tile
