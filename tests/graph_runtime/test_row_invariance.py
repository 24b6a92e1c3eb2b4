"""Law L4 at its root: a row's bits do not depend on how the step around it was cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graph_runtime.target import Span
from graph_runtime.torch_target import TorchTarget
from tests.graph_runtime.test_parity import load, random_tokens
from tests.tiny import write_tiny_model

LENGTH = 140
"""Crosses two borders between 64-position attention blocks."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama, odd sizes": {
        "family": "llama", "hidden": 84, "n_heads": 6, "n_kv_heads": 2, "intermediate": 150,
        "vocab_size": 301, "tied": False,
    },
    "mistral with a window": {"family": "mistral", "config": {"sliding_window": 37}},
    "qwen2": {"family": "qwen2"},
    "qwen2 with windows": {
        "family": "qwen2",
        "config": {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 2},
    },
    "qwen3": {"family": "qwen3", "head_dim": 32},
    "real sizes": {
        "family": "llama", "hidden": 576, "n_heads": 9, "n_kv_heads": 3, "intermediate": 1536,
        "vocab_size": 4000, "n_layers": 4,
    },
}  # fmt: skip


@pytest.fixture(params=MODELS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> TorchTarget:
    return load(write_tiny_model(tmp_path / "m", seed=5, **MODELS[request.param]), tmp_path)


def run(target: TorchTarget, slot: int, start: int, tokens: list[int]) -> torch.Tensor:
    """Run one span; return its logits and rows side by side, [T, V + row_width]."""
    (output,) = target.step([span(slot, start, tokens)])
    assert output.rows is not None
    return torch.cat((output.logits, output.rows), dim=-1)


def span(slot: int, start: int, tokens: list[int]) -> Span:
    return Span(slot=slot, start=start, token_ids=tokens, logits_count=len(tokens), wants_rows=True)


def run_all(target: TorchTarget, tokens: list[int], widths: Iterator[int]) -> torch.Tensor:
    """Run `tokens` from position 0 in spans of the given widths."""
    outputs = []
    start = 0
    while start < len(tokens):
        outputs.append(run(target, 0, start, tokens[start : start + next(widths)]))
        start += len(outputs[-1])
    return torch.cat(outputs)


def spoil(target: TorchTarget, value: float) -> None:
    """Fill every cache with `value`: what a rolled-back or earlier session may have left."""
    for cache in target._caches:
        cache.k.fill_(value)
        cache.v.fill_(value)


def repeat(width: int) -> Iterator[int]:
    while True:
        yield width


def test_every_width_and_every_chunking_gives_the_same_bits(target: TorchTarget) -> None:
    tokens = random_tokens(LENGTH)
    alone = run_all(target, tokens, repeat(1))
    assert alone.isfinite().all()
    for width in (2, 3, 4, 5, 6, 7, 8, 9, 13, 64, 127, LENGTH):
        spoil(target, float("nan"))
        assert torch.equal(run_all(target, tokens, repeat(width)), alone), width
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randint(1, 30, (LENGTH,), generator=generator).tolist()
    assert torch.equal(run_all(target, tokens, iter(mixed)), alone)


def test_rejected_rows_and_garbage_in_the_cache_never_matter(target: TorchTarget) -> None:
    """Windows overlap as after rejections: each starts where the last one's accepted rows end."""
    tokens = random_tokens(LENGTH)
    wrong = random_tokens(LENGTH, seed=9)
    expected = run_all(target, tokens, repeat(LENGTH))
    for value in (float("nan"), float("inf"), -1e30):
        spoil(target, value)
        start = len(run(target, 0, 0, tokens[:50]))
        while start < LENGTH:
            keep = 1 + start % 5
            draft = (tokens[start : start + keep] + wrong[start + keep : start + 8])[:8]
            kept = run(target, 0, start, draft)[:keep]
            assert torch.equal(kept, expected[start : start + keep]), (value, start)
            start += len(kept)


def test_spans_of_other_slots_in_the_step_never_matter(target: TorchTarget) -> None:
    tokens = [random_tokens(LENGTH, seed=seed) for seed in range(3)]
    starts = [9, 61, 100]
    widths = [5, 8, 3]
    alone = []
    for slot in range(3):
        run(target, slot, 0, tokens[slot][: starts[slot]])
        end = starts[slot] + widths[slot]
        alone.append(run(target, slot, starts[slot], tokens[slot][starts[slot] : end]))
    for order in ((0, 1, 2), (2, 0, 1), (1, 2), (2, 1, 0)):
        spans = [
            span(slot, starts[slot], tokens[slot][starts[slot] : starts[slot] + widths[slot]])
            for slot in order
        ]
        for slot, output in zip(order, target.step(spans), strict=True):
            assert output.rows is not None
            assert torch.equal(torch.cat((output.logits, output.rows), dim=-1), alone[slot])


def test_a_copied_prefix_continues_with_the_same_bits(target: TorchTarget) -> None:
    tokens = random_tokens(LENGTH)
    expected = run_all(target, tokens, repeat(LENGTH))
    spoil(target, float("nan"))
    run(target, 0, 0, tokens[:100])
    target.copy_prefix(0, 2, 77)
    run(target, 0, 77, random_tokens(8, seed=1))  # the source goes its own way
    assert torch.equal(run(target, 2, 77, tokens[77:]), expected[77:])


def test_outputs_hold_only_what_was_asked_for(target: TorchTarget) -> None:
    tokens = random_tokens(20)
    expected = run_all(target, tokens, repeat(20))
    vocab = target.info.vocab_size
    first, second = target.step(
        [
            Span(slot=0, start=0, token_ids=tokens, logits_count=1, wants_rows=False),
            Span(slot=1, start=0, token_ids=tokens[:11], logits_count=0, wants_rows=True),
        ]
    )
    assert first.rows is None
    assert torch.equal(first.logits, expected[19:, :vocab])
    assert second.rows is not None
    assert second.logits.shape == (0, vocab)
    assert torch.equal(second.rows, expected[:11, vocab:])
    assert second.rows.shape[1] == target.info.row_width


def test_a_slot_can_be_filled_to_its_last_position(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", max_position_embeddings=70)
    target = load(folder, tmp_path, max_context_length=70)
    tokens = random_tokens(70)
    assert run(target, 0, 0, tokens[:66]).isfinite().all()
    assert run(target, 0, 66, tokens[66:]).isfinite().all()
    with pytest.raises(AssertionError):
        run(target, 0, 67, tokens[66:])
