"""L4 end to end: speculative output is target-only output, token for token.

25 real prompts through three real processes, three sampling settings, K 1..7, four drafters.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from splitspec.v1 import generation_pb2 as pb
from tests.system.cluster import Answer, Cluster

MAX_TOKENS = 16
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T 0.7 top-p 0.9": {"temperature": 0.7, "top_p": 0.9, "seed": 2**63 + 11},
    "T 1.0": {"temperature": 1.0, "seed": 5},
}
FAKES = ("right", "wrong", "coin-flip")


@dataclass
class Case:
    """One request and what the target alone answers."""

    fields: dict[str, Any]
    prompt: tuple[int, ...]
    target_only: Answer | None = None

    def run(self, cluster: Cluster, coordinator: str, draft_count: int) -> Answer:
        return cluster.generate(coordinator, draft_count=draft_count, **self.fields)


def _cases(model: Path, prompts: list[str]) -> list[Case]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    cases = []
    for name, sampling in SAMPLINGS.items():
        for text in prompts:
            # The setting's name makes each prompt unique: the fakes know continuations by prompt.
            ids = tokenizer.encode(f"{name}: {text}").ids
            fields = {
                "token_ids": pb.TokenIds(ids=ids),
                "sampling": sampling,
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
            }
            cases.append(Case(fields, tuple(ids)))
    return cases


@pytest.fixture(scope="module")
def served(cluster: Cluster, tiny_model: Path, prompts: list[str]) -> tuple[Cluster, list[Case]]:
    """Start a coordinator a drafter; answer every case by the target alone first."""
    cases = _cases(tiny_model, prompts)
    target = cluster.start_coordinator(None)
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda case: case.run(cluster, target, 0), cases)
        for case, answer in zip(cases, answers, strict=True):
            case.target_only = answer
    known = {case.prompt: case.target_only.token_ids for case in cases if case.target_only}
    for kind in FAKES:
        cluster.start_fake_drafter(kind, known)
    for drafter in (*FAKES, "ngram"):
        cluster.start_coordinator(drafter)
    return cluster, cases


@pytest.mark.parametrize("draft_count", range(1, 8))
@pytest.mark.parametrize("drafter", [*FAKES, "ngram"])
def test_l4_speculative_tokens_and_text_equal_target_only(
    served: tuple[Cluster, list[Case]], drafter: str, draft_count: int
) -> None:
    cluster, cases = served
    if "torch" in cluster.verifier_flags:  # slow: another seventh of the cases each K
        cases = cases[draft_count - 1 :: 7]
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda case: case.run(cluster, f"coordinator-{drafter}", draft_count), cases)
        )
    drafted = accepted = 0
    for case, answer in zip(cases, answers, strict=True):
        assert case.target_only is not None
        assert answer.token_ids == case.target_only.token_ids
        assert answer.text == case.target_only.text
        statistics = answer.finish.statistics
        counts = statistics.acceptance_length_counts
        assert sum(counts) == statistics.round_count
        # L3: every token but the prefill bonus was emitted by a round.
        assert sum((i + 1) * n for i, n in enumerate(counts)) == MAX_TOKENS - 1
        drafted += statistics.draft_token_count
        accepted += statistics.accepted_token_count
        _check_round_times(statistics)
    assert drafted > 0
    if drafter == "right":
        assert accepted == drafted
    if drafter == "wrong":
        assert accepted == 0
    if drafter == "coin-flip":
        assert 0 < accepted < drafted


def _check_round_times(statistics: pb.GenerationStatistics) -> None:
    """Where a drafter took part in every kind of time, none is nothing, and they fit the total."""
    times = statistics.round_times
    parts = [times.draft, times.verify, times.wire, times.coordinator]
    nanoseconds = [part.ToNanoseconds() for part in parts]
    if statistics.draft_token_count:
        assert min(nanoseconds) > 0, times
    rounds_total = statistics.total_time.ToNanoseconds()
    assert sum(nanoseconds) <= rounds_total - statistics.time_to_first_token.ToNanoseconds()


def test_the_three_samplings_give_different_texts(served: tuple[Cluster, list[Case]]) -> None:
    """Guard against a sampler that ignores its parameters: the cases above would still agree."""
    cluster, cases = served
    case = cases[0]
    greedy = case.run(cluster, "coordinator-target", 0).token_ids
    texts = set()
    for seed in range(4):
        fields = {**case.fields, "sampling": {"temperature": 1.0, "seed": seed}}
        texts.add(tuple(cluster.generate("coordinator-target", **fields).token_ids))
    assert len(texts) == 4
    assert tuple(greedy) not in texts


def test_eight_concurrent_sessions_equal_each_alone(served: tuple[Cluster, list[Case]]) -> None:
    cluster, cases = served
    chosen = cases[::9][:8]
    alone = [case.run(cluster, "coordinator-ngram", 5).token_ids for case in chosen]
    with ThreadPoolExecutor(8) as pool:
        together = pool.map(lambda case: case.run(cluster, "coordinator-ngram", 5), chosen)
        assert [answer.token_ids for answer in together] == alone
