"""Attention of draft chains, for training EAGLE-3 with its own features fed back.

Chain i begins at slot i; its slot of depth d stands at position i + d. There it sees the slots
0 .. i of depth 0, which hold the target's features, and its own chain's slots of depths 1 .. d: one
key a depth. So the scores are a causal square, whatever the depth, and d columns beside it.

A flash kernel does the square and tells the log-sum-exp of its scores, with which the columns are
added by hand. Backward, the square's kernel is handed the output and the log-sum-exp of *all*
scores: it computes softmax(all)[square] from them, and so exactly the square's part of every
gradient. (As sequence parallelism merges flash attention's parts: arXiv:2310.01889.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Square = tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]


def chain_attention(
    q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the mixed values [R, heads, M, D] of the slots of depth d in M chains a row.

    Args:
        q: [R, heads, M, D], rotated and not scaled.
        keys: d + 1 of the same shape, those of each depth, rotated; the last one is q's own.
        values: likewise.
    """
    assert len(keys) == len(values) >= 1, (len(keys), len(values))
    mixed: torch.Tensor = _ChainAttention.apply(q, *keys, *values)
    return mixed


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, *keys_values: torch.Tensor) -> torch.Tensor:
        depths = len(keys_values) // 2
        keys, values = keys_values[:depths], keys_values[depths:]
        scale = q.shape[-1] ** -0.5
        out, total, rest = _square(q, keys[0], values[0], scale)
        shares = q.new_empty(0)
        if depths > 1:
            scores = torch.stack([_dot(q, key) for key in keys[1:]]) * scale
            square = total
            total = torch.logsumexp(torch.cat((square[None].to(scores), scores)), dim=0)
            shares = torch.exp(scores - total)  # [d, R, heads, M]
            mixed = out * torch.exp(square - total)[..., None]
            for share, value in zip(shares, values[1:], strict=True):
                mixed = mixed + share[..., None] * value
            out = mixed.to(q.dtype)
        ctx.save_for_backward(q, *keys_values, out, total, shares)
        ctx.rest, ctx.scale = rest, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, *keys_values, out, total, shares = ctx.saved_tensors
        depths = len(keys_values) // 2
        keys, values = keys_values[:depths], keys_values[depths:]
        (gradient,) = gradients
        gradient = gradient.contiguous()
        of_q, of_key, of_value = _square_backward(
            gradient, q, keys[0], values[0], out, total, ctx.rest, ctx.scale
        )
        of_keys, of_values = [of_key], [of_value]
        if depths > 1:
            mean = _dot(gradient, out)
            added = of_q.to(shares.dtype)
            for share, key, value in zip(shares, keys[1:], values[1:], strict=True):
                of_score = (share * (_dot(gradient, value) - mean) * ctx.scale)[..., None]
                added = added + of_score * key
                of_keys.append((of_score * q).to(key.dtype))
                of_values.append((share[..., None] * gradient).to(value.dtype))
            of_q = added.to(q.dtype)
        return of_q, *of_keys, *of_values


def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the products' sums over the last dimension, in float32 at least."""
    wide = torch.promote_types(left.dtype, torch.float32)
    return (left.to(wide) * right.to(wide)).sum(-1)


def _square(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Square:
    """Return causal attention, the log-sum-exp [R, heads, M], and what backward wants besides."""
    if q.is_cuda:
        out, total, *rest = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, False, scale=scale
        )
        # Sequence lengths, longest lengths, and the two halves of the random state.
        return out, total, tuple(rest[:6])
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, True, scale=scale
    )
    return out, total, ()


def _square_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    rest: tuple[Any, ...],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v through the square's share of `out`."""
    if q.is_cuda:
        lengths, random_state = rest[:4], rest[4:]
        of_q, of_k, of_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, total, *lengths, 0.0, True, *random_state, scale=scale
        )
    else:
        of_q, of_k, of_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, total, 0.0, True, scale=scale
        )
    return of_q, of_k, of_v
