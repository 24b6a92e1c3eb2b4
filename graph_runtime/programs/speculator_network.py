"""The three methods of a speculator program: a target and its EAGLE-3 draft with their own K/V.

    prefill(tokens [1, T], pos [T]) -> token [1, 1], feature [1, T, H]
    target_verify(tokens [1, K + 1], pos [K + 1]) -> ids [1, K + 1], feature [1, K + 1, H]
    draft_decode(tokens [1, T], feature [1, T, H], pos [T]) -> ids [1, T], g [1, T, H]

Tokens and ids are int64 ids of the target, positions int64 and consecutive, features float32: fused
rows out of the first two methods, the draft's recurrent feature out of the third. An id is the
greedy choice for the position after its row's, the lowest of equals.

K/V caches are buffers that the methods share. `prefill` begins the session: it clears all of them
first, so that nothing of the session before, however broken, shows through a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from graph_runtime.decoder import Decoder, RMSNorm
from graph_runtime.eagle3.network import Eagle3Network, Fusion
from graph_runtime.programs.network import InPlaceAttention, LinearNorm, write_cache
from graph_runtime.programs.slot_cache import MASKED


class Caches(nn.Module):
    """K/V of some layers, which attend under masks that are made from positions."""

    def __init__(
        self,
        attentions: Sequence[InPlaceAttention],
        windows: Sequence[int | None],
        capacity: int,
    ) -> None:
        """Build caches [n_kv_heads, capacity, 1, D] for each of `attentions`.

        Args:
            attentions: of layers of one shape; bound before each trace.
            windows: the sliding window of each; None is none.
            capacity: positions, a multiple of 64.
        """
        super().__init__()
        self.windows = tuple(windows)
        self.group, heads, width = _shape(attentions[0])
        blank = torch.zeros(heads, capacity, 1, width)
        for i in range(len(attentions)):
            self.register_buffer(f"k_{i}", torch.zeros_like(blank))
            self.register_buffer(f"v_{i}", torch.zeros_like(blank))
        self.register_buffer("blank", blank)
        columns = torch.arange(capacity)[None]
        self.register_buffer("columns", columns)
        for window in {window for window in self.windows if window is not None}:
            # Where a row lies from which on the column is out of its window. A buffer, because
            # kernels take no number in place of a tensor.
            self.register_buffer(f"columns_{window}", columns + window)
        self.register_buffer("masked", torch.tensor([MASKED]))
        self.register_buffer("seen", torch.zeros(1))

    def bind(
        self, attentions: Sequence[InPlaceAttention], positions: torch.Tensor, *, clear: bool
    ) -> None:
        """Let `attentions` write and attend at `positions` [T]; forget what was written first."""
        columns = self.get_buffer("columns")
        start = cast(int, positions[0].item())
        torch._check(start >= 0)
        torch._check(start + positions.shape[0] <= columns.shape[1])
        torch._check(start < columns.shape[1])
        masks = {window: self._mask(positions, window) for window in dict.fromkeys(self.windows)}
        for attention, window, caches in zip(
            attentions, self.windows, self.tensors(clear=clear), strict=True
        ):
            attention.bind(start, masks[window], *caches)

    def tensors(self, *, clear: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return K and V of each layer, cleared first where that is asked for."""
        pairs = [
            (self.get_buffer(f"k_{i}"), self.get_buffer(f"v_{i}")) for i in range(len(self.windows))
        ]
        if not clear:
            return pairs
        blank = self.get_buffer("blank")
        return [(write_cache(blank, k, 0), write_cache(blank, v, 0)) for k, v in pairs]

    def _mask(self, positions: torch.Tensor, window: int | None) -> torch.Tensor:
        """Return [1, group * T, C], as `InPlaceAttention.bind` takes it."""
        columns, rows = self.get_buffer("columns"), positions.view(-1, 1)
        hidden = columns > rows
        if window is not None:
            hidden = torch.logical_or(hidden, self.get_buffer(f"columns_{window}") <= rows)
        mask = torch.where(hidden, self.get_buffer("masked"), self.get_buffer("seen"))
        return torch.cat([mask] * self.group).view(1, -1, columns.shape[1])


class _TargetMethod(nn.Module):
    """What prefill and verify have in common."""

    def __init__(self, decoder: Decoder, target_caches: Caches, fusion: Fusion) -> None:
        """Wrap prepared parts; methods that name them alike share their buffers."""
        super().__init__()
        self.decoder, self.target_caches, self.fusion = decoder, target_caches, fusion
        self.attentions = attentions_of(decoder)

    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, *, clear: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last layer's output [T, H] and features [1, T, H]."""
        self.target_caches.bind(self.attentions, positions, clear=clear)
        hidden, rows = self.decoder.hidden(tokens.view(-1), positions)
        features = self.fusion.fuse(rows)
        return hidden, features.view(1, -1, features.shape[-1])


class Prefill(_TargetMethod):
    """The `prefill` method: logits of the last row alone."""

    def __init__(
        self, decoder: Decoder, target_caches: Caches, fusion: Fusion, draft_caches: Caches
    ) -> None:
        """Wrap prepared parts."""
        super().__init__(decoder, target_caches, fusion)
        self.draft_caches = draft_caches

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token [1, 1] and features [1, T, H]; begin a session."""
        self.draft_caches.tensors(clear=True)
        hidden, features = self.run(tokens, positions, clear=True)
        last = hidden[-1:]
        # Twice: products with one row take other kernels, with other bits (law L4).
        logits = self.decoder.head(torch.cat([last, last]))
        return torch.argmax(logits, dim=-1)[0].view(1, 1), features


class TargetVerify(_TargetMethod):
    """The `target_verify` method."""

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids [1, T] and features [1, T, H]."""
        hidden, features = self.run(tokens, positions, clear=False)
        return torch.argmax(self.decoder.head(hidden), dim=-1).view(1, -1), features


class DraftDecode(nn.Module):
    """The `draft_decode` method."""

    def __init__(
        self, network: Eagle3Network, draft_caches: Caches, target_ids: torch.Tensor | None
    ) -> None:
        """Wrap a prepared network; `target_ids` [Vd] int64, None: draft ids are target ids."""
        super().__init__()
        self.network, self.draft_caches = network, draft_caches
        self.register_buffer("target_ids", target_ids)
        self.attentions = attentions_of(network)

    def forward(
        self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids [1, T] of the target's vocabulary and recurrent features [1, T, H]."""
        self.draft_caches.bind(self.attentions, positions, clear=False)
        width = features.shape[-1]
        hidden = self.network(tokens.view(-1), features.view(-1, width), positions)
        ids = torch.argmax(self.network.head(hidden), dim=-1)
        if self.target_ids is not None:
            ids = self.get_buffer("target_ids")[ids]
        return ids.view(1, -1), hidden.view(1, -1, width)


def prepare_fusion(fusion: Fusion) -> None:
    """Replace the norms of a loaded `fusion`, in place; it stays in float32."""
    for name, module in list(fusion.named_modules()):
        if isinstance(module, RMSNorm):
            parent, _, attribute = name.rpartition(".")
            setattr(fusion.get_submodule(parent), attribute, LinearNorm(module))


def attentions_of(network: nn.Module) -> list[InPlaceAttention]:
    """Return the attention modules of a network, in the order of its layers."""
    return [module for module in network.modules() if isinstance(module, InPlaceAttention)]


def _shape(attention: InPlaceAttention) -> tuple[int, int, int]:
    return attention.group, attention.n_kv_heads, attention.head_dim
