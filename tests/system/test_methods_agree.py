"""L4 over methods: EAGLE-3, DFlash and ngram drafts give the same tokens, the target's own.

All three draft well and none is always right but EAGLE-3's head, which copies the target. The
DFlash draft knows the far token's part of the target's logits, and not the current token's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coordinator.chat import statistics_line
from splitspec.v1 import generation_pb2 as pb
from tests.dflash_planted import VOCAB_SIZE, write_partial_draft
from tests.eagle3_copy import LOOK_BACK, write_copy_head, write_copy_target
from tests.system.cluster import Answer, Cluster
from tests.system.conftest import DFLASH_FLAGS, EAGLE3_FLAGS, EAGLE3_VERIFIER

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T 0.7 top-p 0.9": {"temperature": 0.7, "top_p": 0.9, "seed": 2**63 + 11},
    "T 1.0": {"temperature": 1.0, "seed": 5},
}
METHODS = ("eagle3", "dflash", "ngram")
PROMPTS = [random.Random(n).choices(range(3, VOCAB_SIZE), k=n) for n in (1, 12, 45)]
# One that repeats itself, so that an ngram is found.
PROMPTS.append(PROMPTS[1] * 3)
TOKENS = 40


@dataclass
class Served:
    """The running cluster."""

    cluster: Cluster

    def ask(self, drafter: str, sampling: dict[str, Any], draft_count: int) -> list[Answer]:
        """Answer all prompts at once."""

        def answer(prompt: list[int]) -> Answer:
            return self.cluster.generate(
                f"coordinator-{drafter}",
                token_ids=pb.TokenIds(ids=prompt),
                sampling=sampling,
                max_tokens=TOKENS,
                draft_count=draft_count,
            )

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(answer, PROMPTS))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, program_cache: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("m")
    target, head = write_copy_target(folder / "target"), write_copy_head(folder / "head")
    draft = write_partial_draft(folder / "draft", look_back=LOOK_BACK)
    flags = [*EAGLE3_VERIFIER, "--fuse-for", str(draft)]
    cluster = Cluster(folder, target, flags, program_cache)
    try:
        cluster.start_verifier(wait=False)
        cluster.start_eagle3("eagle3", head, *EAGLE3_FLAGS, "--rows", "raw", wait=False)
        cluster.start_dflash("dflash", draft, *DFLASH_FLAGS, "--rows", "fused", wait=False)
        cluster.start_ngram()
        cluster.wait_all_serving()
        for method in METHODS:
            cluster.start_coordinator(method, "--draft-seconds", "60", wait=False)
        cluster.start_coordinator(None, wait=False)
        cluster.wait_all_serving()
        yield Served(cluster)
    finally:
        cluster.close()


@pytest.mark.parametrize("draft_count", [1, 3, 7])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_l4_all_methods_give_identical_tokens_and_statistics_tell_which_one_drafted(
    served: Served, sampling: dict[str, Any], draft_count: int
) -> None:
    truth = served.ask("target", sampling, 0)
    with ThreadPoolExecutor(len(METHODS)) as pool:
        answers = dict(
            zip(
                METHODS,
                pool.map(lambda m: served.ask(m, sampling, draft_count), METHODS),
                strict=True,
            )
        )
    accepted = {}
    for method, answered in answers.items():
        for answer, own in zip(answered, truth, strict=True):
            assert (answer.token_ids, answer.text) == (own.token_ids, own.text), method
            assert answer.finish.reason == own.finish.reason
            assert answer.finish.statistics.draft_method == method
            assert f"draft {method}  " in statistics_line(answer.finish)
        accepted[method] = sum(a.finish.statistics.accepted_token_count for a in answered)
    assert all("draft none  " in statistics_line(answer.finish) for answer in truth)
    # Each method drafts by itself: what stood is not the same number.
    assert accepted["eagle3"] > accepted["dflash"] > 0
    assert len(set(accepted.values())) == len(METHODS)


def test_the_samplings_give_different_texts(served: Served) -> None:
    """Guard against a sampler that ignores its parameters: the cases above would still agree."""
    answers = [served.ask("target", sampling, 0) for sampling in SAMPLINGS.values()]
    for of_one_prompt in list(zip(*answers, strict=True))[1:]:
        assert len({tuple(answer.token_ids) for answer in of_one_prompt}) == len(SAMPLINGS)
