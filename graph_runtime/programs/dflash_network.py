"""A DFlash draft in the form that lowers well, and its three methods.

    context(features [N, H], positions [N]) -> k of every layer, then v: [N, n_kv_heads, D] each
    block(tokens [B], positions [B], masks, k_caches, v_caches) -> hidden [B, H]
    head(hidden [M, H]) -> logits [M, Vd]

`context` takes the rows of many sessions at once; their keys and values are the caller's to put
into the caches, [n_kv_heads, C, 1, D] a layer. A block is one session's: its own keys and values
are written in place from its first position on, and stay only until what commits, or the next
block, is written over them. `masks` has one a `distinct_masks`. The fusion of raw rows is no part
of it: the torch module is the verifier's, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torch.export import ExportedProgram

from graph_runtime.dflash.config import DFlashConfig
from graph_runtime.dflash.network import DFlashNetwork
from graph_runtime.programs.metadata import DFlashMetadata
from graph_runtime.programs.network import InPlaceAttention, prepare_ends, prepare_layer
from graph_runtime.programs.tracing import DraftHead, trace_methods


class Context(nn.Module):
    """The `context` method."""

    def __init__(self, network: DFlashNetwork) -> None:
        """Wrap a prepared network."""
        super().__init__()
        self.network = network

    def forward(self, features: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return k of every layer, then v of every layer."""
        keys, values = zip(*self.network.context(features, positions), strict=True)
        return (*keys, *values)


class Block(nn.Module):
    """The `block` method."""

    def __init__(self, network: DFlashNetwork) -> None:
        """Wrap a prepared network."""
        super().__init__()
        self.network = network
        masks = distinct_masks(network.config)
        self.mask_of_layer = [masks.index(mask) for mask in _masks_of_layers(network.config)]
        self.attentions = [m for m in network.modules() if isinstance(m, InPlaceAttention)]

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        masks: list[torch.Tensor],
        k_caches: list[torch.Tensor],
        v_caches: list[torch.Tensor],
    ) -> torch.Tensor:
        """Return the last layer's output [B, H]; write the caches."""
        start = cast(int, positions[0].item())
        capacity = k_caches[0].shape[1]
        torch._check(start >= 0)
        torch._check(start + tokens.shape[0] <= capacity)
        torch._check(start < capacity)
        for i, attention in enumerate(self.attentions):
            attention.bind(start, masks[self.mask_of_layer[i]], k_caches[i], v_caches[i])
        return self.network.block(tokens, positions)


def distinct_masks(config: DFlashConfig) -> tuple[tuple[int | None, bool], ...]:
    """Return (window, causal) of the masks that the layers take, without repeats."""
    return tuple(dict.fromkeys(_masks_of_layers(config)))


def _masks_of_layers(config: DFlashConfig) -> list[tuple[int | None, bool]]:
    return list(zip(config.sliding_windows, config.causal, strict=True))


def prepare_draft(network: DFlashNetwork, precision: str) -> None:
    """Replace the parts of a loaded float32 `network`, in place, with those that lower well.

    Raises:
        UserError: a weight does not fit `precision`; names the tensor.
    """
    for index, layer in enumerate(network.layers):
        prepare_layer(layer, network.config.head_dim, precision, f"layers.{index}")
    # In the table the scale costs nothing, and kernels take no number in place of a tensor.
    network.embed_tokens.weight.mul_(network.config.embedding_scale)
    network.config = replace(network.config, embedding_scale=1.0)
    prepare_ends(network, precision)


def trace_draft(network: DFlashNetwork, metadata: DFlashMetadata) -> dict[str, ExportedProgram]:
    """Return the three methods of a prepared network, traced at their largest."""
    block, rows, capacity = metadata.block_length, metadata.max_context_rows, metadata.max_capacity
    hidden, width = metadata.hidden_size, metadata.head_dim
    seen_by_all = torch.zeros(1, 1, capacity)
    group = metadata.n_heads // metadata.n_kv_heads
    cache = torch.zeros(metadata.n_kv_heads, capacity, 1, width)
    block_inputs = (
        torch.zeros(block, dtype=torch.int64),
        torch.arange(block),
        [
            torch.zeros(1, group * block, capacity) if causal else seen_by_all.clone()
            for causal in metadata.mask_causal
        ],
        [cache.clone() for _ in range(metadata.n_layers)],
        [cache.clone() for _ in range(metadata.n_layers)],
    )
    return trace_methods(
        {
            "context": (Context(network), (torch.zeros(rows, hidden), torch.arange(rows))),
            "block": (Block(network), block_inputs),
            "head": (DraftHead(network), (torch.zeros(metadata.max_head_rows, hidden),)),
        }
    )
