"""The draft in plain torch: the reference, and what runs where executorch is not installed.

Linears take the rows of all sessions of a step together, in tiles (graph_runtime/tiles.py), so that
a row's bits depend on its own numbers only. Attention is a session's own: over its own block and a
slice of its cache whose bounds are a function of its own context length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from graph_runtime.dflash.config import DFlashConfig
from graph_runtime.dflash.draft import BlockWork, ContextLengths
from graph_runtime.dflash.network import DFlashLayer, DFlashNetwork, block_tokens, softcapped
from graph_runtime.kv_cache import ATTENTION_BLOCK, KVCache, padded_length
from graph_runtime.tiles import by_tiles, make_row_invariant


class TorchBlockDraft:
    """A `BlockDraft` (see graph_runtime/dflash/draft.py) on a CPU or a CUDA device."""

    def __init__(
        self,
        network: DFlashNetwork,
        *,
        block_length: int,
        lengths: ContextLengths,
        model_hash: str,
        target_ids: torch.Tensor | None,
    ) -> None:
        """Wrap a loaded network of `build_network`; see `graph_runtime.dflash.load`.

        Args:
            network: with its weights.
            block_length: slots of a block, as many as the network's caches have room for.
            lengths: of slots as many and as long as the network's caches.
            model_hash: SHA-256 of the checkpoint.
            target_ids: [Vd] int64, the target id of each draft id; None: they are the same.
        """
        self._network = network
        self._block_length = block_length
        self._lengths = lengths
        self._model_hash = model_hash
        self._target_ids = target_ids
        self._device = network.norm.weight.device
        self._dtype = network.norm.weight.dtype

    @property
    def config(self) -> DFlashConfig:
        """Return the draft's shape."""
        return self._network.config

    @property
    def block_length(self) -> int:
        """Return how many slots a block has here."""
        return self._block_length

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
    def run(self, works: Sequence[BlockWork]) -> list[torch.Tensor]:
        """Run one packed step; return each work's logits [K, Vd] float32 on the CPU.

        Raises:
            ValueError: a work breaks a rule of the context; nothing ran.
        """
        self._lengths.check(works)
        self._extend(works)
        drafting = [work for work in works if work.draft_count]
        logits = torch.empty(0, self.config.draft_vocab_size)
        if drafting:
            hidden = self._blocks(drafting)
            logits = self._logits(hidden, drafting)
        self._lengths.extend(works)
        return list(logits.split([work.draft_count for work in works]))

    def reset(self, slot: int) -> None:
        """Forget a slot's context; what its cache holds is overwritten before it is read."""
        self._lengths.reset(slot)

    def _extend(self, works: Sequence[BlockWork]) -> None:
        """Write K and V of the works' new context rows, less those that no block will see (D16)."""
        new: list[tuple[BlockWork, int]] = []
        features: list[torch.Tensor] = []
        positions: list[int] = []
        for work in works:
            first = max(work.start, work.length - (self.config.reach or work.length))
            if work.features is not None and first < work.length:
                new.append((work, first))
                features.append(work.features[first - work.start :])
                positions += range(first, work.length)
        if not new:
            return
        projected = by_tiles(
            lambda *tile: [part for pair in self._network.context(*tile) for part in pair],
            torch.cat(features).to(device=self._device, dtype=self._dtype),
            torch.tensor(positions, device=self._device),
        )
        for i, layer in enumerate(_layers(self._network)):
            row = 0
            for work, first in new:
                rows = slice(row, row + work.length - first)
                k, v = projected[2 * i][rows], projected[2 * i + 1][rows]
                _attention(layer).cache.write(work.slot, first, k, v)
                row = rows.stop

    def _blocks(self, works: Sequence[BlockWork]) -> torch.Tensor:
        """Return the last layer's output [N, H] of the works' blocks, one after another."""
        length = self._block_length
        blocks = [
            Block(slot=work.slot, start=work.length, first=i * length, count=length)
            for i, work in enumerate(works)
        ]
        tokens: list[int] = []
        positions: list[int] = []
        for work in works:
            assert work.pending_token_id is not None  # `ContextLengths.check` said so
            tokens += block_tokens(self.config, work.pending_token_id, length)
            positions += range(work.length, work.length + length)
        packed = torch.tensor([tokens, positions], device=self._device)
        cos, sin = self._network.turns(packed[1])
        x = self._network.embed(packed[0])
        for layer in _layers(self._network):
            q, k, v = by_tiles(layer.enter, x, cos, sin)
            mixed = _attention(layer).mix(q, k, v, blocks)
            (x,) = by_tiles(_alone(layer.leave), x, mixed)
        return x

    def _logits(self, hidden: torch.Tensor, works: Sequence[BlockWork]) -> torch.Tensor:
        """Return the logits of the slots that are asked for, [sum of K, Vd] float32 on the CPU."""
        wanted = []
        for i, work in enumerate(works):
            first = i * self._block_length + self.config.first_draft_slot
            wanted.append(hidden[first : first + work.draft_count])
        (logits,) = by_tiles(_alone(self._network.head), torch.cat(wanted))
        return softcapped(logits, self.config.final_softcap).cpu()


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows [first, first + count) of a pack: one slot's block, at positions from `start` on."""

    slot: int
    start: int
    first: int
    count: int


