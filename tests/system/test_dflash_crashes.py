"""A DFlash drafter that is late, or lost and back: same text (L4), drafts again, free slots (L7).

The draft is planted: after the replay every draft stands again only if the drafter has got all rows
again, and a used slot has nothing left of the session before. Verifier and drafter are gated: both
end while a pass is in flight, whatever the machine is busy with.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from splitspec.v1 import generation_pb2 as pb
from tests.dflash_planted import VOCAB_SIZE, write_planted_draft, write_planted_target
from tests.system.cluster import Answer, Answering, Cluster, free_address, scrape, wait_until
from tests.system.conftest import DFLASH_FLAGS, DFLASH_VERIFIER

TOKENS = 61
DRAFT_COUNT = 3
PROMPTS = [random.Random(seed).choices(range(3, VOCAB_SIZE), k=40) for seed in (3, 4)]
LENGTH = len(PROMPTS[0])
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 77}
COORDINATOR = "coordinator-dflash"
HASTY = "coordinator-hasty"
"""It waits a second for drafts, the other one a minute."""


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

    @contextmanager
    def drafter_held(self) -> Iterator[None]:
        """Let no step that drafts go on while the block runs, or until its drafter has ended."""
        hold = self.cluster.folder / "dflash.jsonl"
        held = hold.with_suffix(".held")
        held.unlink(missing_ok=True)
        hold.touch()
        try:
            yield
        finally:
            hold.unlink()

    def wait_draft_held(self) -> None:
        """Wait until a step that drafts is held."""
        wait_until((self.cluster.folder / "dflash.held").exists, "a draft that is held")

    def draft_passes(self) -> float:
        """Return how many blocks the drafter has run."""
        return scrape(self.metrics["dflash"])["draft_passes_total"]

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
    target = write_planted_target(folder / "target")
    draft = write_planted_draft(folder / "draft")
    metrics = {name: free_address() for name in ("verifier", "dflash")}
    flags = [*DFLASH_VERIFIER, "--fuse-for", str(draft), "--metrics-address", metrics["verifier"]]
    cluster = Cluster(folder, target, flags, program_cache, gated=True)
    try:
        cluster.start_verifier(wait=False)
        more = ["--rows", "fused", "--metrics-address", metrics["dflash"]]
        cluster.start_dflash("dflash", draft, *DFLASH_FLAGS, *more, variant="held", wait=False)
        cluster.wait_all_serving()
        cluster.start_coordinator("dflash", "--draft-seconds", "60", wait=False)
        cluster.start_coordinator("dflash", "--draft-seconds", "1", name=HASTY, wait=False)
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
    for name in (COORDINATOR, HASTY):
        served.cluster.wait_drafter(name, connected=True)


def check(
    served: Served, running: Answering, *, replays: Collection[int]
) -> pb.GenerationStatistics:
    """Check the answer to prompt 0: the target's own, every draft stood, no slot is kept."""
    assert running.result.token_ids == served.truth[0]
    statistics = running.result.finish.statistics
    assert statistics.replay_count in replays
    assert statistics.accepted_token_count == statistics.draft_token_count > 0
    served.wait_slots_free()
    return statistics


def test_without_a_loss_every_draft_stands_and_no_round_goes_without(served: Served) -> None:
    """Guard of the counts below."""
    statistics = served.ask(0).finish.statistics
    assert statistics.accepted_token_count == statistics.draft_token_count == 45
    assert statistics.target_only_round_count == 0


def test_l4_l7_the_drafter_killed_in_a_held_verify_and_back_the_text_is_the_same_and_drafts_return(
    served: Served,
) -> None:
    lost, back = LENGTH + 8, LENGTH + 24
    cluster = served.cluster
    with cluster.answering(COORDINATOR, lost, **fields(0)) as running:
        cluster.kill("dflash")
        cluster.wait_drafter(COORDINATOR, connected=False)
        cluster.gate.hold(back)
        cluster.gate.wait_held(back)
        cluster.restart("dflash")
        cluster.wait_drafter(COORDINATOR, connected=True)
    statistics = check(served, running, replays=[1])
    # One window was drafted, one more in flight; then a token a round until the replay.
    alone = back - lost - 2 * (DRAFT_COUNT + 1)
    assert statistics.target_only_round_count in range(alone, back - lost + 3)
    drafted_after = (TOKENS - 1 - (back - LENGTH) - 1) * DRAFT_COUNT // (DRAFT_COUNT + 1)
    assert statistics.draft_token_count >= drafted_after


def test_l4_l7_the_drafter_killed_in_its_own_pass_the_round_goes_on_without_it(
    served: Served,
) -> None:
    cluster, back = served.cluster, LENGTH + 24
    with cluster.answering(COORDINATOR, LENGTH + 4, **fields(0)) as running:
        with served.drafter_held():
            cluster.gate.hold(back)
            served.wait_draft_held()
            cluster.kill("dflash")
            cluster.gate.wait_held(back)
        cluster.restart("dflash")
        cluster.wait_drafter(COORDINATOR, connected=True)
    statistics = check(served, running, replays=[1])
    # From the round that lost its drafts to the one that is held.
    assert statistics.target_only_round_count in range(back - LENGTH - 8, back - LENGTH - 8 + 3)


def test_l4_a_late_drafter_drafts_nothing_that_round_and_the_session_goes_on_with_it_later(
    served: Served,
) -> None:
    cluster, back = served.cluster, LENGTH + 24
    with cluster.answering(HASTY, LENGTH + 4, **fields(0)) as running:
        before = served.draft_passes()
        with served.drafter_held():
            cluster.gate.hold(back)
            cluster.gate.wait_held(back)
        wait_until(lambda: served.draft_passes() == before + 1, "the late pass is over")
    # No replay: rows that have committed meanwhile were kept, and all came with the next draft.
    statistics = check(served, running, replays=[0])
    assert statistics.target_only_round_count in range(back - LENGTH - 8, back - LENGTH - 8 + 4)
    assert statistics.draft_token_count > 2 * DRAFT_COUNT


def test_l4_l7_d13_verifier_and_drafter_killed_mid_answer(served: Served) -> None:
    with served.cluster.answering(COORDINATOR, LENGTH + 20, **fields(0)) as running:
        for name in ("verifier", "dflash"):
            served.cluster.kill(name)
        for name in ("dflash", "verifier"):
            served.cluster.restart(name)
        served.cluster.wait_drafter(COORDINATOR, connected=True)
    # Two, where the verifier was there again before the coordinator had found its drafter.
    check(served, running, replays=[1, 2])


def test_d13_l4_l7_a_verifier_whose_device_fails_ends_and_its_successor_goes_on(
    served: Served,
) -> None:
    cluster = served.cluster
    with cluster.answering(COORDINATOR, LENGTH + 20, **fields(0)) as running:
        cluster.gate.fail()
        assert cluster.ended("verifier") != 0
        cluster.gate.open()
        cluster.restart("verifier")
    check(served, running, replays=[1])


def test_d14_l7_a_client_that_goes_away_mid_answer_frees_both_services_slots(
    served: Served,
) -> None:
    call = served.cluster.stub(COORDINATOR).Generate(pb.GenerateRequest(**fields(1)))
    next(call)
    call.cancel()
    served.wait_slots_free()
    statistics = served.ask(1).finish.statistics
    assert statistics.accepted_token_count == statistics.draft_token_count == 45
