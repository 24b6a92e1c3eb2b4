"""L4 with DFlash drafters through three processes: a planted draft that is right, a random one.

Torch and ExecuTorch, raw rows and fused rows, greedy and sampled, K 1..7, nine sessions at once,
prompts of one prefill chunk and of three.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from splitspec.v1 import generation_pb2 as pb
from tests.dflash_planted import (
    LEAST_WINDOW,
    MASK_TOKEN_ID,
    VOCAB_SIZE,
    write_anchor_draft,
    write_planted_draft,
    write_planted_target,
    write_random_draft,
)
from tests.system.cluster import Answer, Cluster
from tests.system.conftest import DFLASH_FLAGS, DFLASH_VERIFIER

CONTEXT = 128
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T 0.7 top-p 0.9": {"temperature": 0.7, "top_p": 0.9, "seed": 2**63 + 11},
    "T 1.0": {"temperature": 1.0, "seed": 5},
}
PROMPT_LENGTHS = (1, 12, 70)
"""The last one takes three prefill chunks."""
MOST_TOKENS = 17
FEW_TOKENS = 9
"""Of an answer that takes nearly a round a token."""
PERFECT = ("torch", "program", "windowed")
"""Drafters that draft as the target samples: they are always right."""


def token_count(draft_count: int) -> int:
    """Return the prefill bonus and as many whole rounds of K + 1 tokens as there is room for."""
    return 1 + (MOST_TOKENS - 1) // (draft_count + 1) * (draft_count + 1)


@dataclass
class Case:
    """One request and what the target alone answers."""

    prompt: list[int]
    sampling: dict[str, Any]
    truth: list[int] = field(default_factory=list)

    def run(
        self, cluster: Cluster, coordinator: str, draft_count: int, tokens: int | None
    ) -> Answer:
        return cluster.generate(
            coordinator,
            token_ids=pb.TokenIds(ids=self.prompt),
            sampling=self.sampling,
            max_tokens=tokens,
            ignore_eos=True,
            draft_count=draft_count,
        )


@dataclass
class Served:
    """The running cluster, and the cases with the target's own answers."""

    cluster: Cluster
    cases: list[Case]
    to_the_end: list[Case]
    """Those whose answer fills the context; see `ROOMS`."""

    def answers(
        self, drafter: str, draft_count: int, tokens: int | None, cases: list[Case] | None = None
    ) -> list[pb.GenerationStatistics]:
        """Answer cases at once through a drafter: the target's own tokens, or it fails."""
        cases = self.cases if cases is None else cases
        with ThreadPoolExecutor(len(cases)) as pool:
            answers = list(
                pool.map(
                    lambda case: case.run(
                        self.cluster, f"coordinator-{drafter}", draft_count, tokens
                    ),
                    cases,
                )
            )
        for case, answer in zip(cases, answers, strict=True):
            assert answer.token_ids == case.truth[:tokens]
        return [answer.finish.statistics for answer in answers]

    def side_by_side(
        self, drafters: tuple[str, ...], draft_count: int, tokens: int
    ) -> list[list[pb.GenerationStatistics]]:
        """Answer all cases through several drafters at the same time."""
        with ThreadPoolExecutor(len(drafters)) as pool:
            return list(pool.map(lambda one: self.answers(one, draft_count, tokens), drafters))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, program_cache: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("d")
    target = write_planted_target(folder / "target")
    planted = write_planted_draft(folder / "planted")
    drafters = {
        "torch": (planted, "fused", ()),
        # Of two flags the last one counts.
        "program": (planted, "raw", ("--runtime", "executorch")),
        "windowed": (
            write_planted_draft(folder / "windowed", sliding_window=LEAST_WINDOW, causal=False),
            "raw",
            (),
        ),
        "anchor": (write_anchor_draft(folder / "anchor"), "raw", ("--draft-sampling", "argmax")),
        "random": (write_random_draft(folder / "random"), "raw", ("--draft-sampling", "argmax")),
    }
    cluster = Cluster(folder, target, [*DFLASH_VERIFIER, "--fuse-for", str(planted)], program_cache)
    try:
        cluster.start_verifier(wait=False)
        for name, (draft, rows, flags) in drafters.items():
            cluster.start_dflash(name, draft, *DFLASH_FLAGS, "--rows", rows, *flags, wait=False)
        cluster.wait_all_serving()
        for name in drafters:
            cluster.start_coordinator(name, "--draft-seconds", "60", wait=False)
        alone = cluster.start_coordinator(None, wait=False)
        cluster.wait_all_serving()
        cases, to_the_end = _cases(), _cases_to_the_end()
        for case in cases:
            case.truth = case.run(cluster, alone, 0, MOST_TOKENS).token_ids
        for case in to_the_end:
            case.truth = case.run(cluster, alone, 0, None).token_ids
        yield Served(cluster, cases, to_the_end)
    finally:
        cluster.close()


