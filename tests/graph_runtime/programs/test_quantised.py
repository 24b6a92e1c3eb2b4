"""Quantised linears against float64 products with the weights they stand for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("executorch")

from graph_runtime.programs.quantised import (
    Linear4,
    Linear8,
    LinearQ41,
    recover_q4_1,
    symmetric_int4,
)
from splitspec.errors import UserError
from tests.graph_runtime.programs.conftest import q4_1_of


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(48, 96, generator=torch.Generator().manual_seed(3)) * 0.1


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def test_a_q4_1_weight_is_recovered_bit_for_bit(weight: torch.Tensor) -> None:
    stored = q4_1_of(weight)
    q, d, m = recover_q4_1(stored, "w")
    assert q.dtype == torch.int8
    assert int(q.min()) == 0
    assert int(q.max()) == 15
    spread = (len(stored), -1, 32)
    assert torch.equal((d[..., None] * q.view(spread) + m[..., None]).view_as(stored), stored)


def test_a_group_of_equal_weights_is_recovered(weight: torch.Tensor) -> None:
    stored = q4_1_of(weight)
    stored[0, :32] = 0.25
    q, d, m = recover_q4_1(stored, "w")
    assert int(q[0, :32].abs().max()) == 0
    assert float(d[0, 0]) == 0.0
    assert float(m[0, 0]) == 0.25


def test_a_weight_that_is_not_q4_1_is_refused_by_name(weight: torch.Tensor) -> None:
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.up_proj.*8da8w"):
        recover_q4_1(weight, "model.layers.0.mlp.up_proj.weight")


def test_q4_1_costs_no_more_than_rounding_the_activations(weight: torch.Tensor) -> None:
    stored = q4_1_of(weight)
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(4))
    exact = x.double() @ stored.double().T
    linear = LinearQ41(*recover_q4_1(stored, "w"), None)
    rounded_twice = Linear4(*symmetric_int4(stored), None)
    assert relative_error(linear(x), exact) < 0.01
    assert relative_error(linear(x), exact) < relative_error(rounded_twice(x), exact) / 5


def test_8da8w_is_within_a_percent(weight: torch.Tensor) -> None:
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(4))
    bias = torch.arange(48.0)
    exact = x.double() @ weight.double().T + bias
    assert relative_error(Linear8(weight, bias)(x), exact) < 0.01
