"""The decoder against `transformers`: every family, every RoPE scaling, windows, biases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from graph_runtime.load import load_torch_target
from graph_runtime.target import Span
from graph_runtime.torch_target import TorchTarget
from tests.tiny import write_tiny_model

LENGTH = 150
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
FULL, SLIDING = "full_attention", "sliding_attention"

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama untied": ("llama", {}, {"tied": False}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama with wide heads": ("llama", {}, {"head_dim": 32}),
    "llama without grouped heads": ("llama", {}, {"n_kv_heads": 4}),
    "llama with 3 heads a group": ("llama", {}, {"hidden": 96, "n_heads": 6, "n_kv_heads": 2}),
    "llama linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, {}),
    "llama llama3": ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {}),
    "llama yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", **YARN}}, {}),
    "llama yarn, tuned": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "yarn", "attention_factor": 0.9, "beta_fast": 16.0, "beta_slow": 2.0,
                "truncate": False, **YARN,
            }
        },
        {},
    ),
    "llama yarn, mscale": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.3, **YARN}},
        {},
    ),
    "llama, rope_parameters": (
        "llama",
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {},
    ),
    "llama llama3, rope_parameters": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {},
    ),
    "mistral": ("mistral", {}, {"tied": False}),
    "mistral with a window": ("mistral", {"sliding_window": 37}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2 untied": ("qwen2", {"sliding_window": 37, "use_sliding_window": False}, {"tied": False}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 2},
        {},
    ),
    "qwen2 with layer types": (
        "qwen2",
        {
            "use_sliding_window": True, "sliding_window": 20,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
        },
        {},
    ),
    "qwen3": ("qwen3", {}, {"head_dim": 32}),
    "qwen3 untied with biases": ("qwen3", {"attention_bias": True}, {"tied": False}),
    "qwen3 yarn": (
        "qwen3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
        {},
    ),
}  # fmt: skip


def load(folder: Path, cache_dir: Path, **changes: Any) -> TorchTarget:
    arguments: dict[str, Any] = {
        "folder": folder,
        "model_id": "tiny",
        "precision": "fp32",
        "cache_dir": cache_dir,
        "tap_layers": (0, 1, 2, 3),
        "max_context_length": 256,
        "slot_count": 3,
        "max_prefill_chunk": 128,
        "threads": None,
    }
    return load_torch_target(**(arguments | changes))


def random_tokens(length: int, *, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 300, (length,), generator=generator).tolist()


def reference(folder: Path, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [S, V] and all layers' outputs [S, L * H] from transformers."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    taps: list[torch.Tensor] = []
    for layer in model.model.layers:
        # Hooks: `hidden_states` of the output holds the last layer's only after the final norm.
        layer.register_forward_hook(
            lambda _module, _inputs, output: taps.append(
                output[0] if isinstance(output, tuple) else output
            )
        )
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    return logits, torch.cat([tap.reshape(len(tokens), -1) for tap in taps], dim=-1)


def spans_of(tokens: list[int], widths: Iterator[int]) -> Iterator[Span]:
    start = 0
    while start < len(tokens):
        chunk = tokens[start : start + next(widths)]
        yield Span(slot=1, start=start, token_ids=chunk, logits_count=len(chunk), wants_rows=True)
        start += len(chunk)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Chunked prefill with odd sizes, then windows of 1..8; every logit and tap within 1e-4."""
    family, config, shape = CASES[case]
    write_tiny_model(tmp_path / "m", family=family, seed=3, config=config, **shape)
    tokens = random_tokens(LENGTH)
    logits, taps = reference(tmp_path / "m", tokens)
    target = load(tmp_path / "m", tmp_path)
    widths = iter([1, 7, 33, 13, 21, *[1, 2, 3, 4, 5, 6, 7, 8] * 3])
    for span in spans_of(tokens, widths):
        (output,) = target.step([span])
        rows = slice(span.start, span.start + len(span.token_ids))
        assert output.rows is not None
        torch.testing.assert_close(output.logits, logits[rows], atol=1e-4, rtol=0)
        torch.testing.assert_close(output.rows, taps[rows], atol=1e-4, rtol=0)


def test_a_window_shorter_than_the_text_changes_the_reference(tmp_path: Path) -> None:
    """Guards the cases above: their sliding windows and scalings are not without effect."""
    tokens = random_tokens(LENGTH)
    plain, _ = reference(write_tiny_model(tmp_path / "plain", family="mistral", seed=3), tokens)
    for case in ("mistral with a window", "llama llama3", "llama yarn", "llama linear"):
        family, config, shape = CASES[case]
        folder = write_tiny_model(tmp_path / case, family=family, seed=3, config=config, **shape)
        assert (reference(folder, tokens)[0] - plain).abs().max() > 1e-2, case
