"""Fake quantisation against the modules that programs of 8da8w are exported from."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("executorch")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecations inside executorch, which tests make errors
    import graph_runtime.programs.lowering  # noqa: F401 - registers the embedding's operator
    from graph_runtime.programs.network import prepare
    from graph_runtime.programs.quantised import Linear8, symmetric_int8

from drafter_service.training.fake_quantised import QuantisedLinear
from drafter_service.training.target import TrainingTarget, load_training_target
from graph_runtime.checkpoint import stored_tensors
from tests.tiny import write_tiny_model

TAPS = (0, 2, 3)


def load(folder: Path, precision: str) -> TrainingTarget:
    return load_training_target(
        folder, device="cpu", precision=precision, cache_dir=folder / "cache"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_linear_is_the_programs(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(48, 96, generator=generator) * 0.1
    bias = torch.randn(48, generator=generator)
    x = torch.randn(40, 96, generator=generator) * 3
    x[1], x[2], x[3] = 0.0, x[2].abs(), -x[3].abs()
    wanted = Linear8(weight, bias)(x)
    torch.testing.assert_close(
        QuantisedLinear(weight, bias, dtype).exact(x), wanted, rtol=1e-5, atol=1e-5
    )
    plain = x @ weight.T + bias
    assert (wanted - plain).abs().max() > 1e-3, "quantisation shows"


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False)])
def test_8da8w_computes_what_an_exported_program_does(
    family: str, tied: bool, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "tiny", family=family, tied=tied)
    tokens = torch.randint(300, (2, 70), generator=torch.Generator().manual_seed(1))
    target = load(folder, "8da8w")
    taps, final = target.forward(tokens, TAPS)
    program = load(folder, "fp32")
    prepare(program.decoder, program.config, "8da8w")
    wanted_taps, wanted_final = program.forward(tokens, TAPS)
    wanted_logits = program.decoder.lm_head(wanted_final.flatten(0, 1)).view(*final.shape[:2], -1)
    plain = load(folder, "fp32")
    plain_taps, plain_final = plain.forward(tokens, TAPS)
    # A norm in another order moves a value over an edge of its int8 step now and then.
    for found, wanted, unquantised in (
        (taps, wanted_taps, plain_taps),
        (target.logits(final), wanted_logits, plain.logits(plain_final)),
    ):
        assert (found - wanted).norm() < 0.15 * (unquantised - wanted).norm()
    values, scales = symmetric_int8(stored_tensors(folder)["model.embed_tokens.weight"].read())
    assert torch.equal(target.embed_weight, values * scales[:, None])
