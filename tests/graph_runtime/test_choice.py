"""The one rule for choosing tokens, against a slow loop over the whole vocabulary."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_runtime.choice import Sampling, choose
from splitspec.errors import InvalidArgument, NonFiniteLogits
from tests.graph_runtime.test_noise import reference_noise

DRAWS = 60_000


def reference_law(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Return the kept ids and their unnormalised probabilities, by plain loops."""
    peak = max(logits)
    scaled = [(value - peak) / sampling.temperature for value in logits]
    order = sorted(range(len(logits)), key=lambda token: (-scaled[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = {token: math.exp(scaled[token]) for token in order}
    if sampling.top_p < 1.0:
        total = sum(weights.values())
        kept, mass = [], 0.0
        for token in order:
            if mass >= sampling.top_p * total:
                break
            kept.append(token)
            mass += weights[token]
        order = kept
    return {token: weights[token] for token in order if weights[token] >= sampling.min_p}


def reference_choice(logits: list[float], sampling: Sampling, position: int) -> int:
    """Return the chosen token by a loop over every kept token."""
    if sampling.temperature == 0.0:
        return logits.index(max(logits))
    peak = max(logits)
    scores = {
        token: (logits[token] - peak)
        + sampling.temperature * reference_noise(sampling.seed, position, token)
        for token in reference_law(logits, sampling)
    }
    best = max(scores.values())
    return min(token for token, score in scores.items() if score == best)


values = st.one_of(
    st.floats(-30, 30, width=32),
    st.sampled_from([0.0, 1.0, -1.0, 5.0]),  # ties
    st.just(-math.inf),
)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.7, 100.0, 1e-300]),
    top_k=st.sampled_from([0, 1, 2, 3, 7, 50]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    seed=st.integers(0, 2**64 - 1),
)


@st.composite
def windows(draw: st.DrawFn) -> list[list[float]]:
    """Draw one to five rows of one vocabulary, each with a finite largest logit."""
    size = draw(st.integers(1, 24))
    row = st.lists(values, min_size=size, max_size=size).filter(lambda r: max(r) > -math.inf)
    return draw(st.lists(row, min_size=1, max_size=5))


@settings(max_examples=250, deadline=None)
@given(rows=windows(), sampling=samplings, start=st.integers(0, 2**20))
def test_V2_V3_every_choice_equals_the_slow_loop_over_the_whole_vocabulary(
    rows: list[list[float]], sampling: Sampling, start: int
) -> None:
    positions = range(start, start + len(rows))
    chosen = choose(torch.tensor(rows), sampling, positions)
    rows32 = torch.tensor(rows).tolist()
    assert chosen == [
        reference_choice(row, sampling, position)
        for row, position in zip(rows32, positions, strict=True)
    ]


@settings(max_examples=150, deadline=None)
@given(rows=windows(), sampling=samplings, data=st.data())
def test_columns_that_stand_for_target_ids_choose_as_those_ids_of_the_whole_vocabulary_would(
    rows: list[list[float]], sampling: Sampling, data: st.DataObject
) -> None:
    size = len(rows[0])
    ids = data.draw(st.sets(st.integers(0, 300), min_size=size, max_size=size).map(sorted))
    chosen = choose(torch.tensor(rows), sampling, range(7, 7 + len(rows)), target_ids=np.array(ids))
    # A token of the target's vocabulary that the map does not name cannot be chosen.
    spread = torch.full((len(rows), 301), -math.inf)
    spread[:, ids] = torch.tensor(rows)
    assert chosen == [
        reference_choice(row, sampling, 7 + t) for t, row in enumerate(spread.tolist())
    ]


@settings(max_examples=15, deadline=None)
@given(
    vocab_size=st.sampled_from([3000, 9001]),  # from 4096 survivors on, most are dropped unseen
    seed=st.integers(0, 2**64 - 1),
    spread=st.sampled_from([1.0, 4.0, 12.0]),
    kwargs=st.sampled_from(
        [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 900, "top_p": 0.999}]
    ),
)
def test_choices_in_a_large_vocabulary_equal_the_slow_loop(
    vocab_size: int, seed: int, spread: float, kwargs: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits = torch.randn(2, vocab_size, generator=generator) * spread
    sampling = Sampling(temperature=1.0, seed=seed, **kwargs)
    expected = [reference_choice(row, sampling, 40 + t) for t, row in enumerate(logits.tolist())]
    assert choose(logits, sampling, [40, 41]) == expected


@pytest.mark.parametrize("kwargs", [{}, {"top_k": 900}, {"top_p": 0.999}, {"min_p": 1e-4}])
def test_noise_of_a_reduced_vocabulary_is_that_of_the_target_ids(kwargs: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randperm(20_000, generator=generator)[:6000].sort().values
    logits = torch.randn(3, 6000, generator=generator)
    sampling = Sampling(temperature=1.0, seed=11, **kwargs)
    positions = [90, 91, 92]
    chosen = choose(logits, sampling, positions, target_ids=ids.numpy())
    whole = torch.full((3, 20_000), -math.inf)
    whole[:, ids] = logits
    assert chosen == choose(whole, sampling, positions)
    assert chosen != [int(ids[c]) for c in choose(logits, sampling, positions)]


def test_V2_the_lowest_target_id_of_equal_logits_is_taken() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 0.0]])
    assert choose(logits, Sampling(), [0], target_ids=np.array([3, 8, 20, 21])) == [8]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0, seed=7),
        Sampling(temperature=0.7, top_p=0.9, seed=2**64 - 1),
        Sampling(temperature=1.3, top_k=50, min_p=0.01, seed=1),
    ],
)
def test_V8_a_row_is_chosen_alike_alone_and_in_any_window(sampling: Sampling) -> None:
    logits = torch.randn(8, 5003, generator=torch.Generator().manual_seed(1)) * 3
    positions = list(range(100, 108))
    together = choose(logits, sampling, positions)
    alone = [choose(logits[t : t + 1], sampling, positions[t : t + 1])[0] for t in range(8)]
    shifted = choose(logits[3:], sampling, positions[3:])
    assert together == alone
    assert together[3:] == shifted


