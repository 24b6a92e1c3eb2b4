"""The speculator program and its runner: behaviours E1-E23 by id, of one session in one process.

Windows of K = 1, 3 and 7 have programs of their own; the chains between run in the program of
K = 7, whose window is then padded. The copying head's proposals all stand, so what is accepted is
what a test forces.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

from splitspec.errors import UserError
from tests.eagle3_copy import VOCAB_SIZE, draft_ids, write_copy_head, write_copy_target
from tests.graph_runtime.programs.speculators import (
    CHUNK,
    CONTEXT,
    Forced,
    Recorded,
    export,
    greedy,
)

pytest.importorskip("executorch")
pytestmark = pytest.mark.usefixtures("exported_here")
PROMPT = random.Random(1).sample(range(3, VOCAB_SIZE), 12)
TOKENS = 1 + 24
CHAINS = [(1, 1), (3, 3), *((chain, 7) for chain in range(1, 8))]
"""(draft tokens a round, K of the program)."""

Load = Callable[..., Any]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of the synthetic target and of the head that copies it."""
    folder = tmp_path_factory.mktemp("copy")
    return write_copy_target(folder / "target"), write_copy_head(folder / "head")


@pytest.fixture(scope="module")
def text(copy: tuple[Path, Path]) -> list[int]:
    """Return what the target says after PROMPT, to the context's end, by `transformers`."""
    return greedy(copy[0], PROMPT, CONTEXT - len(PROMPT))


@pytest.fixture
def load(copy: tuple[Path, Path], program_cache: Path) -> Load:
    """Return a function that loads a fresh speculator of the copying pair."""

    def fresh(k: int = 3) -> Any:
        from graph_runtime.programs.speculator_load import load_speculator

        return load_speculator(export(*copy, program_cache, chain=k))

    return fresh


def run(speculator: Any, prompt: list[int] = PROMPT, **arguments: Any) -> tuple[list[int], Any]:
    """Return the emitted tokens and the statistics."""
    emitted: list[int] = []
    settings = {"max_tokens": TOKENS, **arguments}
    statistics = speculator.generate(prompt, emit=emitted.extend, **settings)
    assert statistics.emitted == len(emitted)
    return emitted, statistics


def force(speculator: Any, text: list[int], right: list[int], chain: int) -> Forced:
    """Let the first `right` proposals of each round be the target's own, the others not."""
    method = speculator.methods["draft_decode"]
    forced = Forced(method, [*PROMPT, *text], chain=chain, right=right)
    speculator.methods["draft_decode"] = forced
    return forced


def record(speculator: Any) -> dict[str, Recorded]:
    """Note every call of every method from now on."""
    for name, method in speculator.methods.items():
        speculator.methods[name] = Recorded(method)
    return dict(speculator.methods)


@pytest.mark.parametrize(("chain", "k"), CHAINS)
def test_e1_output_is_plain_greedy_output(chain: int, k: int, load: Load, text: list[int]) -> None:
    emitted, statistics = run(load(k), chain=chain)
    assert emitted == text[:TOKENS]
    assert statistics.rounds == ceil((TOKENS - 1) / (chain + 1)), "the head copies the target"


@pytest.mark.parametrize("precision", ["fp32", "8da8w"])
def test_e1_tokens_equal_those_of_the_target_s_own_program(
    precision: str, copy: tuple[Path, Path], program_cache: Path
) -> None:
    from graph_runtime.programs import load_program_target
    from graph_runtime.programs.speculator_load import load_speculator
    from graph_runtime.target import Span

    path = export(*copy, program_cache, precision=precision, draft_precision=precision)
    target = load_program_target(
        folder=copy[0],
        model_id="copy",
        precision=precision,
        cache_dir=program_cache,
        tap_layers=(0, 1),
        max_context_length=CONTEXT,
        slot_count=1,
        max_prefill_chunk=CHUNK,
        threads=None,
    )
    tokens = list(PROMPT)
    start = 0
    while len(tokens) < len(PROMPT) + 40:
        span = Span(slot=0, start=start, token_ids=tokens[start:], logits_count=1, wants_rows=False)
        (output,) = target.step([span])
        start = len(tokens)
        tokens.append(int(output.logits[0].argmax()))
    emitted, _ = run(load_speculator(path), max_tokens=40)
    assert emitted == tokens[len(PROMPT) :]


