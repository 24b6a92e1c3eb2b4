"""An EAGLE-3 drafter that is lost and comes back: same text (L4), drafts again, free slots (L7).

The head copies the target: after the replay every draft stands again only if the drafter has got
all rows again, and a used slot has nothing left of the session before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from splitspec.v1 import generation_pb2 as pb
from tests.eagle3_copy import VOCAB_SIZE, write_copy_head, write_copy_target
from tests.system.cluster import Answer, Cluster, free_address, scrape, wait_until
from tests.system.conftest import EAGLE3_FLAGS, EAGLE3_VERIFIER

TOKENS = 61
DRAFT_COUNT = 3
PROMPTS = [random.Random(seed).choices(range(3, VOCAB_SIZE), k=40) for seed in (3, 4)]
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 77}
COORDINATOR = "coordinator-eagle3"


@dataclass
class Served:
    """The running cluster, what the target alone says, and where slots are counted."""

    cluster: Cluster
    truth: list[list[int]]
    metrics: dict[str, str]

    def ask(self, index: int) -> Answer:
        """Answer a prompt through the drafter; it must be the target's own answer."""
        answer = self.cluster.generate(COORDINATOR, **fields(index))
        assert answer.token_ids == self.truth[index]
        return answer

    def wait_slots_free(self) -> None:
        """Wait until neither service holds a slot."""
        for name, address in self.metrics.items():
            wait_until(lambda a=address: scrape(a)["slots_in_use"] == 0, f"{name}'s slots free")


def fields(index: int) -> dict[str, Any]:
    return {
        "token_ids": pb.TokenIds(ids=PROMPTS[index]),
        "sampling": SAMPLED,
        "max_tokens": TOKENS,
        "draft_count": DRAFT_COUNT,
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, program_cache: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("k")
    target, head = write_copy_target(folder / "target"), write_copy_head(folder / "head")
    metrics = {name: free_address() for name in ("verifier", "eagle3")}
    flags = [*EAGLE3_VERIFIER, "--fuse-for", str(head), "--metrics-address", metrics["verifier"]]
    cluster = Cluster(folder, target, flags, program_cache, gated=True)
    try:
        cluster.start_verifier(wait=False)
        more = ["--rows", "fused", "--metrics-address", metrics["eagle3"]]
        cluster.start_eagle3("eagle3", head, *EAGLE3_FLAGS, *more, wait=False)
        cluster.wait_all_serving()
        cluster.start_coordinator("eagle3", "--draft-seconds", "60", wait=False)
        alone = cluster.start_coordinator(None, wait=False)
        cluster.wait_all_serving()
        truth = [cluster.generate(alone, **fields(i)).token_ids for i in range(len(PROMPTS))]
        yield Served(cluster, truth, metrics)
    finally:
        cluster.close()


@pytest.fixture(autouse=True)
def _mended(served: Served) -> Iterator[None]:
    yield
    served.cluster.restart_missing()
    served.cluster.wait_drafter(COORDINATOR, connected=True)


def all_stood(answer: Answer) -> bool:
    statistics = answer.finish.statistics
    return bool(statistics.accepted_token_count == statistics.draft_token_count > 0)


def test_l4_l7_eagle3_drafter_killed_mid_answer_and_back_the_text_is_the_same_and_drafts_return(
    served: Served,
) -> None:
    length = len(PROMPTS[0])
    lost, back = length + 8, length + 24
    cluster = served.cluster
    with cluster.answering(COORDINATOR, lost, **fields(0)) as running:
        cluster.kill("eagle3")
        cluster.wait_drafter(COORDINATOR, connected=False)
        cluster.gate.hold(back)
        cluster.gate.wait_held(back)
        cluster.restart("eagle3")
        cluster.wait_drafter(COORDINATOR, connected=True)
    assert running.result.token_ids == served.truth[0]
    statistics = running.result.finish.statistics
    assert statistics.replay_count == 1
    # One window was drafted, one more in flight; then a token a round until the replay.
    alone = back - lost - 2 * (DRAFT_COUNT + 1)
    assert statistics.target_only_round_count in range(alone, back - lost + 3)
    assert all_stood(running.result)
    drafted_after = (TOKENS - 1 - (back - length) - 1) * DRAFT_COUNT // (DRAFT_COUNT + 1)
    assert statistics.draft_token_count >= drafted_after
    served.wait_slots_free()


def test_l4_l7_the_verifier_killed_mid_answer_under_an_eagle3_drafter(served: Served) -> None:
    with served.cluster.answering(COORDINATOR, len(PROMPTS[0]) + 20, **fields(0)) as running:
        served.cluster.kill("verifier")
        served.cluster.restart("verifier")
    assert running.result.token_ids == served.truth[0]
    assert running.result.finish.statistics.replay_count == 1
    assert all_stood(running.result)
    served.wait_slots_free()


def test_l7_a_client_that_goes_away_mid_answer_frees_both_services_slots(served: Served) -> None:
    call = served.cluster.stub(COORDINATOR).Generate(pb.GenerateRequest(**fields(1)))
    next(call)
    call.cancel()
    served.wait_slots_free()
    assert all_stood(served.ask(1))


def test_e22_consecutive_requests_on_used_servers_answer_as_on_fresh_ones(served: Served) -> None:
    fresh = []
    for index in range(len(PROMPTS)):
        for name in ("eagle3", "verifier"):
            served.cluster.kill(name)
            served.cluster.restart(name, wait=False)
        served.cluster.wait_all_serving()
        served.cluster.wait_drafter(COORDINATOR, connected=True)
        fresh.append(served.ask(index).finish.statistics)
    for _ in range(2):
        for index, first in enumerate(fresh):
            again = served.ask(index).finish.statistics
            assert again.acceptance_length_counts == first.acceptance_length_counts
            assert again.draft_token_count == first.draft_token_count > 0
