"""The decoder in the form that lowers well: what is handed into `Decoder`, and the two methods.

A program has two methods, so that logits are only computed for the rows that need them:

    step(tokens [N], positions [N], masks, k_caches, v_caches) -> hidden [N, H], rows [N, R]
    head(hidden [M, H]) -> logits [M, V]

The K/V caches are inputs that the step writes in place, [n_kv_heads, C, 1, D] with a capacity C of
its own for every call. So a session's cache is a plain tensor of the engine's, sessions share one
loaded program, and no copy is made between the two.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from graph_runtime.architecture import DecoderConfig
from graph_runtime.decoder import Decoder, LayerShape, RMSNorm, SelfAttention
from graph_runtime.programs.quantised import (
    GROUP,
    Embedding8,
    Linear4,
    Linear8,
    LinearQ41,
    recover_q4_1,
    symmetric_int4,
)
from splitspec.errors import UserError


@torch.library.custom_op("splitspec::write_cache", mutates_args=())
def write_cache(value: torch.Tensor, cache: torch.Tensor, start: int) -> torch.Tensor:
    """Return `cache` [heads, C, 1, D] with `value` [heads, N, 1, D] at positions from `start` on.

    Lowering makes it write `cache` itself; a value of its own is what tracing can follow.
    """
    written = cache.clone()
    written[:, start : start + value.shape[1]] = value
    return written


@write_cache.register_fake
def _(value: torch.Tensor, cache: torch.Tensor, start: int) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(cache)


class InPlaceAttention(nn.Module):
    """Write K/V into the caches, then attend with two matrix products and a softmax.

    NOTE: not `llama.custom_sdpa`, whose bits depend on how many rows a call has (law L4). Query
    heads that share a K/V head are rows of one product, so K/V is not repeated.
    """

    scale: torch.Tensor

    def __init__(self, config: LayerShape) -> None:
        """Build the attention of one layer; `bind` gives it its inputs before each trace."""
        super().__init__()
        self.n_kv_heads, self.head_dim = config.n_kv_heads, config.head_dim
        self.group = config.n_heads // config.n_kv_heads
        scale = torch.tensor([config.head_dim**-0.5])
        self.register_buffer("scale", scale, persistent=False)  # of no checkpoint

    def bind(
        self, start: int, mask: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> None:
        """Set what a step's inputs are for this layer.

        Args:
            start: position of the first row.
            mask: [1, group * N or 1, C] float32, 0, or large and negative where masked.
            k_cache: [n_kv_heads, C, 1, D] float32, written at [start, start + N).
            v_cache: like k_cache.
        """
        self.start, self.mask, self.k_cache, self.v_cache = start, mask, k_cache, v_cache

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,  # noqa: ARG002 - in `start` and `mask`
        slot: torch.Tensor | None,  # noqa: ARG002 - the caches are one slot's
    ) -> torch.Tensor:
        """Return [N, n_heads * D] of q [N, n_heads, D], k and v [N, n_kv_heads, D]."""
        heads, width = self.n_kv_heads, self.head_dim
        # permute_copy and views with -1, because those lower into the delegate with N unknown.
        permute = torch.ops.aten.permute_copy
        k, v = permute(k, [1, 0, 2]), permute(v, [1, 0, 2])
        k_cache = write_cache(k.view(heads, -1, 1, width), self.k_cache, self.start)
        v_cache = write_cache(v.view(heads, -1, 1, width), self.v_cache, self.start)
        q = permute((q * self.scale).view(-1, heads, self.group, width), [1, 2, 0, 3])
        keys = permute(k_cache.view(heads, -1, width), [0, 2, 1])
        scores = torch.bmm(q.view(heads, -1, width), keys) + self.mask
        mixed = torch.bmm(torch.softmax(scores, dim=-1), v_cache.view(heads, -1, width))
        mixed = permute(mixed.view(heads, self.group, -1, width), [2, 0, 1, 3])
        return mixed.view(-1, heads * self.group * width)


class LinearNorm(nn.Module):
    """RMSNorm whose mean is a product with 1/H, because a mean over rows is not in the delegate."""

    weight: torch.Tensor
    mean: torch.Tensor
    eps: torch.Tensor

    def __init__(self, norm: RMSNorm) -> None:
        """Take over the weight and epsilon of `norm`."""
        super().__init__()
        width = len(norm.weight)
        self.register_buffer("weight", norm.weight.detach().clone())
        self.register_buffer("mean", torch.full((1, width), 1.0 / width))
        self.register_buffer("eps", torch.tensor([norm.eps]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., H] float32, normed."""
        return self.weight * (x * torch.rsqrt(F.linear(x * x, self.mean) + self.eps))