class BlockAttention(nn.Module):
    """Attention of one layer: every block to its own slot's context and to itself."""

    def __init__(self, cache: KVCache, sliding_window: int | None, causal: bool) -> None:
        """Attend to `cache`.

        Args:
            cache: with room for a block after the longest context.
            sliding_window: newest context positions that a block sees; None: all.
            causal: whether a slot sees no later slot of its block.
        """
        super().__init__()
        self.cache = cache
        self.sliding_window = sliding_window
        self.causal = causal

    def mix(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[Block]
    ) -> torch.Tensor:
        """Return the mixed values [N, n_heads, D] of q, like it.

        The blocks' keys and values stand in the cache from the end of context on, until the next
        context rows, or the next block, are written over them.

        Args:
            q: [N, n_heads, D], rotated and not scaled.
            k: [N, n_kv_heads, D], rotated.
            v: like k.
            blocks: where which rows stand; together all N of them.
        """
        mixed = []
        for block in blocks:
            rows = slice(block.first, block.first + block.count)
            self.cache.write(block.slot, block.start, k[rows], v[rows])
            mixed.append(self._mix(q[rows], block))
        return torch.cat(mixed)

    def _mix(self, q: torch.Tensor, block: Block) -> torch.Tensor:
        """Return [B, n_heads, D] of one block: matmul, softmax, matmul."""
        first, seen = self._reachable(block)
        k, v = self.cache.read(block.slot, padded_length(block.start + block.count))
        k, v = k[:, first:], v[:, first:]
        n_kv_heads, length, width = k.shape
        rows, n_heads, _ = q.shape
        # Heads that share K/V stack into the rows of one product: [n_kv_heads, share * B, D].
        share = n_heads // n_kv_heads
        stacked = q.view(rows, n_kv_heads, share, width).permute(1, 2, 0, 3)
        stacked = stacked.reshape(n_kv_heads, share * rows, width) * width**-0.5
        scores = torch.bmm(stacked, k.transpose(1, 2)).float()
        scores = scores.view(n_kv_heads, share, rows, length)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1).to(v.dtype)
        mixed = torch.bmm(weights.view(n_kv_heads, share * rows, length), v)
        mixed = mixed.view(n_kv_heads, share, rows, width).permute(2, 0, 1, 3)
        return mixed.reshape(rows, n_heads, width)

    def _reachable(self, block: Block) -> tuple[int, torch.Tensor]:
        """Return where the slice of the cache starts, and [B, slice] bool: what each slot sees.

        NOTE: a window is measured from the end of context, alike for every slot (D7). Code that
        measures it from each slot hides up to B of its oldest positions from the later slots.
        """
        oldest = 0 if self.sliding_window is None else max(0, block.start - self.sliding_window)
        first = oldest // ATTENTION_BLOCK * ATTENTION_BLOCK
        # No later block sees them either; a masked position must hold a finite value.
        self.cache.clear(block.slot, first, oldest)
        device = self.cache.k.device
        keys = torch.arange(first, padded_length(block.start + block.count), device=device)
        last = torch.full((block.count,), block.start + block.count - 1, device=device)
        if self.causal:
            last = torch.arange(block.start, block.start + block.count, device=device)
        return first, (keys >= oldest) & (keys <= last[:, None])


def build_network(
    config: DFlashConfig,
    *,
    block_length: int,
    max_context_length: int,
    slot_count: int,
    dtype: torch.dtype,
    device: torch.device,
) -> DFlashNetwork:
    """Build a network with unset weights over caches: what a TorchBlockDraft is made of."""
    end = max_context_length + block_length
    attentions = [
        BlockAttention(
            KVCache(
                slot_count=slot_count,
                n_kv_heads=config.n_kv_heads,
                max_context_length=end,
                head_dim=config.head_dim,
                dtype=dtype,
                device=device,
            ),
            window,
            causal,
        )
        for window, causal in zip(config.sliding_windows, config.causal, strict=True)
    ]
    network = DFlashNetwork(config, attentions=attentions, max_position=end)
    make_row_invariant(network)
    network.to(device=device, dtype=dtype)
    network.fusion.to(dtype=torch.float32)
    return network.eval().requires_grad_(False)


def _alone(compute: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """Return `compute` with its one result in a list, as `by_tiles` takes it."""
    return lambda *tile: [compute(*tile)]


def _layers(network: DFlashNetwork) -> list[DFlashLayer]:
    return list(network.layers)  # type: ignore[arg-type]


def _attention(layer: DFlashLayer) -> BlockAttention:
    attention = layer.self_attn.attention
    assert isinstance(attention, BlockAttention), attention
    return attention
