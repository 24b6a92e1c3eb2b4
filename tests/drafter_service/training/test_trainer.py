"""Training tiny drafts on a tiny target's own text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafter_service.training import trainer
from drafter_service.training.batches import Batch, Loss
from drafter_service.training.draft_vocabulary import choose_target_ids, special_token_ids
from drafter_service.training.eagle3 import Eagle3Recipe, Eagle3Shape
from drafter_service.training.features import FIRST_POSITIONS, Features
from drafter_service.training.run_config import RunConfig
from drafter_service.training.store import Rollouts
from drafter_service.training.target import TrainingTarget
from drafter_service.training.trainer import HeldOut, TrainResult, train
from splitspec.errors import UserError
from tests.drafter_service.training.tiny_text import greedy_text, tiny_target

TAPS = (0, 1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TrainingTarget:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def text(target: TrainingTarget) -> Rollouts:
    return greedy_text(target)


def make_recipe(target: TrainingTarget) -> Eagle3Recipe:
    shape = Eagle3Shape(
        tap_layers=TAPS, target_ids=torch.arange(300), intermediate_size=64, unroll=3
    )
    return Eagle3Recipe(target, shape, seed=0, facts={})


def run(
    target: TrainingTarget,
    text: Rollouts,
    folder: Path,
    *,
    recipe: Eagle3Recipe | None = None,
    gib: float = 1.0,
    **changes: Any,
) -> TrainResult:
    """Train in `folder`."""
    folder.mkdir(exist_ok=True)
    wanted: dict[str, Any] = {"steps": 100, "learning_rate": 5e-3, "batch_rows": 8, **changes}
    config = RunConfig(rollouts=folder, run=folder, **wanted)
    features = Features(target, text, tap_layers=TAPS, gib=gib, least_rows=8)
    held_out = HeldOut(greedy=text.held_out_rows, sampled=text.held_out_rows[:0])
    return train(recipe or make_recipe(target), features, config, held_out=held_out)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics without what the clock says."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines(folder)]


def least_loss(target: TrainingTarget, text: Rollouts) -> float:
    """Return the loss of a draft that knows the target's distribution: its entropy."""
    _, final = target.forward(text.tokens[text.training_rows].long(), TAPS)
    log_p = target.logits(final[:, FIRST_POSITIONS:]).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    return float(entropy) * sum(0.8**depth for depth in range(3))


def test_loss_falls_and_tau_rises_above_the_untrained_heads(
    target: TrainingTarget, text: Rollouts, tmp_path: Path
) -> None:
    result = run(target, text, tmp_path)
    losses = [line["loss"] for line in lines(tmp_path) if "loss" in line]
    least = least_loss(target, text)
    assert 0.0 < losses[-1] - least < 0.5 * (losses[0] - least)
    assert result.loss == losses[-1]
    evaluations = [line for line in lines(tmp_path) if "tau" in line]
    assert [line["step"] for line in evaluations] == [0, 40, 60, 80, 100]
    assert result.untrained_tau == evaluations[0]["tau"]
    for count in ("3", "5", "7"):
        assert result.tau[count] > result.untrained_tau[count] + 0.25
    best = max(("tau", "ema_tau"), key=lambda name: sum(evaluations[-1][name].values()))
    assert result.tau == evaluations[-1][best]
    assert result.weights == {"tau": "last", "ema_tau": "ema"}[best]
    assert (result.steps, result.epochs) == (100, 100 * 8 / 32)
    assert result.sampled_tau == {}


def test_metrics_tell_every_depths_entropy_and_accuracy(
    target: TrainingTarget, text: Rollouts, tmp_path: Path
) -> None:
    run(target, text, tmp_path, steps=30)
    first, last = (line for line in lines(tmp_path) if "loss" in line)
    assert (first["step"], last["step"]) == (20, 30)
    assert len(last["cross_entropy"]) == len(last["accuracy"]) == 3
    assert all(0.0 <= share <= 1.0 for share in last["accuracy"])
    weighted = sum(0.8**d * entropy for d, entropy in enumerate(last["cross_entropy"]))
    assert last["loss"] == pytest.approx(weighted, rel=0.02)


