"""Learning rate and order of rows."""

from __future__ import annotations

import pytest
import torch

from drafter_service.training.schedule import PORTION_PASSES, RowOrder, learning_rate


def test_the_rate_rises_to_its_highest_and_falls_along_a_cosine_to_a_fiftieth() -> None:
    assert learning_rate(0.02, 1.0) == pytest.approx(0.5)
    assert learning_rate(0.04, 1.0) == pytest.approx(1.0)
    assert learning_rate(0.52, 1.0) == pytest.approx(0.51)
    assert learning_rate(1.0, 1.0) == pytest.approx(0.02)
    assert learning_rate(1.5, 1.0) == pytest.approx(0.02)


def test_the_first_step_trains_a_little_and_no_rate_is_above_the_highest() -> None:
    rates = [learning_rate(i / 500, 3e-3) for i in range(501)]
    assert 0.0 < rates[0] < 1e-4
    assert max(rates) == pytest.approx(3e-3)
    assert rates[20:] == sorted(rates[20:], reverse=True)


def test_each_pass_takes_every_row_once_in_another_order() -> None:
    order = RowOrder(row_count=24, capacity=100, batch_rows=4, seed=5)
    passes = [torch.cat([order.places(6 * p + i) for i in range(6)]) for p in range(3)]
    for taken in passes:
        assert sorted(taken.tolist()) == list(range(24))
    assert len({tuple(taken.tolist()) for taken in passes}) == 3
    assert {order.portion(step) for step in range(18)} == {0}
    assert order.rows(0).tolist() == list(range(24))


def test_portions_that_fit_rotate_and_all_rows_get_their_turn() -> None:
    order = RowOrder(row_count=30, capacity=12, batch_rows=4, seed=5)
    assert (order.portion_count, order.portion_rows) == (3, 10)
    steps = order.pass_steps * PORTION_PASSES
    assert [order.portion(s) for s in (0, steps - 1, steps, 3 * steps)] == [0, 0, 1, 3]
    rotation = torch.cat([order.rows(portion) for portion in range(3)])
    assert sorted(rotation.tolist()) == list(range(30))
    again = torch.cat([order.rows(portion) for portion in range(3, 6)])
    assert sorted(again.tolist()) == list(range(30))
    assert order.rows(0).tolist() != order.rows(3).tolist()
    assert all(int(order.places(step).max()) < 10 for step in range(50))


def test_a_portion_is_never_smaller_than_a_step() -> None:
    order = RowOrder(row_count=20, capacity=16, batch_rows=16, seed=0)
    for portion in range(4):
        rows = order.rows(portion)
        assert len(rows) == 16
        assert len(set(rows.tolist())) == 16


def test_another_seed_is_another_order_and_the_same_seed_the_same() -> None:
    first, same, other = (
        RowOrder(row_count=50, capacity=50, batch_rows=5, seed=seed) for seed in (1, 1, 2)
    )
    assert first.places(3).tolist() == same.places(3).tolist()
    assert first.places(3).tolist() != other.places(3).tolist()
