"""One optimiser step: eager on a CPU, one captured CUDA graph on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drafter_service.training.batches import Recipe
from drafter_service.training.features import Features

BETAS = (0.9, 0.95)
MAX_NORM = 1.0
EMA_STEPS = 10
"""Steps between two updates of the average."""
EMA_DECAY = 0.999
"""A step's; an update spans EMA_STEPS of them."""
_WARM_UPS = 3
"""Steps before the capture, so that libraries and compiled kernels have set themselves up."""


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """What the steps since the last reading gave, on the host."""

    count: int
    loss: float
    """Mean of the totals."""
    cross_entropy: list[float]
    """[D] weighted means, per depth or slot."""
    accuracy: list[float]
    """[D] weighted shares of positions whose argmax is the teacher's."""
    first_bad_step: int | None
    """The first step whose loss was not finite."""


class TrainingStep:
    """The weights, the optimiser, the average, and what runs a step of them.

    Everything lives in tensors that stay where they are, so that a graph may be captured.
    """

    def __init__(self, recipe: Recipe, features: Features, *, batch_rows: int) -> None:
        """Set up the optimiser; on CUDA also capture the step. Nothing is trained.

        Features must have been loaded: a capture runs real steps first, and takes them back.
        """
        self._recipe, self._features = recipe, features
        self._weights = list(recipe.parameters.values())
        device = self._weights[0].device
        self._places = torch.zeros(batch_rows, dtype=torch.long, device=device)
        self._rate = torch.zeros((), device=device)
        self._average = [weight.detach().clone() for weight in self._weights]
        self._number = torch.zeros((), dtype=torch.long, device=device)
        self._first_bad = torch.full((), -1, dtype=torch.long, device=device)
        self._total = torch.zeros((), device=device)
        self._sums: torch.Tensor | None = None  # [3, D]; the first loss tells D
        self._count = 0
        self._optimizer = torch.optim.AdamW(
            self._weights,
            lr=self._rate,
            betas=BETAS,
            weight_decay=0.0,
            fused=True,
            capturable=device.type == "cuda",
        )
        self._moments = self._make_moments()
        self._graph = self._capture() if device.type == "cuda" else None

    def run(self, places: torch.Tensor, rate: float) -> None:
        """Train on the rows at `places` [batch_rows]; does not wait for a GPU."""
        self._places.copy_(places, non_blocking=True)
        self._rate.fill_(rate)
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()
        self._count += 1

    @torch.no_grad()
    def average(self, step: int) -> None:
        """Update the average after step `step`, counted from 1; it follows faster at the start."""
        updates = step // EMA_STEPS
        decay = min(EMA_DECAY**EMA_STEPS, updates / (updates + 10))
        torch._foreach_lerp_(self._average, self._weights, 1.0 - decay)

    def read(self) -> StepSums:
        """Return and forget the sums; waits for the device."""
        assert self._sums is not None, "no step has run"
        correct, entropy, weight = self._sums.cpu()
        weight = weight.clamp(min=1e-9)
        bad = int(self._first_bad)
        read = StepSums(
            count=self._count,
            loss=float(self._total) / max(self._count, 1),
            cross_entropy=(entropy / weight).tolist(),
            accuracy=(correct / weight).tolist(),
            first_bad_step=None if bad < 0 else bad,
        )
        self._sums.zero_()
        self._total.zero_()
        self._count = 0
        return read

    def averaged(self) -> dict[str, torch.Tensor]:
        """Return the average, by the names of the recipe's parameters."""
        return dict(zip(self._recipe.parameters, self._average, strict=True))

    def state(self) -> dict[str, list[torch.Tensor]]:
        """Return all that a step changes, on the CPU."""
        groups = {"weights": self._weights, "average": self._average, "moments": self._moments}
        kept = {name: [t.detach().cpu().clone() for t in group] for name, group in groups.items()}
        return {**kept, "number": [self._number.cpu().clone()]}

    @torch.no_grad()
    def restore(self, state: dict[str, list[torch.Tensor]]) -> None:
        """Take over a state of the same recipe."""
        groups = {"weights": self._weights, "average": self._average, "moments": self._moments,
                  "number": [self._number]}  # fmt: skip
        for name, group in groups.items():
            for tensor, kept in zip(group, state[name], strict=True):
                tensor.copy_(kept)

    def _make_moments(self) -> list[torch.Tensor]:
        """Make the optimiser's state now, which it would make in its first step."""
        moments = []
        for weight in self._weights:
            state = {
                "step": torch.zeros((), device=weight.device),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }
            self._optimizer.state[weight] = state
            moments += [tensor.detach() for tensor in state.values()]
        return moments

    def _step(self) -> None:
        loss = self._recipe.loss(self._features.batch(self._places))
        self._optimizer.zero_grad(set_to_none=True)
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(self._weights, MAX_NORM, foreach=True)
        self._optimizer.step()
        with torch.no_grad():
            sums = torch.stack((loss.correct, loss.cross_entropy, loss.weight))
            if self._sums is None:
                self._sums = torch.zeros_like(sums)
            self._sums += sums
            self._total += loss.total.detach()
            self._number += 1
            bad = (self._first_bad < 0) & ~torch.isfinite(loss.total.detach())
            self._first_bad.copy_(torch.where(bad, self._number, self._first_bad))

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Capture a step; what the steps before it trained is taken back."""
        device = self._places.device
        kept = [weight.detach().clone() for weight in self._weights]
        draws = torch.cuda.get_rng_state(device)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._step()
        torch.cuda.current_stream(device).wait_stream(side)
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        assert self._sums is not None
        with torch.no_grad():
            for weight, before in zip(self._weights, kept, strict=True):
                weight.copy_(before)
            for tensor in (*self._moments, self._sums, self._total, self._number):
                tensor.zero_()
            self._first_bad.fill_(-1)
        torch.cuda.set_rng_state(draws, device)
        return graph
