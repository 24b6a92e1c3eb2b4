"""L2 end to end: a drafter that wants rows gets one for each committed position, in order.

The drafter fails where a row is missing, and counts rows that differ between two runs of the same
tokens: rows, too, do not depend on the window or chunk that they were computed in (L4).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from splitspec.v1 import generation_pb2 as pb
from tests.system.cluster import ROOT, Cluster

MAX_TOKENS = 40
PROMPTS = [list(range(5, 5 + length)) for length in (3, 40, 150)]
VERIFIER = ["--runtime", "torch", "--precision", "fp32", "--max-context-length", "256"]
VERIFIER += ["--tap-layers", "0,2", "--max-prefill-chunk", "32"]
TAPS = ["--tap-layers", "0,2", "--row-width", "128"]
COORDINATOR = "coordinator-rows"


@dataclass
class Known:
    """A running cluster, what its target says alone, and the drafter's counts."""

    cluster: Cluster
    truth: list[list[int]]
    report: Path

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


def fields(index: int) -> dict[str, Any]:
    return {
        "token_ids": pb.TokenIds(ids=PROMPTS[index]),
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
    }


@pytest.fixture
def known(tmp_path: Path, tiny_model: Path, program_cache: Path) -> Iterator[Known]:
    cluster = Cluster(tmp_path, tiny_model, VERIFIER, program_cache)
    report, file = tmp_path / "report.json", tmp_path / "known.json"
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
        yield Known(cluster, truth, report)
    finally:
        cluster.close()


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