@pytest.mark.parametrize("right", range(6))
def test_rows_after_a_rejection_are_left_out_and_the_others_are_as_ever(right: int) -> None:
    logits = torch.randn(6, 900, generator=torch.Generator().manual_seed(3))
    sampling = Sampling(temperature=1.0, seed=right)
    truth = choose(logits, sampling, range(6))
    drafts = [token if t < right else (token + 1) % 900 for t, token in enumerate(truth[:5])]
    chosen = choose(logits, sampling, range(6), drafts)
    assert chosen == truth[: right + 1]


def test_V2_greedy_takes_the_lowest_of_equal_logits_and_ignores_the_seed() -> None:
    logits = torch.zeros(3, 49152)
    logits[1, [7, 40_000]] = 2.0
    for seed in (0, 1):
        assert choose(logits, Sampling(seed=seed), [1, 2, 3]) == [0, 7, 0]


def test_V3_ties_at_the_top_k_border_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0]])
    sampling = Sampling(temperature=50.0, top_k=2, seed=3)
    chosen = {choose(logits, sampling, [p])[0] for p in range(200)}
    assert chosen == {0, 1}


def test_V3_the_token_that_crosses_top_p_is_kept_and_the_next_is_not() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    chosen = {
        choose(logits, Sampling(temperature=1.0, top_p=0.6, seed=3), [p])[0] for p in range(99)
    }
    assert chosen == {0, 1}
    chosen = {
        choose(logits, Sampling(temperature=1.0, top_p=0.4, seed=3), [p])[0] for p in range(99)
    }
    assert chosen == {0}


def test_V3_top_p_measures_the_mass_that_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the two that top-k leaves, the first holds 4/7 > 0.55: alone it crosses.
    sampling = Sampling(temperature=1.0, top_k=2, top_p=0.55, seed=3)
    assert {choose(logits, sampling, [p])[0] for p in range(99)} == {0}


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.3},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_V1_the_empirical_law_of_60_000_draws_is_the_truncated_softmax(
    kwargs: dict[str, Any],
) -> None:
    logits = [1.0, 0.0, 2.0, -1.0, 1.5, 1.0, -4.0]
    sampling = Sampling(**{"temperature": 1.0, "seed": 20_261_201, **kwargs})
    weights = reference_law(logits, sampling)
    total = sum(weights.values())
    rows = torch.tensor([logits]).expand(DRAWS, -1)
    chosen = torch.tensor(choose(rows, sampling, range(DRAWS)))
    frequencies = torch.bincount(chosen, minlength=len(logits)) / DRAWS
    for token, frequency in enumerate(frequencies.tolist()):
        assert frequency == pytest.approx(weights.get(token, 0.0) / total, abs=0.02)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_name_their_position(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    with pytest.raises(NonFiniteLogits, match="position 8 is") as caught:
        choose(logits, Sampling(temperature=temperature), [7, 8, 9])
    assert caught.value.metadata == {"position": "8"}


def test_a_row_of_nothing_but_minus_infinity_has_no_choice() -> None:
    with pytest.raises(NonFiniteLogits):
        choose(torch.full((1, 4), -math.inf), Sampling(), [0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Sampling(**{field: value})
    assert refused.value.metadata["field"] == f"sampling.{field}"
