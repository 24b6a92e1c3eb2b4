"""What an EAGLE-3 stack's own counters say of passes (E14), windows (L5) and row bytes (L6)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from splitspec.v1 import generation_pb2 as pb
from tests.eagle3_copy import (
    HIDDEN,
    TAP_LAYERS,
    VOCAB_SIZE,
    write_copy_head,
    write_copy_target,
    write_random_head,
)
from tests.system.cluster import Answer, Cluster, free_address, scrape, wait_until
from tests.system.conftest import EAGLE3_FLAGS, EAGLE3_VERIFIER

PROMPT = random.Random(1).sample(range(3, VOCAB_SIZE), 12)
LONG_PROMPT = random.Random(2).choices(range(3, VOCAB_SIZE), k=40)
"""Two prefill chunks."""
TOKENS = 1 + 24
FLOAT_BYTES = 4
ROW_BYTES = {"raw": len(TAP_LAYERS) * HIDDEN * FLOAT_BYTES, "fused": HIDDEN * FLOAT_BYTES}
MOST_OVERHEAD = 200
"""Bytes of a message besides its rows."""
MOST_LENGTH_BYTES = 8
"""What a message's lengths, its rows' width and its times grow by when its rows are wider."""
K_AND_FORCED = [(k, a) for k in range(1, 8) for a in range(k + 1)]


@dataclass
class Served:
    """The running cluster, what the target alone says, and where processes count."""

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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, program_cache: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("n")
    target, copy = write_copy_target(folder / "target"), write_copy_head(folder / "copy")
    drafters = ("raw", "fused", "random")
    names = ["verifier", *drafters, *(f"coordinator-{name}" for name in drafters)]
    metrics = {name: free_address() for name in names}
    flags = [*EAGLE3_VERIFIER, "--fuse-for", str(copy), "--metrics-address", metrics["verifier"]]
    cluster = Cluster(folder, target, flags, program_cache)
    try:
        cluster.start_verifier(wait=False)
        for name in drafters:
            is_random = name == "random"
            head = write_random_head(folder / "random") if is_random else copy
            rows, variant = ("raw", None) if is_random else (name, "forced")
            flags = [*EAGLE3_FLAGS, "--rows", rows, "--metrics-address", metrics[name]]
            cluster.start_eagle3(name, head, *flags, variant=variant, wait=False)
        cluster.wait_all_serving()
        for name in drafters:
            flags = ["--draft-seconds", "60", "--metrics-address", metrics[f"coordinator-{name}"]]
            cluster.start_coordinator(name, *flags, wait=False)
        alone = cluster.start_coordinator(None, wait=False)
        cluster.wait_all_serving()
        ids = pb.TokenIds(ids=LONG_PROMPT)
        truth = cluster.generate(alone, token_ids=ids, max_tokens=TOKENS, draft_count=0)
        yield Served(cluster, truth.token_ids, metrics)
    finally:
        cluster.close()


def windows(verifier: dict[str, int]) -> list[int]:
    """Return how many windows had 1, 2, .. 8 rows; there was no wider one."""
    up_to = [verifier.get(f'window_rows_bucket{{le="{rows}.0"}}', 0) for rows in range(1, 9)]
    assert up_to[-1] == verifier.get("window_rows_count", 0)
    return [more - less for less, more in zip([0, *up_to], up_to, strict=False)]


@pytest.mark.parametrize(("draft_count", "right"), K_AND_FORCED)
def test_e14_l5_passes_and_windows_are_as_many_where_drafts_are_accepted_in_part(
    served: Served, draft_count: int, right: int
) -> None:
    rounds = (TOKENS - 1) // (right + 1)
    most = 1 + rounds * (right + 1)
    answer, rise = served.counted(
        "fused", PROMPT, draft_count=draft_count, max_tokens=most, sampling={"seed": right}
    )
    assert list(answer.finish.statistics.acceptance_length_counts) == [0] * right + [rounds]
    # A window has no draft token that the budget has no room for; one row is left at its end only.
    drafted = [min(draft_count, most - 1 - done * (right + 1) - 1) for done in range(rounds)]
    assert drafted.count(0) == (1 if right == 0 else 0)
    assert windows(rise["verifier"]) == [drafted.count(rows) for rows in range(8)]
    assert rise["verifier"]["target_passes_total"] == 1 + rounds
    assert rise["fused"]["draft_passes_total"] == sum(drafted)


@pytest.mark.parametrize("draft_count", range(1, 8))
def test_e14_l5_a_random_head_costs_k_passes_a_round_and_no_window_is_narrower(
    served: Served, draft_count: int
) -> None:
    # A stop id ends the answer far from the budget's end: no round is cut short.
    end = max(i for i, token in enumerate(served.truth) if token not in served.truth[:i])
    answer, rise = served.counted(
        "random", LONG_PROMPT, draft_count=draft_count, stop_token_ids=[served.truth[end]]
    )
    assert answer.token_ids == served.truth[: end + 1]
    statistics = answer.finish.statistics
    rounds = statistics.round_count
    assert end / (draft_count + 1) < rounds <= end
    assert statistics.mean_acceptance_length < 1.3
    assert windows(rise["verifier"]) == [0] * draft_count + [rounds] + [0] * (7 - draft_count)
    assert rise["verifier"]["target_passes_total"] == 2 + rounds
    # The first chunk of two is seeded in a pass of its own.
    assert rise["random"]["draft_passes_total"] == 1 + draft_count * rounds


@pytest.mark.parametrize(("draft_count", "right"), K_AND_FORCED)
def test_l6_bytes_on_the_wire_are_committed_rows_times_their_width(
    served: Served, draft_count: int, right: int
) -> None:
    rounds = 3
    drafted_rounds = rounds if right > 0 else rounds - 1  # a last token alone is not drafted for
    request = {"draft_count": draft_count, "max_tokens": 1 + rounds * (right + 1)}
    excess = {}
    for rows, row_bytes in ROW_BYTES.items():
        answer, rise = served.counted(rows, PROMPT, **request, sampling={"seed": right})
        assert answer.finish.statistics.round_count == rounds
        committed = len(PROMPT) + rounds * (right + 1)
        # Rows that nobody drafts after stay with the coordinator.
        forwarded = len(PROMPT) + (drafted_rounds - 1) * (right + 1)
        assert rise["verifier"]["committed_row_bytes_total"] == committed * row_bytes
        wire = rise[f"coordinator-{rows}"]
        excess[rows] = {
            kind: wire[f'wire_bytes_total{{kind="{kind}"}}'] - count * row_bytes
            for kind, count in (("verify_response", committed), ("draft_request", forwarded))
        }
    # Beside rounds: open, prefill or its rows, release.
    messages = rounds + 3
    for kind in ("verify_response", "draft_request"):
        fused, raw = excess["fused"][kind], excess["raw"][kind]
        assert 0 < min(fused, raw) <= max(fused, raw) < MOST_OVERHEAD * messages
        assert abs(raw - fused) <= MOST_LENGTH_BYTES * messages
