"""Conversations that a tiny target writes: its own choices, the template's tokens, its roles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from drafter_service.training import generation
from drafter_service.training.generation import PassPlan, RowWriter
from drafter_service.training.store import Pass
from drafter_service.training.target import load_training_target
from drafter_service.training.turns import Turns, read_turns
from graph_runtime.load import load_torch_target
from graph_runtime.target import Span
from tests.drafter_service.training.chat_templates import TEMPLATES, write_templated_model

LENGTH = 200
SEED_TEXT = "What is the time in the town?"
MODELS = {
    "llama": {"family": "llama"},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "windows": {"family": "mistral", "config": {"sliding_window": 70}},
}


def write(folder: Path, plan: PassPlan, *, length: int = LENGTH, device: str = "cpu") -> Pass:
    target = load_training_target(
        folder, device=device, precision="fp32", cache_dir=folder / "cache"
    )
    writer = RowWriter(target, read_turns(folder), rows=len(plan.forced), length=length)
    done: list[int] = []
    written, _ = writer.write(plan, done.append)
    assert sum(done) == length - 1
    return written


def plan_of(turns: Turns, temperatures: list[float], *, seeded: int, seed: int = 4) -> PassPlan:
    first_turn = [*turns.opening, *turns.encode(SEED_TEXT), turns.user_end]
    forced = [first_turn if i < seeded else turns.opening for i in range(len(temperatures))]
    return PassPlan(forced=forced, temperatures=temperatures, seed=seed)


def served_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return [B, S, V] of the served target in plain torch."""
    rows, length = tokens.shape
    target = load_torch_target(
        folder=folder,
        model_id="tiny",
        precision="fp32",
        cache_dir=folder / "cache",
        tap_layers=(0,),
        max_context_length=length,
        slot_count=rows,
        max_prefill_chunk=length,
        threads=None,
    )
    spans = [
        Span(slot=i, start=0, token_ids=row.tolist(), logits_count=length, wants_rows=False)
        for i, row in enumerate(tokens)
    ]
    return torch.stack([output.logits for output in target.step(spans)])


@pytest.mark.parametrize("model", MODELS)
def test_greedy_answers_are_the_served_targets(model: str, tmp_path: Path) -> None:
    folder = write_templated_model(tmp_path / "tiny", TEMPLATES["plain"], **MODELS[model])
    written = write(folder, plan_of(read_turns(folder), [0.0, 0.0, 1.0], seeded=2))
    logits = served_logits(folder, written.tokens)[:, :-1]
    taken = logits.gather(2, written.tokens[:, 1:, None].long())[..., 0]
    best = logits.amax(dim=2)
    answered = written.roles[:, 1:] == 1
    greedy = answered[:2]
    assert greedy.sum() > 100
    torch.testing.assert_close(taken[:2][greedy], best[:2][greedy], rtol=1e-4, atol=1e-4)
    assert (taken[2] < best[2] - 0.1).any(), "the third row is sampled"