def _cases() -> list[Case]:
    numbers = random.Random(0)
    prompts = [[numbers.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in PROMPT_LENGTHS]
    # A real token that is the mask's id is a token like any other.
    prompts[1][-3:] = [MASK_TOKEN_ID, 40, MASK_TOKEN_ID]
    return [Case(prompt, sampling) for prompt in prompts for sampling in SAMPLINGS.values()]


ROOMS = (1, 2, 3, 5, 7, 8, 9, 16)
"""Positions after a prompt until the context ends."""


def _cases_to_the_end() -> list[Case]:
    numbers = random.Random(1)
    prompts = [numbers.choices(range(3, VOCAB_SIZE), k=CONTEXT - room) for room in ROOMS]
    return [Case(prompt, SAMPLINGS["T 1.0"]) for prompt in prompts]


@pytest.mark.parametrize("draft_count", range(1, 8))
def test_l4_d1_d16_a_planted_draft_emits_k_plus_1_of_the_targets_tokens_a_round(
    served: Served, draft_count: int
) -> None:
    tokens = token_count(draft_count)
    rounds = (tokens - 1) // (draft_count + 1)
    for answered in served.side_by_side(PERFECT, draft_count, tokens):
        for statistics in answered:
            assert list(statistics.acceptance_length_counts) == [0] * draft_count + [rounds]
            assert statistics.mean_acceptance_length == draft_count + 1


@pytest.mark.parametrize("draft_count", range(1, 8))
def test_l4_d1_argmax_drafts_of_an_anchor_are_right_where_the_target_is_greedy_and_else_in_part(
    served: Served, draft_count: int
) -> None:
    tokens = token_count(draft_count)
    rounds = (tokens - 1) // (draft_count + 1)
    answered = served.answers("anchor", draft_count, tokens)
    for case, statistics in zip(served.cases, answered, strict=True):
        everything = [0] * draft_count + [rounds]
        if case.sampling == SAMPLINGS["greedy"]:
            assert list(statistics.acceptance_length_counts) == everything
    at_1 = [s for c, s in zip(served.cases, answered, strict=True) if c.sampling.get("seed") == 5]
    accepted, drafted = (
        sum(getattr(statistics, f"{name}_token_count") for statistics in at_1)
        for name in ("accepted", "draft")
    )
    assert 0 < accepted < drafted


@pytest.mark.parametrize("draft_count", range(1, 8))
def test_l4_d1_a_random_draft_costs_drafts_and_never_changes_the_text(
    served: Served, draft_count: int
) -> None:
    answered = served.answers("random", draft_count, FEW_TOKENS)
    rounds = sum(statistics.round_count for statistics in answered)
    accepted = sum(statistics.accepted_token_count for statistics in answered)
    assert all(statistics.draft_token_count > 0 for statistics in answered)
    assert 1.0 <= (rounds + accepted) / rounds < 1.3


@pytest.mark.parametrize("drafter", ["program", "random"])
@pytest.mark.parametrize("draft_count", [2, 7])
def test_l4_d9_the_context_is_filled_exactly_to_its_end(
    served: Served, drafter: str, draft_count: int
) -> None:
    answered = served.answers(drafter, draft_count, None, served.to_the_end)
    for room, case, statistics in zip(ROOMS, served.to_the_end, answered, strict=True):
        assert len(case.prompt) + len(case.truth) == CONTEXT
        if drafter != "random":
            # Whole rounds of K + 1 tokens after the bonus, and a narrower window for the rest.
            assert statistics.round_count == -(-(room - 1) // (draft_count + 1))


def test_the_samplings_give_different_texts(served: Served) -> None:
    """Guard against a sampler that ignores its parameters: the cases above would still agree."""
    texts = [tuple(case.truth) for case in served.cases]
    assert len(set(texts)) == len(texts)
    # And against a pair that never says the mask's id where it is looked at.
    assert any(MASK_TOKEN_ID in case.prompt for case in served.cases)
