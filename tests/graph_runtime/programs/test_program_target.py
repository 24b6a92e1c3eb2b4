"""Programs against `transformers`, and law L4 at their root: a row's bits know no neighbours."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from graph_runtime.target import Span, Target
from tests.conftest import RealModel
from tests.graph_runtime.programs.conftest import CHUNK, CONTEXT, LoadProgram, MakeModel

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama with biases, untied": {
        "family": "llama", "tied": False, "config": {"attention_bias": True, "mlp_bias": True},
    },
    "mistral with a window": {"family": "mistral", "config": {"sliding_window": 37}},
    "qwen2 with a window in one layer": {
        "family": "qwen2",
        "config": {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1},
    },
    "qwen3": {"family": "qwen3", "head_dim": 32},
}  # fmt: skip
PRECISIONS = ("fp32", "8da8w", "8da4w", "q4_1")


def tokens_of(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 300, (length,), generator=generator).tolist()


def run(target: Target, slot: int, start: int, tokens: list[int]) -> torch.Tensor:
    """Run one span; return its logits and rows side by side, [T, V + row_width]."""
    (output,) = target.step([span(slot, start, tokens)])
    assert output.rows is not None
    return torch.cat((output.logits, output.rows), dim=-1)


def span(slot: int, start: int, tokens: list[int]) -> Span:
    return Span(slot=slot, start=start, token_ids=tokens, logits_count=len(tokens), wants_rows=True)


def run_all(target: Target, slot: int, tokens: list[int], widths: Iterator[int]) -> torch.Tensor:
    """Run `tokens` from position 0 in spans of the given widths."""
    outputs = []
    start = 0
    while start < len(tokens):
        part = tokens[start : start + next(widths)]
        outputs.append(run(target, slot, start, part))
        start += len(part)
    return torch.cat(outputs)


def soil(target: Target, slot: int, seed: int) -> None:
    """Fill the slot with another session's K/V, to its end."""
    run_all(target, slot, tokens_of(CONTEXT, seed), itertools.repeat(CHUNK))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_rows_equal_those_of_transformers(
    family: str, make_model: MakeModel, load_program: LoadProgram
) -> None:
    folder = make_model(**FAMILIES[family])
    tokens = tokens_of(150)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    taps: list[torch.Tensor] = []
    for layer in reference.model.layers:
        layer.register_forward_hook(lambda _m, _i, output: taps.append(output))
    with torch.no_grad():
        logits = reference(torch.tensor([tokens])).logits[0]
    wanted = torch.cat((logits, *(tap[0] for tap in taps)), dim=-1)
    target = load_program(folder, "fp32")
    for widths in (itertools.repeat(CHUNK), itertools.cycle((7, 1, 8, 2, 30))):
        torch.testing.assert_close(run_all(target, 0, tokens, widths), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_l4_a_row_has_the_same_bits_in_spans_of_any_width(
    precision: str, make_model: MakeModel, load_program: LoadProgram
) -> None:
    target = load_program(make_model(q4_1=True), precision)
    tokens = tokens_of(CONTEXT)
    wanted = run_all(target, 0, tokens, itertools.repeat(2))
    draw = random.Random(5)
    for seed, widths in enumerate(
        (
            *(itertools.repeat(width) for width in (1, 3, 4, 5, 6, 7, 8, CHUNK)),
            iter(lambda: draw.randint(1, 8), 0),
            iter(lambda: draw.randint(1, CHUNK), 0),
        )
    ):
        slot = 1 + seed % 2
        soil(target, slot, seed)
        # The first token keeps the soiled capacity: a session that continues does not shrink.
        assert torch.equal(run_all(target, slot, tokens, widths), wanted), seed


def test_l4_rejected_rows_leave_no_trace(make_model: MakeModel, load_program: LoadProgram) -> None:
    target = load_program(make_model(q4_1=True), "8da8w")
    tokens, wrong = tokens_of(100), tokens_of(100, seed=9)
    wanted = run_all(target, 0, tokens, itertools.repeat(10))
    for start in range(0, 100, 5):
        run(target, 1, start, [tokens[start], *wrong[start : start + 7]])
        found = run(target, 1, start, tokens[start : start + 5])
        assert torch.equal(found, wanted[start : start + 5]), start


def overflow_on(folder: Path, token_id: int) -> Path:
    """Make the first layer overflow where it sees `token_id`; all weights stay finite."""
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = 0
    embedding[token_id, 0] = 100
    tensors["model.layers.0.input_layernorm.weight"][0] = 1e38
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("precision", ["fp32", "8da8w"])
def test_l4_a_step_that_overflowed_leaves_no_trace(
    precision: str, make_model: MakeModel, load_program: LoadProgram
) -> None:
    target = load_program(overflow_on(make_model(tied=False), 299), precision)
    tokens = [token % 299 for token in tokens_of(40)]
    wanted = run_all(target, 0, tokens, itertools.repeat(10))
    assert wanted.isfinite().all()
    # A window that is not committed; then the same session goes on.
    run_all(target, 1, tokens[:10], itertools.repeat(10))
    assert not run(target, 1, 10, [tokens[10], 299, *tokens[:20]]).isfinite().all()
    assert torch.equal(run(target, 1, 10, tokens[10:13]), wanted[10:13])
    # A session that ends, and another that takes its slot, or forks into it.
    for copied in (0, 20):
        assert not run(target, 1, 0, [*tokens[:30], 299]).isfinite().all()
        if copied:
            target.copy_prefix(0, 1, copied)
        found = run(target, 1, copied, tokens[copied : copied + 5])
        assert torch.equal(found, wanted[copied : copied + 5])


def test_sessions_of_one_step_do_not_touch_each_other(
    make_model: MakeModel, load_program: LoadProgram
) -> None:
    target = load_program(make_model(), "8da8w")
    prompts = [tokens_of(60, seed) for seed in (1, 2, 3)]
    alone = [run_all(target, 0, prompt, itertools.repeat(20)) for prompt in prompts]
    for start in range(0, 60, 20):
        outputs = target.step(
            [span(slot, start, prompt[start : start + 20]) for slot, prompt in enumerate(prompts)]
        )
        for output, wanted in zip(outputs, alone, strict=True):
            assert output.rows is not None
            found = torch.cat((output.logits, output.rows), dim=-1)
            assert torch.equal(found, wanted[start : start + 20])


def test_a_copied_prefix_continues_as_the_original_would(
    make_model: MakeModel, load_program: LoadProgram
) -> None:
    target = load_program(make_model(), "8da8w")
    tokens, other = tokens_of(CONTEXT), tokens_of(CONTEXT, seed=2)
    wanted = run_all(target, 0, tokens, itertools.repeat(8))
    soil(target, 1, seed=4)
    target.copy_prefix(0, 1, 70)
    assert torch.equal(run(target, 1, 70, tokens[70:75]), wanted[70:75])
    run(target, 1, 70, other[70:90])
    assert torch.equal(run(target, 0, 70, tokens[70:78]), wanted[70:78])


def test_only_what_is_wanted_is_returned(make_model: MakeModel, load_program: LoadProgram) -> None:
    target = load_program(make_model(), "8da8w")
    tokens = tokens_of(20)
    everything = run(target, 0, 0, tokens)
    vocab = target.info.vocab_size
    (output,) = target.step(
        [Span(slot=0, start=0, token_ids=tokens, logits_count=1, wants_rows=False)]
    )
    assert torch.equal(output.logits, everything[-1:, :vocab])
    assert output.rows is None
    (output,) = target.step(
        [Span(slot=0, start=0, token_ids=tokens, logits_count=0, wants_rows=True)]
    )
    assert output.logits.shape == (0, vocab)
    assert output.rows is not None
    assert torch.equal(output.rows, everything[:, vocab:])


def test_the_context_is_filled_exactly(make_model: MakeModel, load_program: LoadProgram) -> None:
    target = load_program(make_model(), "8da8w", max_context_length=128, max_prefill_chunk=64)
    tokens = tokens_of(128)
    wanted = run_all(target, 0, tokens, itertools.repeat(64))
    assert torch.equal(run(target, 0, 127, tokens[127:]), wanted[127:])


def test_a_window_of_7_drafts_is_wider_than_the_shortest_chunk(
    make_model: MakeModel, load_program: LoadProgram
) -> None:
    target = load_program(make_model(), "8da8w", max_prefill_chunk=1)
    tokens = tokens_of(16)
    wanted = run_all(target, 0, tokens, itertools.repeat(1))
    assert torch.equal(run_all(target, 1, tokens, itertools.repeat(8)), wanted)


def test_the_target_says_what_it_is(
    make_model: MakeModel, load_program: LoadProgram, program_cache: Path
) -> None:
    from graph_runtime.model_files import model_hash

    folder = make_model()
    info = load_program(folder, "8da8w").info
    assert info.model_hash == model_hash(folder, program_cache)
    assert (info.runtime, info.precision) == ("executorch", "8da8w")
    assert (info.vocab_size, info.n_layers, info.tap_layers) == (300, 2, (0, 1))
    assert (info.row_width, info.row_dtype) == (128, torch.float32)
    assert (info.min_prefill_chunk, info.max_prefill_chunk) == (1, CHUNK)
    assert (info.max_context_length, info.slot_count) == (CONTEXT, 3)


@pytest.mark.real_model
def test_l4_holds_over_all_layers_of_the_real_model(
    load_program: LoadProgram, real_model: RealModel
) -> None:
    target = load_program(
        real_model.folder,
        "8da8w",
        cache_dir=real_model.cache_dir,
        tap_layers=None,
        max_context_length=1024,
        max_prefill_chunk=128,
    )
    tokens = tokens_of(150)
    wanted = run_all(target, 0, tokens, itertools.repeat(128))
    draw = random.Random(5)
    assert torch.equal(run_all(target, 1, tokens, iter(lambda: draw.randint(1, 8), 0)), wanted)
