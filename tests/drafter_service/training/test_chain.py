"""The chain of one process, on a tiny target with drafts that are known to be right or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from drafter_service.drafter import Drafter, DraftSampling
from drafter_service.training.chain import Chain, Outcome, Question
from drafter_service.training.evaluate import acceptance_by_position, measure
from graph_runtime.choice import Sampling
from graph_runtime.load import load_target
from graph_runtime.noise import gumbel_of_words, position_words
from graph_runtime.target import Span, Target
from splitspec.rows import RowFormat
from splitspec.v1 import rows_pb2
from tests.drafters import OracleDrafter, RowsDrafter, coin_flip
from tests.tiny import write_tiny_model

LIMIT = 57
"""A multiple of 8, 4 and 2, and one more: rounds of K 7, 3 and 1 come out even."""
PROMPTS = [[5, 9, 200], list(range(10, 60)), [7], [33, 34] * 9]
SAMPLINGS = {"greedy": Sampling(), "T 1": Sampling(temperature=1.0, seed=11)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = write_tiny_model(tmp_path_factory.mktemp("m") / "tiny", seed=3)
    return load_target(
        folder=folder,
        model_id="tiny",
        runtime="torch",
        precision="fp32",
        cache_dir=folder.parent,
        tap_layers=(1,),
        max_context_length=128,
        slot_count=3,
        max_prefill_chunk=16,
        threads=None,
    )


def truth_of(target: Target, prompt: Sequence[int], sampling: Sampling, count: int) -> list[int]:
    """Return what the target alone says, a token a step, each chosen here by the formula of §7."""
    target.step([Span(slot=2, start=0, token_ids=[0], logits_count=0, wants_rows=False)])
    tokens = list(prompt)
    fed = 0
    for _ in range(count):
        while fed < len(tokens):
            span = Span(
                slot=2, start=fed, token_ids=[tokens[fed]], logits_count=1, wants_rows=False
            )
            (output,) = target.step([span])
            fed += 1
        scores = output.logits[0].double().numpy()
        if sampling.temperature:
            words = position_words(sampling.seed, len(tokens), scores.size)
            noise = gumbel_of_words(words).T.reshape(-1)[: scores.size]
            scores = scores + sampling.temperature * noise
        tokens.append(int(np.argmax(scores)))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module", params=SAMPLINGS)
def sampled(request: pytest.FixtureRequest, target: Target) -> tuple[Sampling, list[list[int]]]:
    sampling = SAMPLINGS[request.param]
    return sampling, [truth_of(target, prompt, sampling, LIMIT + 8) for prompt in PROMPTS]


def questions(sampling: Sampling, draft_count: int, limit: int = LIMIT) -> list[Question]:
    return [
        Question(
            prompt_class="a",
            prompt_ids=prompt,
            sampling=sampling,
            draft_sampling=DraftSampling.METHOD_DEFAULT,
            draft_count=draft_count,
            output_limit=limit,
        )
        for prompt in PROMPTS
    ]


def oracle(kind: str, truth: Sequence[Sequence[int]], **fields: Any) -> OracleDrafter:
    return OracleDrafter(kind, list(zip(PROMPTS, truth, strict=True)), **fields)


def answered(
    target: Target,
    drafter: Drafter,
    asked: Sequence[Question],
    *,
    stops: Sequence[int] = (),
    session_count: int = 2,
) -> list[Outcome]:
    chain = Chain(target, drafter, stop_token_ids=frozenset(stops))
    return chain.answer(asked, session_count=session_count, on_outcome=lambda _outcome: None)


def taus(outcomes: Sequence[Outcome]) -> list[float]:
    return [(len(o.answer.token_ids) - 1) / o.answer.round_count for o in outcomes]


@pytest.mark.parametrize("draft_count", [1, 3, 7])
def test_l4_the_text_is_the_target_s_own_and_a_right_draft_gives_k_plus_1(
    target: Target, sampled: tuple[Sampling, list[list[int]]], draft_count: int
) -> None:
    sampling, truth = sampled
    outcomes = answered(target, oracle("right", truth), questions(sampling, draft_count))
    assert [list(o.answer.token_ids) for o in outcomes] == [text[:LIMIT] for text in truth]
    assert taus(outcomes) == [draft_count + 1] * len(PROMPTS)
    # The last window is shorter: its bonus token is the answer's last.
    assert acceptance_by_position(outcomes, draft_count) == [1.0] * draft_count


def test_a_wrong_draft_gives_1_and_the_same_text(
    target: Target, sampled: tuple[Sampling, list[list[int]]]
) -> None:
    sampling, truth = sampled
    outcomes = answered(target, oracle("wrong", truth), questions(sampling, 5))
    assert [list(o.answer.token_ids) for o in outcomes] == [text[:LIMIT] for text in truth]
    assert taus(outcomes) == [1.0] * len(PROMPTS)
    assert acceptance_by_position(outcomes, 5) == [0.0, None, None, None, None]


@pytest.mark.parametrize("draft_count", [2, 4])
def test_a_coin_flip_draft_accepts_what_a_walk_over_the_text_says(
    target: Target, sampled: tuple[Sampling, list[list[int]]], draft_count: int
) -> None:
    sampling, truth = sampled
    outcomes = answered(target, oracle("coin-flip", truth), questions(sampling, draft_count))
    for prompt, text, outcome in zip(PROMPTS, truth, outcomes, strict=True):
        stands = [coin_flip(t, len(prompt) + i) == t for i, t in enumerate(text)]
        walked, emitted = [], 1
        while emitted < LIMIT:
            drafted = min(draft_count, LIMIT - emitted - 1)
            window = stands[emitted : emitted + drafted]
            accepted = [*window, False].index(False)
            walked.append((drafted, accepted))
            emitted += accepted + 1
        assert list(outcome.rounds) == walked


def test_an_answer_ends_with_its_stop_token_and_drafts_beyond_it_are_not_counted(
    target: Target,
) -> None:
    truth = [truth_of(target, prompt, Sampling(), 40) for prompt in PROMPTS]
    stop = truth[0][10]
    asked = questions(Sampling(), 7, limit=30)
    outcomes = answered(target, oracle("right", truth), asked, stops=[stop])
    for text, outcome in zip(truth, outcomes, strict=True):
        end = text.index(stop) + 1 if stop in text[:30] else 30
        assert list(outcome.answer.token_ids) == text[:end]
        assert sum(drafted for drafted, _ in outcome.rounds) <= end - 1
        assert all(accepted <= drafted for drafted, accepted in outcome.rounds)
    assert acceptance_by_position(outcomes, 7) == [1.0] * 7


def test_an_answer_of_one_token_has_no_round(target: Target) -> None:
    truth = [truth_of(target, prompt, Sampling(), 5) for prompt in PROMPTS]
    drafter = oracle("right", truth)
    stopped = answered(target, drafter, questions(Sampling(), 3), stops=[t[0] for t in truth])
    limited = answered(target, drafter, questions(Sampling(), 3, limit=1))
    for outcomes in (stopped, limited):
        assert [list(o.answer.token_ids) for o in outcomes] == [text[:1] for text in truth]
        assert all(not o.rounds and o.answer.round_count == 0 for o in outcomes)
    assert not drafter.tokens, "every slot is free again"


@pytest.mark.parametrize("session_count", [1, 2, 3])
def test_l2_the_drafter_gets_a_row_for_each_committed_position_and_no_other(
    target: Target, session_count: int
) -> None:
    truth = [truth_of(target, prompt, Sampling(), LIMIT) for prompt in PROMPTS]
    drafter = RowsDrafter(
        list(zip(PROMPTS, truth, strict=True)),
        row_format=RowFormat(
            kind=rows_pb2.ROW_KIND_RAW_TAPS,
            dtype=rows_pb2.ROW_DTYPE_FLOAT32,
            width=target.info.row_width,
        ),
        tap_layers=(1,),
    )
    outcomes = answered(target, drafter, questions(Sampling(), 3), session_count=session_count)
    again = answered(target, drafter, questions(Sampling(), 2), session_count=session_count)
    assert [list(o.answer.token_ids) for o in outcomes] == truth
    assert [o.answer for o in again] != [o.answer for o in outcomes]  # more rounds
    assert drafter.row_count > 2 * sum(len(prompt) for prompt in PROMPTS)
    assert drafter.changed_row_count == 0, "the same tokens gave other rows"


def test_the_rows_are_those_of_a_target_that_runs_each_position_alone(target: Target) -> None:
    class Keeping(OracleDrafter):
        """Keeps each slot's rows."""

        rows: list[bytes] = []  # noqa: RUF012 - one session

        def _run(self, work: Any) -> list[int]:
            self.rows.append(work.rows or b"")
            return super()._run(work)

    prompt = PROMPTS[1]
    text = truth_of(target, prompt, Sampling(), 20)
    drafter = Keeping(
        "coin-flip",
        [(prompt, text)],
        row_format=RowFormat(
            kind=rows_pb2.ROW_KIND_RAW_TAPS,
            dtype=rows_pb2.ROW_DTYPE_FLOAT32,
            width=target.info.row_width,
        ),
        tap_layers=(1,),
    )
    asked = [q for q in questions(Sampling(), 4, limit=20) if q.prompt_ids is prompt]
    answered(target, drafter, asked, session_count=1)
    given = torch.frombuffer(bytearray(b"".join(drafter.rows)), dtype=torch.float32)
    given = given.view(-1, target.info.row_width)
    tokens = [*prompt, *text]
    for position, row in enumerate(given):
        span = Span(
            slot=2, start=position, token_ids=[tokens[position]], logits_count=0, wants_rows=True
        )
        (output,) = target.step([span])
        assert output.rows is not None
        assert torch.equal(row, output.rows[0]), position
    assert len(given) > len(prompt) + 10


