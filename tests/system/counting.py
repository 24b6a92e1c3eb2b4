"""What the counters of a cluster with rows grow by while one answer is given."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitspec.v1 import generation_pb2 as pb
from tests.copy_target import VOCAB_SIZE
from tests.system.cluster import Answer, Cluster, scrape, wait_until

PROMPT = random.Random(1).sample(range(3, VOCAB_SIZE), 12)
LONG_PROMPT = random.Random(2).choices(range(3, VOCAB_SIZE), k=40)
"""Two prefill chunks."""
TOKENS = 1 + 24
MOST_OVERHEAD = 200
"""Bytes of a message besides its rows."""
MOST_LENGTH_BYTES = 8
"""What a message's lengths, its rows' width and its times grow by when its rows are wider."""
K_AND_FORCED = [(k, a) for k in range(1, 8) for a in range(k + 1)]


@dataclass
class Served:
    """A running cluster, what its target alone says, and where its processes count."""

    cluster: Cluster
    truth: list[int]
    """After LONG_PROMPT."""
    metrics: dict[str, str]

    def counted(
        self, drafter: str, prompt: list[int], **fields: Any
    ) -> tuple[Answer, dict[str, dict[str, int]]]:
        """Answer a prompt; return also what each process's counters have grown by."""
        names = ("verifier", drafter, f"coordinator-{drafter}")
        before = self._counters(names)
        ids = pb.TokenIds(ids=prompt)
        answer = self.cluster.generate(f"coordinator-{drafter}", token_ids=ids, **fields)
        after = self._counters(names)
        rises = {
            name: {key: int(value - before[name].get(key, 0.0)) for key, value in one.items()}
            for name, one in after.items()
        }
        return answer, rises

    def _counters(self, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
        """Return the counters of processes that have nothing to do."""
        found: dict[str, dict[str, float]] = {}

        def idle() -> bool:
            # Nobody waits for an extend or a release.
            found.update({name: scrape(self.metrics[name]) for name in names})
            return all(one["slots_in_use"] == 0 for one in found.values())

        wait_until(idle, "all slots are free")
        return found


def windows(verifier: dict[str, int]) -> list[int]:
    """Return how many windows had 1, 2, .. 8 rows; there was no wider one."""
    up_to = [verifier.get(f'window_rows_bucket{{le="{rows}.0"}}', 0) for rows in range(1, 9)]
    assert up_to[-1] == verifier.get("window_rows_count", 0)
    return [more - less for less, more in zip([0, *up_to], up_to, strict=False)]


def check_row_bytes(
    served: Served, row_bytes: Mapping[str, int], draft_count: int, right: int
) -> None:
    """Check the bytes of answers whose rounds all accept `right` drafts, by the drafters' rows."""
    rounds = 3
    drafted_rounds = rounds if right > 0 else rounds - 1  # a last token alone is not drafted for
    request = {"draft_count": draft_count, "max_tokens": 1 + rounds * (right + 1)}
    excess = {}
    for rows, width in row_bytes.items():
        answer, rise = served.counted(rows, PROMPT, **request, sampling={"seed": right})
        assert answer.finish.statistics.round_count == rounds
        committed = len(PROMPT) + rounds * (right + 1)
        # Rows that nobody drafts after stay with the coordinator.
        forwarded = len(PROMPT) + (drafted_rounds - 1) * (right + 1)
        assert rise["verifier"]["committed_row_bytes_total"] == committed * width
        wire = rise[f"coordinator-{rows}"]
        excess[rows] = {
            kind: wire[f'wire_bytes_total{{kind="{kind}"}}'] - count * width
            for kind, count in (("verify_response", committed), ("draft_request", forwarded))
        }
    # Beside rounds: open, prefill or its rows, release.
    messages = rounds + 3
    for kind in ("verify_response", "draft_request"):
        fused, raw = excess["fused"][kind], excess["raw"][kind]
        assert 0 < min(fused, raw) <= max(fused, raw) < MOST_OVERHEAD * messages
        assert abs(raw - fused) <= MOST_LENGTH_BYTES * messages