def test_a_budget_of_seconds_ends_in_time_and_takes_the_rate_down(
    target: TrainingTarget, text: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(step=0.01)  # a second is a hundred looks at the clock
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    result = run(target, text, tmp_path, steps=None, seconds=1.0)
    assert result.seconds == pytest.approx(1.0, abs=0.03), "looked at after every step on a CPU"
    rates = [line["learning_rate"] for line in lines(tmp_path) if "loss" in line]
    assert len(rates) == 5
    assert 5e-3 > max(rates) > 4e-3
    assert rates[-1] < 0.1 * max(rates)


class Killed(Exception):
    """What a test ends a training with."""


def test_a_run_that_was_killed_ends_with_the_same_bits(
    target: TrainingTarget, text: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    portions = 14 * 48 * (4 + 1 + 4 * 3 * 32 + 4) / 2**30  # 14 of 32 rows fit at once
    whole = run(target, text, tmp_path / "whole", gib=portions, checkpoint_seconds=0.0)
    step = trainer.TrainingStep.run
    calls = 0

    def killing(self: trainer.TrainingStep, places: torch.Tensor, rate: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 55:  # the checkpoint is of step 40
            raise Killed
        torch.rand(3)  # a draw that only the checkpoint's state can take back
        step(self, places, rate)

    with monkeypatch.context() as patched:
        patched.setattr(trainer.TrainingStep, "run", killing)
        with pytest.raises(Killed):
            run(target, text, tmp_path / "killed", gib=portions, checkpoint_seconds=0.0)
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 55, "half a li')
    torch.manual_seed(99)
    resumed = run(target, text, tmp_path / "killed", gib=portions, checkpoint_seconds=0.0)
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, resumed.parameters[name]), name
    assert untimed(tmp_path / "killed") == untimed(tmp_path / "whole")
    assert (resumed.tau, resumed.untrained_tau) == (whole.tau, whole.untrained_tau)


def test_draws_go_on_where_the_checkpoint_was_written(
    target: TrainingTarget, text: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Drawing(Eagle3Recipe):
        """A recipe whose loss depends on a draw, as DFlash's anchors are."""

        def loss(self, batch: Batch) -> Loss:
            loss = super().loss(batch)
            drawn = loss.total * (0.5 + torch.rand(()))
            return Loss(
                total=drawn,
                correct=loss.correct,
                cross_entropy=loss.cross_entropy,
                weight=loss.weight,
            )

    def drawing() -> Drawing:
        made = make_recipe(target)
        return Drawing(target, made.shape, seed=0, facts={})

    torch.manual_seed(1)
    settings: dict[str, Any] = {"steps": 60, "checkpoint_seconds": 0.0}
    whole = run(target, text, tmp_path / "whole", recipe=drawing(), **settings)
    torch.manual_seed(1)
    with monkeypatch.context() as patched:
        patched.setattr(trainer._Training, "_choose", _killed)
        with pytest.raises(Killed):
            run(target, text, tmp_path / "killed", recipe=drawing(), **settings)
        patched.setattr(trainer._Training, "_show", _killed)
    # The end's checkpoint goes: an earlier one takes its place.
    (tmp_path / "killed" / "checkpoint.pt").unlink()
    torch.manual_seed(1)
    with monkeypatch.context() as patched:
        patched.setattr(trainer._Training, "_show", _killed)
        with pytest.raises(Killed):
            run(target, text, tmp_path / "killed", recipe=drawing(), **settings)
    torch.manual_seed(2)
    resumed = run(target, text, tmp_path / "killed", recipe=drawing(), **settings)
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, resumed.parameters[name]), name


def _killed(*_: object) -> None:
    raise Killed


def test_portions_that_take_turns_train_too(
    target: TrainingTarget, text: Rollouts, tmp_path: Path
) -> None:
    loaded: list[list[int]] = []

    class Watched(Features):
        """Features that note what they load."""

        def load(self, rows: torch.Tensor) -> None:
            loaded.append(rows.tolist())
            super().load(rows)

    row_bytes = 48 * (4 + 1 + 4 * 3 * 32 + 4)
    features = Watched(target, text, tap_layers=TAPS, gib=12 * row_bytes / 2**30, least_rows=8)
    config = RunConfig(rollouts=tmp_path, run=tmp_path, steps=60, learning_rate=5e-3, batch_rows=8)
    held_out = HeldOut(greedy=text.held_out_rows, sampled=text.held_out_rows)
    result = train(make_recipe(target), features, config, held_out=held_out)
    # 3 portions of 10 rows make one step of 8 a pass, and stay for two passes.
    assert len(loaded) == 30
    assert {len(rows) for rows in loaded} == {10}
    assert {row for rows in loaded for row in rows} == set(text.training_rows.tolist())
    assert result.tau["7"] > result.untrained_tau["7"] + 0.2
    assert result.sampled_tau == result.tau


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(
    target: TrainingTarget, text: Rollouts, tmp_path: Path
) -> None:
    class Diverging(Eagle3Recipe):
        """A recipe whose loss is NaN from its 27th step on."""

        steps = 0

        def loss(self, batch: Batch) -> Loss:
            self.steps += 1
            loss = super().loss(batch)
            bad = loss.total * float("nan") if self.steps >= 27 else loss.total
            return Loss(
                total=bad,
                correct=loss.correct,
                cross_entropy=loss.cross_entropy,
                weight=loss.weight,
            )

    recipe = Diverging(target, make_recipe(target).shape, seed=0, facts={})
    with pytest.raises(UserError, match=r"loss of step 27 is not finite; try a lower --learning"):
        run(target, text, tmp_path, recipe=recipe, checkpoint_seconds=0.0)
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert kept["step"] == 20, "the last checkpoint is from before"
    assert all(bool(w.isfinite().all()) for w in kept["state"]["weights"])


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive"])
def test_a_damaged_checkpoint_is_named(
    target: TrainingTarget, text: Rollouts, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"checkpoint\.pt is damaged; delete it"):
        run(target, text, tmp_path)


def test_a_draft_vocabulary_holds_the_most_frequent_tokens_and_all_special_ones(
    tmp_path: Path,
) -> None:
    tokens = torch.tensor([[9, 9, 9, 4, 4, 7, 7, 5, 8, 8, 8, 8]])
    roles = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]])
    ids, coverage = choose_target_ids(tokens, roles, size=4, vocab_size=12, always=[1, 99])
    assert ids.tolist() == [1, 4, 7, 9]
    assert coverage == pytest.approx(7 / 8)
    with pytest.raises(UserError, match=r"--draft-vocab-size 1 is not in 2\.\.12"):
        choose_target_ids(tokens, roles, size=1, vocab_size=12, always=[1, 2])
    tiny_target(tmp_path / "model")
    assert special_token_ids(tmp_path / "model") == [0, 1, 2]
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        special_token_ids(tmp_path)
