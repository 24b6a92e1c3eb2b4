"""Flags of a training run: each wrong one is named with its value and its range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drafter_service.training.commands.eagle3 import eagle3
from drafter_service.training.run_config import RunConfig
from splitspec.errors import UserError

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"steps": None}, r"--steps and --seconds: neither given; expected one of them"),
    ({"seconds": 5.0}, r"--steps and --seconds: both given; expected one of them"),
    ({"steps": 0}, r"--steps 0 is not in 1\.\."),
    ({"steps": None, "seconds": 0.5}, r"--seconds 0\.5 is not in 1\.\."),
    ({"steps": None, "seconds": float("nan")}, r"--seconds nan is not in 1\.\."),
    ({"batch_rows": 0}, r"--batch-rows 0 is not in 1\.\."),
    ({"learning_rate": 0.0}, r"--learning-rate 0\.0 is not in 1e-08\.\.1"),
    ({"learning_rate": float("inf")}, r"--learning-rate inf is not in"),
    ({"seed": -1}, r"--seed -1 is not in 0\.\."),
    ({"feature_gib": 0.0}, r"--feature-gib 0\.0 is not in"),
    ({"checkpoint_seconds": -1.0}, r"--checkpoint-seconds -1\.0 is not in 0\.\."),
    ({"device": "tpu"}, r"--device 'tpu' is not cpu or cuda"),
    ({"precision": "int4"}, r"--precision 'int4' is not fp32, bf16 or 8da8w"),
    ({"device": "cuda", "precision": "fp32"}, r"--precision 'fp32' is for --device cpu"),
]


def arguments(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    wanted = {"rollouts": tmp_path, "run": tmp_path / "run", "steps": 10, "learning_rate": 1e-3}
    return {**wanted, **changes}


@pytest.mark.parametrize(("changes", "named"), WRONG)
def test_a_wrong_flag_is_named(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=named):
        RunConfig(**arguments(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"unroll": 0}, r"--unroll 0 is not in 1\.\.7"),
        ({"unroll": 8}, r"--unroll 8 is not in 1\.\.7"),
        ({"draft_vocab_size": 0}, r"--draft-vocab-size 0 is not in 1\.\."),
        ({"intermediate_size": -3}, r"--intermediate-size -3 is not in 1\.\."),
        ({"tap_layers": "1,x"}, r"--tap-layers '1,x' is not a list"),
    ],
)
def test_a_wrong_flag_of_eagle3_is_named(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=named):
        eagle3(**arguments(tmp_path, **changes))


def test_a_target_is_exact_on_a_cpu_and_halved_on_cuda_unless_said_otherwise(
    tmp_path: Path,
) -> None:
    assert RunConfig(**arguments(tmp_path)).chosen_precision == "fp32"
    assert RunConfig(**arguments(tmp_path, device="cuda")).chosen_precision == "bf16"
    assert RunConfig(**arguments(tmp_path, precision="8da8w")).chosen_precision == "8da8w"
