"""D11, K2: an early stop, then a longer prompt on the same and only slot, answered as if freshly.

Verifier and drafter have one slot. The draft is planted: a row of the session before that is seen
where the newest ones belong costs drafts. Its steps are written down: no row of the prefix is
missing either, or another's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from splitspec.v1 import generation_pb2 as pb
from tests.dflash_planted import (
    VOCAB_SIZE,
    tokens_of,
    write_planted_draft,
    write_planted_target,
)
from tests.system.cluster import Answer, Cluster, free_address, scrape, wait_until
from tests.system.conftest import DFLASH_FLAGS, DFLASH_VERIFIER

PROMPT = random.Random(1).choices(range(3, VOCAB_SIZE), k=30)
SUFFIX = random.Random(2).choices(range(3, VOCAB_SIZE), k=9)
ALL = {"max_tokens": 1 + 3 * 8, "draft_count": 7}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"seed": 7},
    "T 1.0": {"temperature": 1.0, "seed": 7},
}
"""With this seed the drafters leave all draft tokens as they are."""
DRAFTERS = ("torch", "program")


@dataclass
class Served:
    """The running cluster, and where the verifier's and the drafters' slots are counted."""

    cluster: Cluster
    metrics: dict[str, str]

    def ask(self, drafter: str, prompt: list[int], **fields: Any) -> Answer:
        """Answer a prompt through a drafter, once every slot is free."""
        self.wait_slots_free()
        ids = pb.TokenIds(ids=prompt)
        return self.cluster.generate(f"coordinator-{drafter}", token_ids=ids, **fields)

    def wait_slots_free(self) -> None:
        """Wait until no service holds a slot."""
        for name, address in self.metrics.items():
            wait_until(lambda a=address: scrape(a)["slots_in_use"] == 0, f"{name}'s slot free")

    def check_longer(self, drafter: str, answered: list[int], sampling: dict[str, Any]) -> Answer:
        """Ask for more after an answer that stopped early; every draft must stand."""
        prompt = [*PROMPT, *answered, *SUFFIX]
        self.wait_slots_free()
        report = self.cluster.folder / f"{drafter}.jsonl"
        report.write_text("")
        answer = self.ask(drafter, prompt, sampling=sampling, **ALL)
        works = [work for line in report.read_text().splitlines() for work in json.loads(line)]
        rows = [token for work in works for token in tokens_of(work["features"])]
        # The last round's own rows: nothing is drafted after them.
        assert rows == [*prompt, *answer.token_ids][: len(prompt) + 2 * 8]
        truth = self.ask("target", prompt, sampling=sampling, max_tokens=25)
        assert answer.token_ids == truth.token_ids
        assert list(answer.finish.statistics.acceptance_length_counts) == [0] * 7 + [3]
        return answer


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, program_cache: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("r")
    target = write_planted_target(folder / "target")
    planted = write_planted_draft(folder / "planted")
    metrics = {name: free_address() for name in ("verifier", *DRAFTERS)}
    one = ["--slot-count", "1"]
    flags = [*DFLASH_VERIFIER, *one, "--fuse-for", str(planted)]
    flags += ["--metrics-address", metrics["verifier"]]
    cluster = Cluster(folder, target, flags, program_cache)
    try:
        cluster.start_verifier(wait=False)
        for name in DRAFTERS:
            flags = [*DFLASH_FLAGS, *one, "--metrics-address", metrics[name]]
            flags += ["--runtime", "executorch"] if name == "program" else []
            cluster.start_dflash(name, planted, *flags, variant="forced", wait=False)
        cluster.wait_all_serving()
        for name in DRAFTERS:
            cluster.start_coordinator(name, "--draft-seconds", "60", wait=False)
        cluster.start_coordinator(None, wait=False)
        cluster.wait_all_serving()
        yield Served(cluster, metrics)
    finally:
        cluster.close()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_d11_k2_a_longer_prompt_after_an_answer_that_was_cut(
    served: Served, drafter: str, sampling: dict[str, Any]
) -> None:
    # In the middle of a round, and where one ends.
    for most in (13, 17):
        cut = served.ask(drafter, PROMPT, sampling=sampling, max_tokens=most, draft_count=7)
        assert len(cut.token_ids) == most
        served.check_longer(drafter, cut.token_ids, sampling)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_d11_k2_a_longer_prompt_after_a_stop_inside_a_round(served: Served, drafter: str) -> None:
    sampling = SAMPLINGS["T 1.0"]
    whole = served.ask("target", PROMPT, sampling=sampling, max_tokens=40).token_ids
    end = next(i for i in range(12, 40) if whole[i] not in whole[:i] and i % 8 not in (0, 7))
    stop = {"stop_token_ids": [whole[end]], "max_tokens": 40, "draft_count": 7}
    stopped = served.ask(drafter, PROMPT, sampling=sampling, **stop)
    assert stopped.token_ids == whole[: end + 1]
    served.check_longer(drafter, stopped.token_ids, sampling)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_d11_k2_a_longer_prompt_after_a_client_went_away_is_answered_as_by_fresh_services(
    served: Served, drafter: str
) -> None:
    sampling = SAMPLINGS["T 1.0"]
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling, max_tokens=90, draft_count=7
    )
    call = served.cluster.stub(f"coordinator-{drafter}").Generate(request)
    seen: list[int] = []
    for reply in call:
        seen.extend(reply.token_ids)
        if len(seen) >= 9:
            break
    call.cancel()
    # What the client has seen, less a token that it does not want.
    used = served.check_longer(drafter, seen[:8], sampling)
    if drafter == "torch":
        for name in ("verifier", drafter):
            served.cluster.kill(name)
            served.cluster.restart(name, wait=False)
        served.cluster.wait_all_serving()
        fresh = served.check_longer(drafter, seen[:8], sampling)
        assert fresh.token_ids == used.token_ids