def test_l4_a_text_that_depends_on_k_is_noticed(target: Target) -> None:
    truth = [truth_of(target, prompt, Sampling(), LIMIT) for prompt in PROMPTS]
    chain = Chain(target, oracle("right", truth), stop_token_ids=())

    class Restless(Chain):
        """Answers with another seed each time."""

        count = 0

        def answer(self, questions: Sequence[Question], **fields: Any) -> list[Outcome]:
            Restless.count += 1
            sampling = Sampling(temperature=1.0, seed=Restless.count)
            return super().answer([replace(q, sampling=sampling) for q in questions], **fields)

    asked = questions(Sampling(), 1)
    one, other = measure(chain, asked, draft_counts=[1, 3], session_count=2)
    assert (one["tau"], other["tau"]) == (2.0, 4.0)
    restless = Restless(target, oracle("right", truth), stop_token_ids=())
    with pytest.raises(AssertionError, match="law L4"):
        measure(restless, asked, draft_counts=[1, 3], session_count=2)


def test_acceptance_by_position_is_what_a_hand_counts() -> None:
    class Told:
        rounds = ((3, 0), (3, 1), (3, 3), (2, 2), (1, 1))

    # Position 2 was drafted after an accepted one in three rounds, and stood in two of them;
    # position 3 in one, as the fourth round drafted two.
    told: Any = [Told()]
    assert acceptance_by_position(told, 4) == [0.8, 0.6667, 1.0, None]
