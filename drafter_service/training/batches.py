"""What the trainer and a method agree on: a batch of rows, and what a method computes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class Batch:
    """R rows of S tokens of the target's own text, on the training device."""

    tokens: torch.Tensor
    """[R, S] int64; every row begins at position 0 and has no padding."""
    roles: torch.Tensor
    """[R, S] uint8; 1: a token that the target chose in an assistant turn."""
    features: torch.Tensor
    """[R, S, T, H] in the compute dtype: tap outputs, each divided by its tap's median RMS."""
    final: torch.Tensor
    """[R, S, H] in the compute dtype: what the target's head takes; `final[:, p]` decides p + 1."""
    likeliest: torch.Tensor
    """[R, S] int64: argmax of the target's logits of `final[:, p]`: its greedy choice of p + 1."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What one step of a method gave."""

    total: torch.Tensor
    """Scalar float32, to be differentiated."""
    correct: torch.Tensor
    """[D] float32: weight of positions whose argmax is the teacher's, per depth or slot."""
    cross_entropy: torch.Tensor
    """[D] float32: weighted sum of the cross-entropy, per depth or slot."""
    weight: torch.Tensor
    """[D] float32: sum of weights, per depth or slot."""


class Recipe(Protocol):
    """One method's trainable network, its loss and its checkpoint.

    `loss` runs inside a captured CUDA graph: fixed shapes, no host synchronisation, randomness from
    the device's default generator only.
    """

    method: str
    """"eagle3" or "dflash"."""
    tap_layers: tuple[int, ...]
    parameters: dict[str, torch.Tensor]
    """float32 leaves on the training device, by the names of the published layout."""
    facts: dict[str, Any]
    """What run.json and the model card tell of it, in JSON values: chosen sizes, coverage."""

    def loss(self, batch: Batch) -> Loss:
        """Return the loss of `batch` under `parameters`."""
        ...

    def accepted(self, parameters: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return [R, S] int64 on the CPU or device: see `walk.acceptance`.

        Entry [r, p] counts the leading draft tokens, at most 7, that equal the text when position p
        holds the pending token, drafted in a chain or block of the method's own as it is served.
        """
        ...

    def publish(
        self,
        folder: Path,
        parameters: Mapping[str, torch.Tensor],
        *,
        tap_rms: torch.Tensor,
        model_card: str,
    ) -> None:
        """Write a checkpoint in the method's public layout.

        Args:
            folder: made if missing.
            parameters: float32, by the names of `parameters`.
            tap_rms: [T] float32, what the features were divided by; folded into `fc.weight`.
            model_card: README.md of the folder.
        """
        ...