class HalfTurn(nn.Module):
    """RoPE with the swap of halves as an exact product with a signed permutation.

    A slice of a tensor of unknown length does not lower into the delegate; a linear does.
    """

    swap: torch.Tensor

    def __init__(self, head_dim: int) -> None:
        """Build the permutation [D, D]."""
        super().__init__()
        half = head_dim // 2
        swap = torch.zeros(head_dim, head_dim)
        swap[:half, half:] = -torch.eye(half)
        swap[half:, :half] = torch.eye(half)
        self.register_buffer("swap", swap)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Apply RoPE to x [N, heads, D] with tables [N, 1, D]."""
        return x * cos + F.linear(x, self.swap) * sin


class Step(nn.Module):
    """The `step` method."""

    def __init__(self, decoder: Decoder, config: DecoderConfig) -> None:
        """Wrap a prepared decoder."""
        super().__init__()
        self.decoder = decoder
        windows = distinct_windows(config)
        self.mask_of_layer = [windows.index(window) for window in config.sliding_windows]
        self.attentions = [m for m in decoder.modules() if isinstance(m, InPlaceAttention)]

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        masks: list[torch.Tensor],
        k_caches: list[torch.Tensor],
        v_caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last layer's output [N, H] and rows [N, row width]; write the caches."""
        start = cast(int, positions[0].item())
        capacity = k_caches[0].shape[1]
        torch._check(start >= 0)
        torch._check(start + tokens.shape[0] <= capacity)
        torch._check(start < capacity)
        for i, attention in enumerate(self.attentions):
            attention.bind(start, masks[self.mask_of_layer[i]], k_caches[i], v_caches[i])
        return self.decoder.hidden(tokens, positions)


class Head(nn.Module):
    """The `head` method."""

    def __init__(self, decoder: Decoder) -> None:
        """Wrap a prepared decoder."""
        super().__init__()
        self.norm, self.lm_head = decoder.norm, decoder.lm_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [M, V] of the last layer's output [M, H]."""
        return self.lm_head(self.norm(hidden))


def distinct_windows(config: DecoderConfig) -> tuple[int | None, ...]:
    """Return the sliding windows that layers have, without repeats: one mask each."""
    return tuple(dict.fromkeys(config.sliding_windows))


def prepare(decoder: Decoder, config: DecoderConfig, precision: str) -> None:
    """Replace the parts of a loaded float32 `decoder`, in place, with those that lower well.

    Raises:
        UserError: a weight does not fit `precision`; names the tensor.
    """
    for index, layer in enumerate(decoder.layers):
        prepare_layer(layer, config.head_dim, precision, f"model.layers.{index}")
    prepare_ends(decoder, precision)


def prepare_ends(network: nn.Module, precision: str) -> None:
    """Replace the embedding, the last norm and the head of a decoder or draft, in place."""
    network.norm = LinearNorm(cast(RMSNorm, network.norm))
    if precision != "fp32":
        embedding, head = cast(nn.Embedding, network.embed_tokens), cast(nn.Linear, network.lm_head)
        network.embed_tokens = Embedding8(embedding.weight.detach())
        network.lm_head = linear_8(head, "lm_head.weight")


def prepare_layer(layer: nn.Module, head_dim: int, precision: str, prefix: str) -> None:
    """Replace the linears, norms and rotations of one layer, in place.

    Args:
        layer: a loaded float32 layer of a decoder or of a draft.
        head_dim: D.
        precision: "fp32", "8da8w", "8da4w" or "q4_1".
        prefix: what the layer's tensors are called in a message.

    Raises:
        UserError: a weight does not fit `precision`; names the tensor.
    """
    make = {"fp32": None, "8da8w": linear_8, "8da4w": linear_4, "q4_1": _linear_q4_1}[precision]
    for name, module in list(layer.named_modules()):
        parent_name, _, attribute = name.rpartition(".")
        parent = layer.get_submodule(parent_name)
        if isinstance(module, nn.Linear) and make is not None:
            setattr(parent, attribute, make(module, f"{prefix}.{name}.weight"))
        elif isinstance(module, RMSNorm):
            setattr(parent, attribute, LinearNorm(module))
        elif isinstance(module, SelfAttention):
            module.rotate = HalfTurn(head_dim)


def linear_8(linear: nn.Linear, name: str) -> nn.Module:  # noqa: ARG001 - like the others
    """Return `linear` with int8 weights."""
    return Linear8(linear.weight.detach(), _bias(linear))


def linear_4(linear: nn.Linear, name: str) -> nn.Module:
    """Return `linear` with symmetric 4-bit weights.

    Raises:
        UserError: its width is not whole groups; `name` is the tensor's.
    """
    weight = _whole_groups(linear, name)
    return Linear4(*symmetric_int4(weight), _bias(linear))


def _linear_q4_1(linear: nn.Linear, name: str) -> nn.Module:
    weight = _whole_groups(linear, name)
    return LinearQ41(*recover_q4_1(weight, name), _bias(linear))


def _whole_groups(linear: nn.Linear, name: str) -> torch.Tensor:
    if linear.in_features % GROUP:
        raise UserError(
            f"4-bit precisions need input widths that are multiples of {GROUP}; "
            f"{name} has {linear.in_features}: try --precision 8da8w"
        )
    return linear.weight.detach()


def _bias(linear: nn.Linear) -> torch.Tensor | None:
    return None if linear.bias is None else linear.bias.detach().clone()
