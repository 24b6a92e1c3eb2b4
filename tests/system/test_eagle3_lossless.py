"""L4 with EAGLE-3 drafters through three processes: a head that copies the target, a random one.

Raw rows and fused rows, greedy and sampled, K 1..7, eighteen sessions at once.
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
from tests.eagle3_copy import VOCAB_SIZE, write_copy_head, write_copy_target, write_random_head
from tests.system.cluster import Answer, Cluster
from tests.system.conftest import EAGLE3_FLAGS, EAGLE3_VERIFIER

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T 0.7 top-p 0.9": {"temperature": 0.7, "top_p": 0.9, "seed": 2**63 + 11},
    "T 1.0": {"temperature": 1.0, "seed": 5},
}
PROMPT_LENGTHS = (1, 12, 70)
"""The last one takes three prefill chunks."""
MOST_TOKENS = 33


FEW_TOKENS = 17
"""Of an answer that takes nearly a round a token."""


def token_count(draft_count: int) -> int:
    """Return the prefill bonus and as many whole rounds of K + 1 tokens as there is room for."""
    return 1 + (MOST_TOKENS - 1) // (draft_count + 1) * (draft_count + 1)


@dataclass
class Case:
    """One request and what the target alone answers."""

    prompt: list[int]
    sampling: dict[str, Any]
    truth: list[int] = field(default_factory=list)

    def run(self, cluster: Cluster, coordinator: str, draft_count: int, tokens: int) -> Answer:
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

    def answers(self, drafter: str, draft_count: int, tokens: int) -> list[pb.GenerationStatistics]:
        """Answer all cases at once through a drafter: the target's own tokens, or it fails."""
        with ThreadPoolExecutor(len(self.cases)) as pool:
            answers = list(
                pool.map(
                    lambda case: case.run(
                        self.cluster, f"coordinator-{drafter}", draft_count, tokens
                    ),
                    self.cases,
                )
            )
        for case, answer in zip(self.cases, answers, strict=True):
            assert answer.token_ids == case.truth[:tokens]
        return [answer.finish.statistics for answer in answers]

    def raw_and_fused(
        self, head: str, draft_count: int, tokens: int
    ) -> list[list[pb.GenerationStatistics]]:
        """Answer all cases through both drafters of a head at the same time."""
        names = [f"{head}-{rows}" for rows in ("raw", "fused")]
        with ThreadPoolExecutor(len(names)) as pool:
            return list(pool.map(lambda name: self.answers(name, draft_count, tokens), names))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, program_cache: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("e")
    target = write_copy_target(folder / "target")
    heads = {"copy": write_copy_head(folder / "copy"), "random": write_random_head(folder / "rand")}
    cluster = Cluster(folder, target, EAGLE3_VERIFIER, program_cache)
    verifiers = {"copy": "verifier", "random": "verifier-random"}
    drafters = {f"{head}-{rows}": head for head in heads for rows in ("raw", "fused")}
    try:
        for head, name in verifiers.items():
            cluster.start_verifier(name, "--fuse-for", str(heads[head]), wait=False)
        for drafter, head in drafters.items():
            rows = drafter.removeprefix(f"{head}-")
            flags = [*EAGLE3_FLAGS, "--rows", rows]
            cluster.start_eagle3(drafter, heads[head], *flags, wait=False)
        flags = [*EAGLE3_FLAGS, "--rows", "fused"]
        program = [*flags, "--runtime", "executorch"]  # the last --runtime counts
        cluster.start_eagle3("copy-program", heads["copy"], *program, wait=False)
        own = "own-features"
        cluster.start_eagle3(own, heads["copy"], *flags, variant=own, wait=False)
        cluster.wait_all_serving()
        for drafter, head in {**drafters, "copy-program": "copy", own: "copy"}.items():
            cluster.start_coordinator(
                drafter, "--draft-seconds", "60", verifier=verifiers[head], wait=False
            )
        alone = cluster.start_coordinator(None, wait=False)
        cluster.wait_all_serving()
        cases = _cases()
        for case in cases:
            case.truth = case.run(cluster, alone, 0, MOST_TOKENS).token_ids
        yield Served(cluster, cases)
    finally:
        cluster.close()


def _cases() -> list[Case]:
    numbers = random.Random(0)
    return [
        Case([numbers.randrange(3, VOCAB_SIZE) for _ in range(length)], sampling)
        for length in PROMPT_LENGTHS
        for sampling in SAMPLINGS.values()
    ]


@pytest.mark.parametrize("draft_count", range(1, 8))
def test_l4_e1_the_copying_head_emits_k_plus_1_of_the_targets_tokens_a_round(
    served: Served, draft_count: int
) -> None:
    tokens = token_count(draft_count)
    rounds = (tokens - 1) // (draft_count + 1)
    for answered in served.raw_and_fused("copy", draft_count, tokens):
        for statistics in answered:
            assert list(statistics.acceptance_length_counts) == [0] * draft_count + [rounds]
            assert statistics.mean_acceptance_length == draft_count + 1


@pytest.mark.parametrize("draft_count", range(1, 8))
def test_l4_e1_the_copying_head_as_an_executorch_program_emits_k_plus_1_tokens_a_round(
    served: Served, draft_count: int
) -> None:
    tokens = token_count(draft_count)
    rounds = (tokens - 1) // (draft_count + 1)
    for statistics in served.answers("copy-program", draft_count, tokens):
        assert list(statistics.acceptance_length_counts) == [0] * draft_count + [rounds]


@pytest.mark.parametrize("draft_count", range(1, 8))
def test_l4_e1_a_random_head_costs_drafts_and_raw_and_fused_rows_give_the_same_ones(
    served: Served, draft_count: int
) -> None:
    raw, fused = served.raw_and_fused("random", draft_count, FEW_TOKENS)
    for one, other in zip(raw, fused, strict=True):
        assert one.acceptance_length_counts == other.acceptance_length_counts
        assert one.draft_token_count == other.draft_token_count
    rounds = sum(statistics.round_count for statistics in raw)
    accepted = sum(statistics.accepted_token_count for statistics in raw)
    assert 1.0 <= (rounds + accepted) / rounds < 1.2


@pytest.mark.parametrize("draft_count", range(2, 8))
def test_l4_e16_acceptance_falls_where_accepted_tokens_keep_the_drafts_own_features(
    served: Served, draft_count: int
) -> None:
    own = served.answers("own-features", draft_count, token_count(draft_count))
    rounds = sum(statistics.round_count for statistics in own)
    tau = sum(statistics.accepted_token_count for statistics in own) / rounds + 1
    assert tau < 0.9 * (draft_count + 1), "the difference to true rows is not seen"


def test_the_samplings_give_different_texts(served: Served) -> None:
    """Guard against a sampler that ignores its parameters: the cases above would still agree."""
    texts = [tuple(case.truth) for case in served.cases]
    assert len(set(texts)) == len(texts)
