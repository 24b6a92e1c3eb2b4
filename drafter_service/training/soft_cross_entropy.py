"""Cross-entropy of a draft to the target's whole softmax, through one frozen head.

Both sides' logits are V wide: at V = 49,152 and 7,168 rows each is 0.7 GB in bf16. The head is not
trained, so the gradient of a row's hidden state is `(softmax(draft) - softmax(target)) @ head`, and
is made while its logits are there: autograd would keep them all until the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MOST_ROWS = 2048
"""Rows whose logits are there at a time."""


class SoftCrossEntropy:
    """Callable of hidden rows; see `__call__`."""

    def __init__(self, *, compiled: bool) -> None:
        """Compile the passes over logits into few, or run them op by op."""
        self._compare = torch.compile(_compare, dynamic=False) if compiled else _compare

    def __call__(
        self,
        hidden: torch.Tensor,
        final: torch.Tensor,
        head: torch.Tensor,
        likeliest: torch.Tensor,
        weight: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the weighted sum, the cross-entropies [N], and where the argmax is right [N] bool.

        Only the sum, float32 like the cross-entropies, has a gradient, and only that of `hidden`.

        Args:
            hidden: [N, H] of the draft, in the dtype of `head`.
            final: [N, H] of the target, likewise.
            head: [V, H].
            likeliest: [N] int64, what the draft's argmax has to be.
            weight: [N] float32.
        """
        total, entropy, hit = _WeightedSum.apply(
            hidden, final, head, likeliest, weight, self._compare
        )
        return total, entropy, hit


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        final: torch.Tensor,
        head: torch.Tensor,
        likeliest: torch.Tensor,
        weight: torch.Tensor,
        compare: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = -(-len(hidden) // MOST_ROWS)
        results = []
        columns = (x.chunk(parts) for x in (hidden, final, likeliest, weight))
        for draft, target, best, share in zip(*columns, strict=True):
            entropy, hit, gradient = compare(draft @ head.t(), target @ head.t(), best, share)
            results.append((entropy, hit, gradient @ head))
        entropy, hit, gradient = (torch.cat(column) for column in zip(*results, strict=True))
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(entropy, hit)
        return (weight * entropy).sum(), entropy, hit

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None, None, None, None


def _compare(
    draft: torch.Tensor, target: torch.Tensor, likeliest: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return cross-entropies [N] float32, agreement [N] bool, and the gradient of `draft` [N, V].

    Args:
        draft: logits [N, V].
        target: likewise.
        likeliest: [N] int64.
        weight: [N] float32, of each row in the sum that is differentiated.
    """
    log_draft = draft.float().log_softmax(dim=-1)
    probability = target.float().softmax(dim=-1)
    entropy = -(probability * log_draft).sum(dim=-1)
    hit = draft.argmax(dim=-1) == likeliest
    gradient = (log_draft.exp() - probability) * weight[:, None]
    return entropy, hit, gradient.to(draft.dtype)
