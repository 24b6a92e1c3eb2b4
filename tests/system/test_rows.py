"""L2 end to end: a drafter that wants rows gets one for each committed position, in order.

The drafter fails where a row is missing, and counts rows that differ between two runs of the same
tokens: rows, too, do not depend on the window or chunk that they were computed in (L4).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from splitspec.v1 import generation_pb2 as pb
from tests.system.cluster import ROOT, Answering, Cluster, free_address, scrape

MAX_TOKENS = 80
CHUNK = 32
PROMPTS = [list(range(5, 5 + length)) for length in (3, 40, 150)]
VERIFIER = ["--runtime", "torch", "--precision", "fp32", "--max-context-length", "256"]
VERIFIER += ["--tap-layers", "0,2", "--max-prefill-chunk", str(CHUNK)]
TAPS = ["--tap-layers", "0,2", "--row-width", "128"]
COORDINATOR = "coordinator-rows"


@dataclass
class Known:
    """A running cluster, what its target says alone, and the drafter's counts."""

    cluster: Cluster
    truth: list[list[int]]
    report: Path
    metrics_address: str

    def generate(self, index: int, draft_count: int) -> pb.GenerationStatistics:
        """Answer a prompt through the rows drafter; the answer must be the target's own."""
        answer = self.cluster.generate(COORDINATOR, draft_count=draft_count, **fields(index))
        assert answer.token_ids == self.truth[index]
        return answer.finish.statistics

    def counts(self, session_count: int) -> dict[str, int]:
        """Return the counts once `session_count` sessions are over."""
        limit = time.monotonic() + 20
        while time.monotonic() < limit:
            if self.report.exists() and (text := self.report.read_text()):
                counts: dict[str, int] = json.loads(text)
                if counts["sessions"] >= session_count:
                    return counts
            time.sleep(0.05)
        raise TimeoutError(self.cluster.log("rows")[-2000:])

    def pass_count(self) -> int:
        """Return the verifier's target passes since it was started."""
        return int(scrape(self.metrics_address)["target_passes_total"])


def fields(index: int) -> dict[str, Any]:
    return {
        "token_ids": pb.TokenIds(ids=PROMPTS[index]),
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
    }


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, program_cache: Path
) -> Iterator[Known]:
    folder, metrics = tmp_path_factory.mktemp("w"), free_address()
    flags = [*VERIFIER, "--metrics-address", metrics]
    cluster = Cluster(folder, tiny_model, flags, program_cache, gated=True)
    report, file = folder / "report.json", folder / "known.json"
    try:
        cluster.start_verifier()
        target = cluster.start_coordinator(None)
        truth = [cluster.generate(target, **fields(i)).token_ids for i in range(len(PROMPTS))]
        entries = [
            {"prompt": prompt, "tokens": tokens}
            for prompt, tokens in zip(PROMPTS, truth, strict=True)
        ]
        file.write_text(json.dumps(entries))
        command = [sys.executable, str(ROOT / "tests" / "drafters.py"), "--kind", "rows"]
        command += ["--continuations", str(file), "--report", str(report), *TAPS]
        cluster.start("rows", [*command, "--address", cluster.address("rows")])
        cluster.start_coordinator("rows")
        yield Known(cluster, truth, report, metrics)
    finally:
        cluster.close()


@pytest.fixture
def known(running: Known) -> Known:
    """Return the cluster with a drafter that has counted nothing yet."""
    cluster = running.cluster
    if "rows" in cluster.processes:
        cluster.kill("rows")
        cluster.wait_drafter(COORDINATOR, connected=False)
    running.report.unlink(missing_ok=True)
    cluster.restart_missing()  # what a test that failed has left
    cluster.wait_drafter(COORDINATOR, connected=True)
    return running


def test_l2_every_committed_row_reaches_the_drafter_once_and_unchanged(known: Known) -> None:
    for draft_count in (1, 3, 7):
        for index in range(len(PROMPTS)):
            statistics = known.generate(index, draft_count)
            assert statistics.accepted_token_count == statistics.draft_token_count > 0
            assert statistics.target_only_round_count <= 1  # the last one, for one token
    counts = known.counts(session_count=3 * len(PROMPTS))
    assert counts["changed_rows"] == 0
    prompt_rows = 3 * sum(map(len, PROMPTS))
    assert prompt_rows < counts["rows"] <= prompt_rows + 9 * (MAX_TOKENS - 1)