def test_user_turns_are_sampled_from_the_targets_distribution(tmp_path: Path) -> None:
    folder = write_templated_model(tmp_path / "tiny", TEMPLATES["plain"], logit_scale=0.15)
    turns = read_turns(folder)
    rows, start = 3000, len(turns.opening)
    written = write(folder, plan_of(turns, [0.0] * rows, seeded=0), length=start + 1)
    wanted = served_logits(folder, written.tokens[:1])[0, start - 1].softmax(dim=0)
    special = [token for token in range(300) if token not in turns.text_tokens]
    stopped = wanted[special].sum()  # every special token ends the turn
    wanted[special] = 0.0
    wanted[turns.user_end] = stopped
    found = torch.bincount(written.tokens[:, start], minlength=300)
    assert found[wanted == 0].sum() == 0
    often = rows * wanted > 5
    expected = torch.cat((rows * wanted[often], rows * wanted[~often].sum()[None]))
    counted = torch.cat((found[often], found[~often].sum()[None]))
    chi_square = ((counted - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    assert degrees > 50
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_row_is_what_the_template_would_have_rendered(name: str, tmp_path: Path) -> None:
    folder = write_templated_model(tmp_path / "tiny", TEMPLATES[name], logit_scale=0.15)
    turns = read_turns(folder)
    written = write(folder, plan_of(turns, [1.0] * 6 + [0.0] * 2, seeded=3), length=500)
    reference = AutoTokenizer.from_pretrained(folder)
    turn_counts = []
    for row, roles in zip(written.tokens.tolist(), written.roles.tolist(), strict=True):
        messages, wanted_roles = parsed(turns, row)
        turn_counts.append(len(messages))
        if not messages:  # a first user turn that fills the row
            continue
        rendered = reference.apply_chat_template(
            messages, add_generation_prompt=messages[-1]["role"] == "user", tokenize=False
        )
        text = reference.decode(row)
        assert text[: len(rendered)] == rendered
        # Forced ends are no choices; all else in an answer is.
        differing = [i for i in range(len(row)) if roles[i] != wanted_roles[i]]
        assert all(row[i] == turns.answer_end and roles[i] == 0 for i in differing)
    assert max(turn_counts) >= 4
    assert SEED_TEXT in reference.decode(written.tokens[2].tolist())


def parsed(turns: Turns, row: list[int]) -> tuple[list[dict[str, str]], list[int]]:
    """Return a row's finished turns, and roles as if the target had chosen all of its answers."""
    messages: list[dict[str, str]] = []
    roles = [0] * len(row)
    position = len(turns.opening)
    assert row[:position] == list(turns.opening)
    role, end, gap = "user", turns.user_end, turns.answer_opening
    while end in row[position:]:
        stop = row.index(end, position)
        messages.append({"role": role, "content": turns.tokenizer.decode(row[position:stop])})
        if role == "assistant":
            roles[position : stop + 1] = [1] * (stop + 1 - position)
        position = stop + 1 + len(gap)
        assert row[stop + 1 : position] == list(gap)[: len(row) - stop - 1]
        if role == "user":
            role, end, gap = "assistant", turns.answer_end, turns.user_opening
        else:
            role, end, gap = "user", turns.user_end, turns.answer_opening
    if role == "assistant":
        roles[position:] = [1] * len(roles[position:])
    return messages, roles


def test_the_same_plan_gives_the_same_rows_whatever_was_written_before(tmp_path: Path) -> None:
    folder = write_templated_model(tmp_path / "tiny", TEMPLATES["system"])
    turns = read_turns(folder)
    target = load_training_target(
        folder, device="cpu", precision="fp32", cache_dir=folder / "cache"
    )
    plan = plan_of(turns, [0.0, 0.7, 1.0, 1.0], seeded=2)
    fresh, _ = RowWriter(target, turns, rows=4, length=100).write(plan, lambda _: None)
    used = RowWriter(target, turns, rows=4, length=100)
    other, _ = used.write(plan_of(turns, [1.0] * 4, seeded=0, seed=5), lambda _: None)
    again, _ = used.write(plan, lambda _: None)
    assert torch.equal(fresh.tokens, again.tokens)
    assert torch.equal(fresh.roles, again.roles)
    assert not torch.equal(fresh.tokens, other.tokens)
    assert fresh.temperatures.tolist() == pytest.approx([0.0, 0.7, 1.0, 1.0])


def test_an_answer_that_repeats_itself_is_ended(tmp_path: Path) -> None:
    # A tied head of large weights: the token that is read is the token that is said.
    folder = write_templated_model(tmp_path / "tiny", TEMPLATES["plain"], logit_scale=3.0)
    turns = read_turns(folder)
    target = load_training_target(
        folder, device="cpu", precision="fp32", cache_dir=folder / "cache"
    )
    writer = RowWriter(target, turns, rows=2, length=300)
    written, loop_ends = writer.write(plan_of(turns, [0.0, 0.0], seeded=2), lambda _: None)
    forced_ends = (written.tokens == turns.answer_end) & (written.roles == 0)
    ends = [torch.nonzero(row).flatten().tolist() for row in forced_ends]
    late = [[p for p in row if p > len(turns.opening) + 40] for row in ends]
    assert loop_ends >= 2
    longest = generation.LOOP_TOKENS + generation.LOOP_LAG + generation.GUARD_STEPS
    for row, places in zip(written.tokens.tolist(), late, strict=True):
        assert places, "a loop was ended"
        assert not re.search(rf"(\d+ )\1{{{longest}}}", " ".join(map(str, row)) + " ")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", ["llama", "windows"])
def test_captured_steps_write_the_served_targets_greedy_answers(model: str, tmp_path: Path) -> None:
    folder = write_templated_model(tmp_path / "tiny", TEMPLATES["system"], **MODELS[model])
    plan = plan_of(read_turns(folder), [0.0, 0.0, 1.0, 0.7], seeded=2)
    written = write(folder, plan, device="cuda")
    again = write(folder, plan, device="cuda")
    assert torch.equal(written.tokens, again.tokens)
    logits = served_logits(folder, written.tokens)[:, :-1]
    taken = logits.gather(2, written.tokens[:, 1:, None].long())[..., 0]
    greedy = written.roles[:2, 1:] == 1
    assert greedy.sum() > 100
    torch.testing.assert_close(
        taken[:2][greedy], logits.amax(dim=2)[:2][greedy], rtol=1e-2, atol=1e-2
    )
