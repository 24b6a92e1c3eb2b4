"""Features of rows: scaled taps, in buffers that stay where they are."""

from __future__ import annotations

import pytest
import torch

from drafter_service.training.features import Features
from drafter_service.training.store import Rollouts
from drafter_service.training.target import TrainingTarget
from splitspec.errors import UserError
from tests.drafter_service.training.tiny_text import ROW_LENGTH, greedy_text, tiny_target

TAPS = (0, 1)
ROW_BYTES = ROW_LENGTH * (4 + 1 + 4 * 2 * 32 + 4 * 32 + 4)
"""Tokens, roles, two taps and the final rows of 32 in float32, the target's choices."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TrainingTarget:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def text(target: TrainingTarget) -> Rollouts:
    return greedy_text(target)


def make(target: TrainingTarget, text: Rollouts, rows: float = 100.0) -> Features:
    return Features(target, text, tap_layers=TAPS, gib=rows * ROW_BYTES / 2**30, least_rows=4)


def test_taps_are_divided_by_the_median_size_of_their_rows(
    target: TrainingTarget, text: Rollouts
) -> None:
    features = make(target, text)
    features.load(text.training_rows)
    batch = features.batch(torch.arange(len(text.training_rows)))
    sizes = batch.features[:, 20:].double().pow(2).mean(-1).sqrt().flatten(0, 1)
    torch.testing.assert_close(sizes.median(0).values, torch.ones(2).double(), rtol=1e-3, atol=0)
    taps, final = target.forward(text.tokens[text.training_rows].long(), TAPS)
    torch.testing.assert_close(batch.features * features.tap_rms[:, None], taps)
    torch.testing.assert_close(batch.final, final)


def test_greedy_text_is_what_the_target_likes_best(target: TrainingTarget, text: Rollouts) -> None:
    features = make(target, text)
    features.load(text.training_rows)
    batch = features.batch(torch.tensor([3, 0]))
    assert batch.tokens.tolist() == text.tokens[text.training_rows[[3, 0]]].tolist()
    assert torch.equal(batch.likeliest[:, 4:-1], batch.tokens[:, 5:])
    assert (batch.tokens.dtype, batch.likeliest.dtype) == (torch.int64, torch.int64)


def test_any_rows_can_be_computed_as_they_are_asked_for(
    target: TrainingTarget, text: Rollouts
) -> None:
    features = make(target, text)
    features.load(text.training_rows)
    whole = features.batch(torch.arange(10))
    parts = list(features.batches(text.training_rows[:10]))
    assert [len(part.tokens) for part in parts] == [8, 2]
    torch.testing.assert_close(torch.cat([part.features for part in parts]), whole.features)


def test_a_portion_takes_the_place_of_the_last_one_in_the_same_buffers(
    target: TrainingTarget, text: Rollouts
) -> None:
    features = make(target, text, rows=6.5)
    assert features.capacity == 6
    features.load(torch.arange(6))
    before = features._buffers["features"].data_ptr()
    features.load(torch.tensor([20, 30]))
    assert features._buffers["features"].data_ptr() == before
    assert features.batch(torch.tensor([1])).tokens[0].tolist() == text.tokens[30].tolist()


def test_memory_that_does_not_hold_a_step_is_named_with_what_would(
    target: TrainingTarget, text: Rollouts
) -> None:
    with pytest.raises(UserError, match=r"--feature-gib .* holds 3 rows .* at least .* the 4 rows"):
        make(target, text, rows=3.9)


def test_more_rows_a_step_than_there_are_is_named(target: TrainingTarget, text: Rollouts) -> None:
    with pytest.raises(UserError, match=r"--batch-rows 33 is not in 1\.\.32"):
        Features(target, text, tap_layers=TAPS, gib=1.0, least_rows=33)
