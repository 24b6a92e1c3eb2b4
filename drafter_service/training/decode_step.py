"""Attention of one decode step for rows that all stand at the same position.

The position is a tensor on the device, so one captured step serves 64 positions.
"""

from __future__ import annotations

import torch
from torch import nn

from drafter_service.training.target import TrainingTarget
from graph_runtime.kv_cache import padded_length


class StepContext:
    """Where the step stands; the attention modules of all layers read it."""

    def __init__(self, device: torch.device) -> None:
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        """[1] int64: of every row's newest token."""
        self.length = 0
        """Cache positions that a step reads."""
        self._masks: dict[int | None, torch.Tensor] = {}

    def set(self, length: int) -> torch.Tensor:
        """Start a step that reads `length` cache positions; return the position tensor."""
        self.length = length
        self._masks.clear()
        return self.position

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return [length] of 0, or -inf where a row does not attend."""
        if window not in self._masks:
            distance = self.position - torch.arange(self.length, device=self.position.device)
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
            mask = torch.zeros(self.length, dtype=dtype, device=seen.device)
            self._masks[window] = mask.masked_fill_(~seen, float("-inf"))
        return self._masks[window]


class StepAttention(nn.Module):
    """Attention of one layer over the K/V of B rows, one new token each."""

    def __init__(
        self,
        context: StepContext,
        target: TrainingTarget,
        sliding_window: int | None,
        *,
        rows: int,
        length: int,
    ) -> None:
        """Allocate K and V [rows, n_kv_heads, S, D], S being `length` in whole blocks of 64."""
        super().__init__()
        self.context = context
        self.sliding_window = sliding_window
        shape = (rows, target.config.n_kv_heads, padded_length(length), target.config.head_dim)
        # Zeros: what lies beyond the position must be finite, its weight of 0 does the rest.
        self.k_cache = torch.zeros(shape, dtype=target.dtype, device=target.device)
        self.v_cache = torch.zeros_like(self.k_cache)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,  # noqa: ARG002 - all stand at the context's position
        slot: torch.Tensor | None,  # noqa: ARG002 - a row's slot is its index
    ) -> torch.Tensor:
        """Write k and v [B, n_kv_heads, D], return the mixed values [B, n_heads, D]."""
        self.k_cache.index_copy_(2, self.context.position, k[:, :, None])
        self.v_cache.index_copy_(2, self.context.position, v[:, :, None])
        keys, values = (x[:, :, : self.context.length] for x in (self.k_cache, self.v_cache))
        rows, heads, width = q.shape
        # Heads that share K/V are the rows of one product, so K/V is read once.
        grouped = q.view(rows, k.shape[1], -1, width) * width**-0.5
        scores = grouped @ keys.transpose(2, 3) + self.context.mask(self.sliding_window, q.dtype)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return (weights @ values).reshape(rows, heads, width)
