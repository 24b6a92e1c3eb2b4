"""Attention of many blocks of a row to the context before each and to themselves.

All blocks of a row share its context, so their scores are one product. A mask of whole rows over
context and all blocks, as fused attention would take it, has blocks see blocks only to hide them.
"""

from __future__ import annotations

import torch


class BlockAttention:
    """Softmax over the context's and the block's own scores together."""

    def __init__(self, *, compiled: bool) -> None:
        """Compile what stands between the products, or run it op by op."""
        self._weigh = torch.compile(_weigh, dynamic=False) if compiled else _weigh

    def __call__(
        self,
        q: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        block: tuple[torch.Tensor, torch.Tensor],
        unseen: torch.Tensor,
    ) -> torch.Tensor:
        """Return mixed values [R, A * B, n_heads * D] of A blocks of B slots a row.

        Args:
            q: [R, A * B, n_heads, D], rotated and not scaled.
            context: keys, rotated, and values [R, S, n_kv_heads, D].
            block: keys, rotated, and values [R, A * B, n_kv_heads, D].
            unseen: [R, A, S] bool, the context that a block does not see.
        """
        rows, slots, n_heads, width = q.shape
        blocks, length, n_kv_heads = unseen.shape[1], unseen.shape[2], context[0].shape[2]
        share, size = n_heads // n_kv_heads, slots // blocks
        # Heads that share K/V, and the slots of a block, stack into rows of one product.
        q = q.view(rows, blocks, size, n_kv_heads, share, width).permute(0, 3, 1, 4, 2, 5)
        q = q.reshape(rows, n_kv_heads, blocks, share * size, width) * width**-0.5
        k, v = (x.transpose(1, 2) for x in context)
        own_k, own_v = (
            x.view(rows, blocks, size, n_kv_heads, width).permute(0, 3, 1, 2, 4) for x in block
        )
        scores = (q.flatten(2, 3) @ k.transpose(2, 3)).view(*q.shape[:-1], length)
        weights, own = self._weigh(scores, q @ own_k.transpose(3, 4), unseen[:, None, :, None])
        mixed = (weights.flatten(2, 3) @ v).view(q.shape) + own @ own_v
        mixed = mixed.view(rows, n_kv_heads, blocks, share, size, width)
        return mixed.permute(0, 2, 4, 1, 3, 5).reshape(rows, slots, n_heads * width)


def _weigh(
    scores: torch.Tensor, own: torch.Tensor, unseen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of context [..., S] and block [..., B], together one softmax."""
    joined = torch.cat((scores.masked_fill(unseen, float("-inf")), own), dim=-1)
    weights = joined.float().softmax(dim=-1).to(scores.dtype)
    return weights[..., : scores.shape[-1]], weights[..., scores.shape[-1] :]
