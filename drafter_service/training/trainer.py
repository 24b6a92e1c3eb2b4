"""Train a recipe on the target's text: the loop around steps, evaluations and checkpoints."""

from __future__ import annotations

import json
import logging
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from drafter_service.training.batches import Recipe
from drafter_service.training.features import Features
from drafter_service.training.run_config import RunConfig
from drafter_service.training.schedule import RowOrder, learning_rate
from drafter_service.training.step import EMA_STEPS, TrainingStep
from drafter_service.training.walk import acceptance, merge, taus
from splitspec.errors import UserError

logger = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
CHECKPOINT = "checkpoint.pt"
SYNC_STEPS = 20
"""Steps between two looks at what the device computed, the clock and the loss."""
EVALUATIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the budget at which held-out rows are walked; 0: the untrained draft."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Rows of the text that no step sees, int64; either may be empty."""

    greedy: torch.Tensor
    sampled: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a training gave."""

    parameters: Mapping[str, torch.Tensor]
    """Those that were better on the held-out rows, the last ones or their average."""
    weights: str
    """"last" or "ema": which these are."""
    steps: int
    seconds: float
    """Of steps, without evaluations, checkpoints and the first features."""
    epochs: float
    """Passes over the training rows."""
    loss: float
    """Mean of the last steps."""
    tau: dict[str, float]
    """By K, on the greedy held-out rows."""
    sampled_tau: dict[str, float]
    """By K, on the sampled held-out rows; the draft takes its argmax there."""
    untrained_tau: dict[str, float]

    def record(self) -> dict[str, Any]:
        """Return what run.json says of it."""
        return {name: value for name, value in vars(self).items() if name != "parameters"}


def train(
    recipe: Recipe, features: Features, config: RunConfig, *, held_out: HeldOut
) -> TrainResult:
    """Train until the budget of steps or seconds is spent; resumes from a checkpoint in `run`.

    Args:
        recipe: the network; its parameters are trained in place.
        features: of the text; loaded here.
        config: the run's folder must exist.
        held_out: rows to walk.

    Raises:
        UserError: the loss is not finite, naming the step; the checkpoint is damaged; or a file
            cannot be written.
    """
    return _Training(recipe, features, config, held_out).run()


class _Training:
    """The state of one run's loop."""

    def __init__(
        self, recipe: Recipe, features: Features, config: RunConfig, held_out: HeldOut
    ) -> None:
        self._recipe, self._features, self._config = recipe, features, config
        self._held_out = held_out
        self._order = RowOrder(
            row_count=len(features.text.training_rows),
            capacity=features.capacity,
            batch_rows=config.batch_rows,
            seed=config.seed,
        )
        self._step = 0
        self._seconds = 0.0
        """Spent on steps before `_since`."""
        self._evaluated = 0
        """How many of EVALUATIONS are done."""
        self._untrained: dict[str, float] = {}
        self._loss = float("nan")
        self._checkpoint_at = 0.0
        self._portion = -1
        self._places = torch.empty(0)
        self._metrics = config.run / METRICS

    def run(self) -> TrainResult:
        """Run to the end of the budget."""
        checkpoint = self._read_checkpoint()
        if checkpoint is not None:
            self._step = checkpoint["step"]
        self._load_portion()
        step = TrainingStep(self._recipe, self._features, batch_rows=self._config.batch_rows)
        self._resume(step, checkpoint)
        self._checkpoint_at = time.monotonic()
        with self._bar() as bar:
            while True:
                self._evaluate_if_due(step)
                if self._fraction() >= 1.0:
                    break
                self._run_steps(step)
                self._show(bar)
        self._write_checkpoint(step)
        return self._choose(step)

    def _run_steps(self, step: TrainingStep) -> None:
        """Run the steps up to the next look, then look."""
        began = time.monotonic()
        due = SYNC_STEPS - self._step % SYNC_STEPS
        if self._config.steps is not None:
            due = min(due, self._config.steps - self._step)
        rate = 0.0
        for _ in range(due):
            self._load_portion()
            rate = learning_rate(self._fraction(), self._config.learning_rate)
            step.run(self._next_places(), rate)
            self._step += 1
            if self._step % EMA_STEPS == 0:
                step.average(self._step)
            if self._is_late(began):
                break
        sums = step.read()
        self._seconds += time.monotonic() - began
        if sums.first_bad_step is not None:
            raise UserError(
                f"the loss of step {sums.first_bad_step} is not finite; try a lower "
                f"--learning-rate than {self._config.learning_rate}"
            )
        self._loss = sums.loss
        self._log(
            learning_rate=rate,
            loss=sums.loss,
            cross_entropy=sums.cross_entropy,
            accuracy=sums.accuracy,
        )
        if time.monotonic() - self._checkpoint_at >= self._config.checkpoint_seconds:
            self._write_checkpoint(step)

    def _fraction(self) -> float:
        """Return the share of the budget that is spent, as of the last look for seconds."""
        if self._config.steps is not None:
            return self._step / self._config.steps
        assert self._config.seconds is not None
        return self._seconds / self._config.seconds

    def _is_late(self, began: float) -> bool:
        """Return whether steps since `began` spent the rest of the budget of seconds.

        Known between two looks on a CPU only, where a step has run when it returns.
        """
        seconds = self._config.seconds
        if seconds is None or self._features.device.type != "cpu":
            return False
        return self._seconds + time.monotonic() - began >= seconds

    def _load_portion(self) -> None:
        """Compute the features of the rows that the next step takes, unless they are there."""
        portion = self._order.portion(self._step)
        if portion != self._portion:
            rows = self._features.text.training_rows[self._order.rows(portion)]
            self._features.load(rows)
            self._portion = portion

    def _next_places(self) -> torch.Tensor:
        return self._order.places(self._step).to(self._features.device, non_blocking=True)

    def _evaluate_if_due(self, step: TrainingStep) -> None:
        """Walk the greedy held-out rows where a mark of EVALUATIONS has been passed."""
        passed = sum(mark <= self._fraction() for mark in EVALUATIONS)
        if passed <= self._evaluated or not len(self._held_out.greedy):
            return
        self._evaluated = passed
        tau = self._walk(self._recipe.parameters, self._held_out.greedy)
        averaged = self._walk(step.averaged(), self._held_out.greedy)
        if passed == 1:
            self._untrained = tau
        self._log(tau=tau, ema_tau=averaged)
        logger.info("step %d: tau %s, averaged weights %s", self._step, tau, averaged)

    def _walk(self, parameters: Mapping[str, torch.Tensor], rows: torch.Tensor) -> dict[str, float]:
        """Return tau by K of the recipe with these parameters."""
        with torch.no_grad():
            parts = [
                acceptance(self._recipe.accepted(parameters, batch).cpu(), batch.roles.cpu())
                for batch in self._features.batches(rows)
            ]
        return taus(merge(parts))

    def _choose(self, step: TrainingStep) -> TrainResult:
        """Keep the last weights or their average, whichever drafts better."""
        last, average = self._recipe.parameters, step.averaged()
        tau = self._walk(last, self._held_out.greedy)
        averaged = self._walk(average, self._held_out.greedy)
        ema = sum(averaged.values()) > sum(tau.values())
        chosen = average if ema else last
        return TrainResult(
            parameters={name: tensor.detach() for name, tensor in chosen.items()},
            weights="ema" if ema else "last",
            steps=self._step,
            seconds=self._seconds,
            epochs=self._step * self._config.batch_rows / self._order.row_count,
            loss=self._loss,
            tau=averaged if ema else tau,
            sampled_tau=self._walk(chosen, self._held_out.sampled),
            untrained_tau=self._untrained,
        )

    def _write_checkpoint(self, step: TrainingStep) -> None:
        """Write all that the rest of the run depends on, whole or not at all."""
        device = self._features.device
        content = {
            "step": self._step,
            "seconds": self._seconds,
            "evaluated": self._evaluated,
            "untrained": self._untrained,
            "loss": self._loss,
            "metrics_bytes": self._metrics.stat().st_size,
            "draws": torch.get_rng_state(),
            "device_draws": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            "state": step.state(),
        }
        path = self._config.run / CHECKPOINT
        part = path.with_suffix(".part")
        try:
            torch.save(content, part)
            part.replace(path)
        except (OSError, RuntimeError) as error:  # torch's writer has no class of its own
            part.unlink(missing_ok=True)
            raise UserError(f"cannot write {path}: {error}") from error
        self._checkpoint_at = time.monotonic()

    def _read_checkpoint(self) -> dict[str, Any] | None:
        """Return the run's checkpoint; None where it begins.

        Raises:
            UserError: it is damaged.
        """
        path = self._config.run / CHECKPOINT
        if not path.is_file():
            return None
        try:
            content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(f"{path} is damaged; delete it to train from the start") from error
        return content

    def _resume(self, step: TrainingStep, checkpoint: dict[str, Any] | None) -> None:
        """Go on where the checkpoint was written, or from the start."""
        if checkpoint is None:
            self._metrics.write_bytes(b"")
            return
        step.restore(checkpoint["state"])
        self._seconds, self._loss = checkpoint["seconds"], checkpoint["loss"]
        self._evaluated, self._untrained = checkpoint["evaluated"], checkpoint["untrained"]
        torch.set_rng_state(checkpoint["draws"])
        if checkpoint["device_draws"] is not None:
            torch.cuda.set_rng_state(checkpoint["device_draws"], self._features.device)
        with self._metrics.open("r+b") as file:  # what came after the checkpoint comes again
            file.truncate(checkpoint["metrics_bytes"])
        logger.info("resumed at step %d", self._step)

    def _log(self, **values: Any) -> None:
        """Append a line to the metrics file.

        Raises:
            UserError: the disk is full.
        """
        line = {"step": self._step, "seconds": round(self._seconds, 3), **values}
        try:
            with self._metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {self._metrics}: {error.strerror}") from error

    def _bar(self) -> tqdm[Any]:
        """Return a progress bar of the budget, shown on a terminal only."""
        in_steps = self._config.steps is not None
        total = self._config.steps if in_steps else self._config.seconds
        return tqdm(total=total, desc="train", unit="step" if in_steps else "s", disable=None)

    def _show(self, bar: tqdm[Any]) -> None:
        spent = self._step if self._config.steps is not None else self._seconds
        bar.set_postfix_str(f"step {self._step}, loss {self._loss:.3f}", refresh=False)
        bar.update(spent - bar.n)