@pytest.mark.parametrize(("chain", "k"), CHAINS)
def test_e2_all_proposals_right_the_bonus_is_of_row_k(
    chain: int, k: int, load: Load, text: list[int]
) -> None:
    speculator = load(k)
    force(speculator, text, [chain], chain)
    emitted, statistics = run(speculator, chain=chain)
    assert emitted == text[:TOKENS]
    assert statistics.rounds == ceil((TOKENS - 1) / (chain + 1))


@pytest.mark.parametrize(
    ("chain", "k", "right"), [(c, k, a) for c, k in CHAINS for a in range(1, c)]
)
def test_e3_some_proposals_right(
    chain: int, k: int, right: int, load: Load, text: list[int]
) -> None:
    speculator = load(k)
    force(speculator, text, [right], chain)
    emitted, statistics = run(speculator, chain=chain)
    assert emitted == text[:TOKENS]
    whole, rest = divmod(TOKENS - 1, right + 1)
    assert statistics.rounds == whole + bool(rest)
    assert statistics.accepted == right * whole + rest


@pytest.mark.parametrize(("chain", "k"), CHAINS)
def test_e4_all_proposals_wrong_every_round_emits_one_token(
    chain: int, k: int, load: Load, text: list[int]
) -> None:
    speculator = load(k)
    force(speculator, text, [0], chain)
    emitted, statistics = run(speculator, chain=chain)
    assert emitted == text[:TOKENS]
    assert (statistics.tau, statistics.accepted) == (1.0, 0)


def first_new(text: list[int], indices: range) -> int:
    """Return the first of `indices` whose token has not been said before."""
    return next(i for i in indices if text[i] not in text[:i])


def test_e5_an_accepted_proposal_that_is_a_stop_token_ends_the_output(
    load: Load, text: list[int]
) -> None:
    speculator = load(3)
    force(speculator, text, [3], 3)
    end = first_new(text, range(1, 4))  # the first round accepts 1, 2, 3 and adds 4
    emitted, statistics = run(speculator, stop_token_ids=[text[end]])
    assert emitted == text[: end + 1]
    assert (statistics.finish, statistics.rounds, statistics.accepted) == ("stop", 1, end)


