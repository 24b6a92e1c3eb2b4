"""An EAGLE-3 draft in the form that lowers well, and its four methods.

    enter(tokens [N], features [N, H], positions [N]) -> q, k, v, and the residual [N, H] if normed
    attend(q [1, n_heads, D], k [N, n_kv_heads, D], v, start [1], mask [1, 1, C],
           k_cache, v_cache) -> mixed [1, n_heads * D]
    leave(mixed [M, n_heads * D], residual [M, H]) -> features [M, H]
    head(features [M, H]) -> logits [M, Vd]

Linears take the rows of many sessions at once. Attention is one session's: K/V of all its rows are
written in place, [n_kv_heads, C, 1, D], and only the last row asks, as no other feature is used.
The fusion of raw rows is no part of it: the torch module is the verifier's, bit for bit.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.export import ExportedProgram

from graph_runtime.eagle3.config import Eagle3Config
from graph_runtime.eagle3.network import Eagle3Network
from graph_runtime.programs.metadata import Eagle3Metadata
from graph_runtime.programs.network import InPlaceAttention, prepare_ends, prepare_layer
from graph_runtime.programs.tracing import DraftHead, trace_methods


class Enter(nn.Module):
    """The `enter` method."""

    def __init__(self, network: Eagle3Network) -> None:
        """Wrap a prepared network."""
        super().__init__()
        self.network = network

    def forward(
        self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return q, k, v and the residual, unless it is the features themselves."""
        q, k, v, residual = self.network.enter(tokens, features, positions)
        return (q, k, v) if residual is features else (q, k, v, residual)


class Attend(nn.Module):
    """The `attend` method: of the last row alone, so that its products always have one shape."""

    def __init__(self, attention: InPlaceAttention) -> None:
        """Wrap the network's attention."""
        super().__init__()
        self.attention = attention

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        start: torch.Tensor,
        mask: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Return the mixed values [1, n_heads * D] of the last row; write the caches."""
        first = cast(int, start.item())
        capacity = k_cache.shape[1]
        torch._check(first >= 0)
        torch._check(first + k.shape[0] <= capacity)
        torch._check(first < capacity)
        self.attention.bind(first, mask, k_cache, v_cache)
        return self.attention(q, k, v, start, None)


class Leave(nn.Module):
    """The `leave` method."""

    def __init__(self, network: Eagle3Network) -> None:
        """Wrap a prepared network."""
        super().__init__()
        self.network = network

    def forward(self, mixed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the recurrent features [M, H]."""
        return self.network.leave(mixed, residual)


def prepare_draft(network: Eagle3Network, precision: str) -> None:
    """Replace the parts of a loaded float32 `network`, in place, with those that lower well.

    Raises:
        UserError: a weight does not fit `precision`; names the tensor.
    """
    prepare_layer(network.layer, network.config.head_dim, precision, "layer")
    prepare_ends(network, precision)


def trace_draft(network: Eagle3Network, metadata: Eagle3Metadata) -> dict[str, ExportedProgram]:
    """Return the four methods of a prepared network, traced at their largest."""
    config: Eagle3Config = network.config
    attention = cast(InPlaceAttention, network.layer.self_attn.attention)
    n, m, capacity = metadata.max_enter_rows, metadata.max_leave_rows, metadata.max_capacity
    key = torch.zeros(n, config.n_kv_heads, config.head_dim)
    cache = torch.zeros(config.n_kv_heads, capacity, 1, config.head_dim)
    features = torch.zeros(m, config.hidden_size)
    methods: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
        "enter": (
            Enter(network),
            (
                torch.zeros(n, dtype=torch.int64),
                torch.zeros(n, config.hidden_size),
                torch.arange(n),
            ),
        ),
        "attend": (
            Attend(attention),
            (
                torch.zeros(1, config.n_heads, config.head_dim),
                key,
                key.clone(),
                torch.zeros(1, dtype=torch.int64),
                torch.zeros(1, 1, capacity),
                cache,
                cache.clone(),
            ),
        ),
        "leave": (
            Leave(network),
            (torch.zeros(m, config.n_heads * config.head_dim), features),
        ),
        "head": (DraftHead(network), (features,)),
    }
    return trace_methods(methods)
