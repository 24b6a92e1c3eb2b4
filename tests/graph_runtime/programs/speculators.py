"""Speculator programs of tiny models for tests, exported once into the shared cache."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from graph_runtime.eagle3.checkpoint import Eagle3Source

with warnings.catch_warnings(), contextlib.suppress(ModuleNotFoundError):
    warnings.simplefilter("ignore")  # the runtime says that it is experimental; tests fail for less
    import graph_runtime.programs  # noqa: F401

CONTEXT = 80
CHUNK = 40


def export(
    target: Path, draft: Path, cache: Path, *, embeddings: str = "auto", **arguments: Any
) -> Path:
    """Return the path of a speculator, exported where the cache lacks it."""
    from graph_runtime.programs.speculator_export import ensure_speculator

    settings = {
        "precision": "fp32",
        "draft_precision": "fp32",
        "chain": 3,
        "cache_dir": cache,
        "max_context_length": CONTEXT,
        "max_prefill_chunk": CHUNK,
    }
    return ensure_speculator(
        Eagle3Source(folder=draft, target=target, embeddings=embeddings),
        **{**settings, **arguments},
    )


def greedy(target: Path, prompt: list[int], count: int) -> list[int]:
    """Return the target's own greedy continuation, by `transformers` in fp32."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


class Recorded:
    """A method that notes the arguments and results of each call."""

    def __init__(self, method: Any) -> None:
        self._method = method
        self.inputs: list[list[torch.Tensor]] = []
        self.outputs: list[list[torch.Tensor]] = []

    def execute(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the method."""
        self.inputs.append([tensor.clone() for tensor in inputs])
        outputs = [tensor.clone() for tensor in self._method.execute(inputs)]
        self.outputs.append(outputs)
        return outputs


class Forced(Recorded):
    """`draft_decode`, whose proposals are replaced: the first `right` of a chain are the target's.

    The others are never its own token.
    """

    def __init__(self, method: Any, tokens: list[int], *, chain: int, right: Iterable[int]) -> None:
        """Know what the target says: `tokens` is the prompt and its whole continuation.

        Args:
            tokens: by position.
            chain: calls of a round.
            right: for each round how many of its proposals are right; the last one repeats.
        """
        super().__init__(method)
        self._tokens, self._chain, self._right = tokens, chain, list(right)

    def execute(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the method; change the last id."""
        turn, step = divmod(len(self.inputs), self._chain)
        outputs = super().execute(inputs)
        position = int(inputs[2][-1]) + 2  # slot p holds token p + 1 and speaks of p + 2
        truth = self._tokens[position] if position < len(self._tokens) else 0
        right = self._right[min(turn, len(self._right) - 1)]
        outputs[0][0, -1] = truth if step < right else (truth + 1) % 250
        return outputs
