"""The training target against the served one: rows, logits, sliding windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_service.training.target import TrainingTarget, load_training_target
from graph_runtime.checkpoint import stored_tensors
from graph_runtime.decoder import Decoder
from graph_runtime.load import load_torch_target
from graph_runtime.target import Span
from splitspec.errors import UserError
from tests.tiny import write_tiny_model

LENGTH = 70
TAPS = (0, 2, 3)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama untied with biases": (
        "llama",
        {"tied": False, "config": {"attention_bias": True, "mlp_bias": True}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "a window in every layer": ("mistral", {"config": {"sliding_window": 9}}),
    "windows in two layers": (
        "qwen2",
        {"config": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}},
    ),
}


def load(folder: Path, precision: str = "fp32") -> TrainingTarget:
    return load_training_target(
        folder, device="cpu", precision=precision, cache_dir=folder / "cache"
    )


def random_tokens(rows: int) -> torch.Tensor:
    return torch.randint(300, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def served(folder: Path, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return taps [B, S, T, H] and logits [B, S, V] of the served target in plain torch."""
    target = load_torch_target(
        folder=folder,
        model_id="tiny",
        precision="fp32",
        cache_dir=folder / "cache",
        tap_layers=TAPS,
        max_context_length=LENGTH,
        slot_count=len(tokens),
        max_prefill_chunk=LENGTH,
        threads=None,
    )
    spans = [
        Span(slot=i, start=0, token_ids=row.tolist(), logits_count=LENGTH, wants_rows=True)
        for i, row in enumerate(tokens)
    ]
    outputs = target.step(spans)
    rows = torch.stack([output.rows for output in outputs if output.rows is not None])
    taps = rows.view(len(tokens), LENGTH, len(TAPS), -1)
    return taps, torch.stack([output.logits for output in outputs])


@pytest.mark.parametrize("case", CASES)
def test_rows_and_logits_are_the_served_targets(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    folder = write_tiny_model(tmp_path / "tiny", family=family, **options)
    tokens = random_tokens(3)
    target = load(folder)
    taps, final = target.forward(tokens, TAPS)
    wanted_taps, wanted_logits = served(folder, tokens)
    torch.testing.assert_close(taps, wanted_taps, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.logits(final), wanted_logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final @ target.head_weight.T, wanted_logits, rtol=1e-4, atol=1e-4)


def test_rows_of_any_length_follow_each_other(tmp_path: Path) -> None:
    target = load(write_tiny_model(tmp_path / "tiny"))
    tokens = random_tokens(2)
    whole, _ = target.forward(tokens, (1,))
    start, _ = target.forward(tokens[:, :20], (1,))
    torch.testing.assert_close(start, whole[:, :20], rtol=1e-4, atol=1e-4)


def test_weights_are_the_checkpoints_by_name(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", tied=False)
    target = load(folder)
    stored = stored_tensors(folder)
    for name in ("layers.3.mlp.up_proj.weight", "norm.weight", "embed_tokens.weight"):
        assert torch.equal(target.weight(name), stored[f"model.{name}"].read())
    assert torch.equal(target.head_weight, stored["lm_head.weight"].read())
    assert not torch.equal(target.head_weight, target.embed_weight)


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    tokens = random_tokens(2)
    taps, final = load(folder, "bf16").forward(tokens, TAPS)
    wanted, _ = load(folder).forward(tokens, TAPS)
    assert taps.dtype == final.dtype == torch.bfloat16
    assert (taps.float() - wanted).norm() < 0.03 * wanted.norm()


def test_a_decoder_with_other_attention_shares_the_weights(tmp_path: Path) -> None:
    target = load(write_tiny_model(tmp_path / "tiny"), "8da8w")
    cores = [torch.nn.Identity() for _ in range(target.config.n_layers)]
    twin = target.decoder_with(cores)
    assert isinstance(twin, Decoder)
    assert twin.layers[2].self_attn.attention is cores[2]
    assert target.decoder.layers[2].self_attn.attention is not cores[2]
    pairs = zip(target.decoder.buffers(), twin.buffers(), strict=True)
    assert all(mine is theirs for mine, theirs in pairs)


def test_an_unknown_precision_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    with pytest.raises(UserError, match=r"--precision 'int3'.*8da8w"):
        load(folder, "int3")