def test_e6_a_correction_that_is_a_stop_token_ends_the_output(load: Load, text: list[int]) -> None:
    speculator = load(3)
    force(speculator, text, [1], 3)
    end = next(i for i in (2, 4, 6, 8) if text[i] not in text[:i])  # rounds of two
    emitted, statistics = run(speculator, stop_token_ids=[text[end]])
    assert emitted == text[: end + 1]
    assert (statistics.finish, statistics.rounds) == ("stop", end // 2)


def test_e7_a_prefill_bonus_that_is_a_stop_token_is_all_there_is(
    load: Load, text: list[int]
) -> None:
    emitted, statistics = run(load(3), stop_token_ids=[text[0]])
    assert emitted == text[:1]
    assert statistics.finish == "stop"
    assert statistics.calls == {"prefill": 1, "target_verify": 0, "draft_decode": 0}


def test_e8_one_token_costs_no_draft_call(load: Load, text: list[int]) -> None:
    emitted, statistics = run(load(3), max_tokens=1)
    assert emitted == text[:1]
    assert statistics.calls == {"prefill": 1, "target_verify": 0, "draft_decode": 0}


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_e9_no_tokens_wanted_is_an_error(max_tokens: int, load: Load) -> None:
    with pytest.raises(UserError, match=f"max tokens is {max_tokens}; expected at least 1"):
        run(load(3), max_tokens=max_tokens)


@pytest.mark.parametrize("max_tokens", range(2, 10))
def test_e10_the_budget_is_met_exactly_inside_a_round(
    max_tokens: int, load: Load, text: list[int]
) -> None:
    emitted, statistics = run(load(3), max_tokens=max_tokens)
    assert emitted == text[:max_tokens]
    assert statistics.finish == "length"


@pytest.mark.parametrize("length", [0, 1, CHUNK + 1])
def test_e11_a_prompt_outside_the_prefill_s_range_is_refused_before_any_call(
    length: int, load: Load
) -> None:
    speculator = load(3)
    methods = record(speculator)
    with pytest.raises(UserError, match=f"the prompt has {length} tokens; the program takes 2 to"):
        run(speculator, [5] * length)
    assert not any(method.inputs for method in methods.values())


@pytest.mark.parametrize("length", [2, CHUNK])
def test_e11_the_shortest_and_the_longest_prompt_are_answered(
    length: int, load: Load, copy: tuple[Path, Path]
) -> None:
    prompt = (PROMPT * 4)[:length]
    assert run(load(3), prompt, max_tokens=6)[0] == greedy(copy[0], prompt, 6)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
def test_an_unknown_token_of_the_prompt_is_refused(token: int, load: Load) -> None:
    with pytest.raises(UserError, match=f"token id {token} .* 0..{VOCAB_SIZE - 1}"):
        run(load(3), [5, token])


@pytest.mark.parametrize("chain", [0, 4])
def test_a_chain_that_the_program_has_not_is_refused(chain: int, load: Load) -> None:
    with pytest.raises(UserError, match=f"chain is {chain}; the program takes 1 to 3"):
        run(load(3), chain=chain)


@pytest.mark.parametrize("right", range(4))
def test_e13_no_position_beyond_the_context_is_written(
    right: int, load: Load, text: list[int]
) -> None:
    speculator = load(3)
    force(speculator, text, [right], 3)
    methods = record(speculator)
    emitted, statistics = run(speculator, max_tokens=10_000)
    positions = [call[-1] for method in methods.values() for call in method.inputs]
    assert max(int(p.max()) for p in positions) < CONTEXT
    assert emitted == text[: len(emitted)]
    assert statistics.finish == "length"
    length = len(PROMPT) + len(emitted) - 1  # the last token is pending
    assert length + 3 > CONTEXT - 1, "it ended although a window was left"


def test_e13_a_prompt_whose_first_window_does_not_fit_gets_the_bonus_alone(
    copy: tuple[Path, Path], program_cache: Path
) -> None:
    from graph_runtime.programs.speculator_load import load_speculator

    speculator = load_speculator(
        export(*copy, program_cache, chain=7, max_context_length=20, max_prefill_chunk=19)
    )
    prompt = (PROMPT * 2)[:12]  # P + K is the last position
    assert run(speculator, prompt)[1].rounds == 1
    for length in (13, 19):
        emitted, statistics = run(speculator, (PROMPT * 2)[:length])
        assert emitted == greedy(copy[0], (PROMPT * 2)[:length], 1)
        assert statistics.calls == {"prefill": 1, "target_verify": 0, "draft_decode": 0}


@pytest.mark.parametrize("right", range(4))
@pytest.mark.parametrize("max_tokens", [2, 25, 10_000])
def test_e14_one_target_call_a_round_and_k_draft_calls(
    right: int, max_tokens: int, load: Load, text: list[int]
) -> None:
    speculator = load(3)
    force(speculator, text, [right], 3)
    methods = record(speculator)
    _, statistics = run(speculator, max_tokens=max_tokens)
    # At the context's end nothing is drafted for a window that does not fit.
    rounds = statistics.rounds
    assert statistics.calls == {"prefill": 1, "target_verify": rounds, "draft_decode": 3 * rounds}
    assert {name: len(m.inputs) for name, m in methods.items()} == statistics.calls
    assert statistics.drafted == 3 * rounds
    assert {call[0].shape[1] for call in methods["target_verify"].inputs} == {4}


@pytest.mark.parametrize("right", range(4))
def test_e15_e16_draft_slots_get_the_target_s_rows_and_the_next_tokens(
    right: int, load: Load, text: list[int]
) -> None:
    speculator = load(3)
    force(speculator, text, [right], 3)
    methods = record(speculator)
    run(speculator)
    sequence, length = [*PROMPT, *text], len(PROMPT)
    seeds = methods["draft_decode"].inputs[::3]
    rows = methods["prefill"].outputs[0][1]
    for i, (tokens, features, positions) in enumerate(seeds):
        start = 0 if i == 0 else length + (i - 1) * (right + 1)
        count = length if i == 0 else right + 1
        assert positions.tolist() == list(range(start, start + count))
        assert tokens[0].tolist() == sequence[start + 1 : start + count + 1]
        assert torch.equal(features, rows[:, :count])
        rows = methods["target_verify"].outputs[i][1]


def test_e15_the_unshifted_pairing_gives_other_proposals(load: Load, text: list[int]) -> None:
    speculator = load(3)
    known = [*PROMPT, *text]
    length = len(PROMPT) + 20
    positions = torch.arange(length)
    prefill, draft = speculator.methods["prefill"], speculator.methods["draft_decode"]
    _, features = prefill.execute([torch.tensor([known[:length]]), positions])
    shifted, _ = draft.execute([torch.tensor([known[1 : length + 1]]), features, positions])
    unshifted, _ = draft.execute([torch.tensor([known[:length]]), features, positions])
    said = slice(len(PROMPT) - 1, length)  # what follows the prompt's tokens is nobody's choice
    assert shifted[0, said].tolist() == known[len(PROMPT) + 1 : length + 2]
    assert unshifted[0, said].tolist() != known[len(PROMPT) + 1 : length + 2]


def test_e17_every_proposal_is_an_id_of_the_draft_s_part_of_the_vocabulary(
    load: Load,
) -> None:
    speculator = load(7)
    methods = record(speculator)
    run(speculator)
    proposed = {i for ids, _ in methods["draft_decode"].outputs for i in ids[0].tolist()}
    assert len(proposed) > 10
    assert proposed <= {*draft_ids().tolist()}


@pytest.mark.parametrize("right", range(4))
def test_e20_draft_slots_are_written_without_a_gap(right: int, load: Load, text: list[int]) -> None:
    speculator = load(3)
    force(speculator, text, [right], 3)
    methods = record(speculator)
    run(speculator)
    committed = valid = 0
    for i, (tokens, features, positions) in enumerate(methods["draft_decode"].inputs):
        start, count = int(positions[0]), len(positions)
        is_seed = i % 3 == 0
        assert start == (committed if is_seed else valid)
        assert tokens.shape == (1, count)
        assert features.shape[:2] == (1, count)
        assert positions.tolist() == list(range(start, start + count))
        valid = start + count
        committed = valid if is_seed else committed


def test_e21_tau_leaves_the_bonus_out_and_is_0_without_rounds(load: Load, text: list[int]) -> None:
    speculator = load(3)
    assert run(speculator, max_tokens=1)[1].tau == 0.0
    force(speculator, text, [0, 3], 3)
    _, statistics = run(speculator, max_tokens=10)
    assert (statistics.rounds, statistics.tau) == (3, pytest.approx(9 / 3))


def test_e22_a_second_request_is_answered_as_by_a_fresh_program(load: Load) -> None:
    requests = [PROMPT, (PROMPT * 3)[5:35], PROMPT[:3]]
    used = load(3)
    for prompt in requests:
        again, fresh = record(used), load(3)
        once = record(fresh)
        assert run(used, prompt)[0] == run(fresh, prompt)[0]
        for name in once:
            for one, other in zip(once[name].outputs, again[name].outputs, strict=True):
                assert all(map(torch.equal, one, other)), name


def test_e22_what_is_not_finite_does_not_outlive_its_request(load: Load) -> None:
    speculator = load(3)
    expected = run(speculator, max_tokens=5)
    draft = speculator.methods["draft_decode"]
    broken = torch.full((1, 30, speculator.metadata.hidden_size), float("nan"))
    draft.execute([torch.ones(1, 30, dtype=torch.int64), broken, torch.arange(30)])
    again = run(speculator, max_tokens=5)
    assert again[0] == expected[0]
    assert again[1].accepted == expected[1].accepted == 3
