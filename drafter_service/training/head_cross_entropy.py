"""Cross-entropy of a trained head's logits to the teacher's probabilities.

Logits of a step are [8,112, 13,312] four times over, so passes over them are what it costs. One
pass makes the loss and `softmax(logits) - teacher`, the gradient but for each row's share. The
share waits until backward and multiplies the hidden rows instead, which are twenty times narrower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Compare = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class HeadCrossEntropy:
    """Callable of hidden rows and a head; see `__call__`."""

    def __init__(self, *, compiled: bool) -> None:
        """Compile the passes over logits into few, or run them op by op."""
        self._compare: Compare = torch.compile(_compare, dynamic=False) if compiled else _compare
        self._soften = torch.compile(_soften, dynamic=False) if compiled else _soften

    def __call__(
        self, hidden: torch.Tensor, head: torch.Tensor, teacher: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cross-entropies [R, M] float32 and the argmax [R, M] int64 of the logits.

        Args:
            hidden: [R, M, H] in the compute dtype; gets a gradient.
            head: [Vd, H] likewise.
            teacher: [R, M, Vd] probabilities; may be a view.
        """
        entropy, argmax = _CrossEntropy.apply(hidden, head, teacher, self._compare)
        return entropy, argmax

    def teacher(self, logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the probabilities [..., Vd] in `dtype` of logits [..., Vd] float32."""
        return self._soften(logits, dtype)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        teacher: torch.Tensor,
        compare: Compare,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        entropy, argmax, difference = compare(hidden @ head.t(), teacher)
        ctx.save_for_backward(hidden, head, difference)
        ctx.mark_non_differentiable(argmax)
        return entropy, argmax

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, head, difference = ctx.saved_tensors
        share = gradients[0][..., None]
        of_hidden = ((difference @ head) * share).to(hidden.dtype)
        shared = (hidden * share).to(hidden.dtype).flatten(0, -2)
        of_head = difference.flatten(0, -2).t() @ shared
        return of_hidden, of_head, None, None


def _soften(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return logits.softmax(-1).to(dtype)


def _compare(
    logits: torch.Tensor, teacher: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return cross-entropies and argmax [...], and softmax(logits) - teacher [..., Vd]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_draft = logits.to(wide).log_softmax(-1)
    probability = teacher.to(wide)
    entropy = -(probability * log_draft).sum(-1)
    difference = (log_draft.exp() - probability).to(logits.dtype)
    return entropy, logits.argmax(-1), difference