def test_l4_a_rows_drafter_that_is_lost_and_back_gets_all_rows_again(known: Known) -> None:
    assert known.generate(1, 3).draft_token_count > 0
    known.cluster.kill("rows")
    assert known.generate(1, 3).draft_token_count == 0
    known.cluster.restart("rows")
    limit = time.monotonic() + 20
    while known.generate(1, 3).draft_token_count == 0:
        assert time.monotonic() < limit, "no draft after the drafter came back"
        time.sleep(0.1)
    assert known.counts(session_count=1)["changed_rows"] == 0


def chunk_count(length: int) -> int:
    """Return the prefill chunks of `length` tokens."""
    return -(-length // CHUNK)


def check(known: Known, running: Answering) -> pb.GenerationStatistics:
    """Check the answer to prompt 1 after a loss: the target's own, drafted, replayed once."""
    assert running.result.token_ids == known.truth[1]
    statistics = running.result.finish.statistics
    assert statistics.replay_count == 1
    assert statistics.accepted_token_count == statistics.draft_token_count
    return statistics


def test_l4_l5_verifier_killed_mid_round_under_a_rows_drafter(known: Known) -> None:
    length, at = len(PROMPTS[1]), 30
    before = known.pass_count()
    with known.cluster.answering(COORDINATOR, length + at, **fields(1)) as running:
        first_rounds = known.pass_count() - before - chunk_count(length)
        known.cluster.kill("verifier")
        known.cluster.restart("verifier")
        assert known.pass_count() == 0
    statistics = check(known, running)
    # The drafter kept what it had seen: every row came twice, and was the same.
    assert known.counts(session_count=2)["changed_rows"] == 0
    assert statistics.draft_token_count > (MAX_TOKENS - 10) * 7 // 8
    # L5: a pass a chunk and a pass a round, on either side of the loss; the pass that the kill
    # interrupted is nobody's.
    assert first_rounds == -(-at // 8)
    replayed = length + 8 * first_rounds
    rounds = statistics.round_count - first_rounds
    assert known.pass_count() == chunk_count(replayed) + rounds


def test_l4_l5_rows_drafter_killed_mid_round_and_back_within_the_answer(known: Known) -> None:
    length = len(PROMPTS[1])
    lost, back = length + 8, length + 30
    before = known.pass_count()
    with known.cluster.answering(COORDINATOR, lost, **fields(1)) as running:
        known.cluster.kill("rows")
        known.cluster.wait_drafter(COORDINATOR, connected=False)
        known.cluster.gate.hold(back)
        known.cluster.gate.wait_held(back)
        known.cluster.restart("rows")
        known.cluster.wait_drafter(COORDINATOR, connected=True)
    statistics = check(known, running)
    # One window was drafted, one more in flight; then a token a round until the replay.
    assert statistics.target_only_round_count in range(30 - 16, 30 - 16 + 3)
    assert statistics.draft_token_count > 14 + 30
    # L5: the replay of the rows costs its chunks and nothing else.
    chunks = chunk_count(length) + chunk_count(back + 1)
    assert known.pass_count() - before == chunks + statistics.round_count
    # The new process saw the answer's rows in other chunks and windows than this run shows it.
    known.generate(1, 3)
    assert known.counts(session_count=2)["changed_rows"] == 0


@pytest.mark.parametrize("order", [("rows", "verifier"), ("verifier", "rows")])
def test_l4_both_killed_mid_round_under_rows(known: Known, order: Sequence[str]) -> None:
    with known.cluster.answering(COORDINATOR, len(PROMPTS[1]) + 20, **fields(1)) as running:
        for name in order:
            known.cluster.kill(name)
        for name in order:
            known.cluster.restart(name)
        known.cluster.wait_drafter(COORDINATOR, connected=True)
    assert running.result.token_ids == known.truth[1]
    statistics = running.result.finish.statistics
    # Where the verifier is back first, it is replayed before the drafter can take the rows.
    assert 1 <= statistics.replay_count <= 2
    assert statistics.draft_token_count > 20 + 8 + 7
    known.generate(1, 3)
    assert known.counts(session_count=2)["changed_rows"] == 0
