"""What a DFlash stack's counters say of passes (D2, L5), row bytes (D18, L6), drafts (D20)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from splitspec.v1 import generation_pb2 as pb
from tests.copy_target import HIDDEN, TAP_LAYERS
from tests.dflash_planted import (
    LEAST_WINDOW,
    VOCAB_SIZE,
    write_planted_draft,
    write_planted_target,
)
from tests.system.cluster import Answer, Cluster, free_address, scrape, wait_until
from tests.system.conftest import DFLASH_FLAGS, DFLASH_VERIFIER

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
    target = write_planted_target(folder / "target")
    planted = write_planted_draft(folder / "planted", sliding_window=LEAST_WINDOW, causal=False)
    drafters = ("raw", "fused")
    names = ["verifier", *drafters, *(f"coordinator-{name}" for name in drafters)]
    metrics = {name: free_address() for name in names}
    flags = [*DFLASH_VERIFIER, "--fuse-for", str(planted)]
    flags += ["--metrics-address", metrics["verifier"]]
    cluster = Cluster(folder, target, flags, program_cache)
    try:
        cluster.start_verifier(wait=False)
        for name in drafters:
            flags = [*DFLASH_FLAGS, "--rows", name, "--metrics-address", metrics[name]]
            cluster.start_dflash(name, planted, *flags, variant="forced", wait=False)
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
def test_d2_d20_k7_l5_a_round_is_one_target_pass_and_one_draft_pass_whatever_is_accepted(
    served: Served, draft_count: int, right: int
) -> None:
    rounds = (TOKENS - 1) // (right + 1)
    most = 1 + rounds * (right + 1)
    answer, rise = served.counted(
        "fused", PROMPT, draft_count=draft_count, max_tokens=most, sampling={"seed": right}
    )
    statistics = answer.finish.statistics
    assert list(statistics.acceptance_length_counts) == [0] * right + [rounds]
    # A window has no draft token that the budget has no room for; one row is left at its end only.
    drafted = [min(draft_count, most - 1 - done * (right + 1) - 1) for done in range(rounds)]
    alone = drafted.count(0)
    assert alone == (1 if right == 0 else 0)
    assert windows(rise["verifier"]) == [drafted.count(rows) for rows in range(8)]
    # D2: however many are drafted.
    assert rise["verifier"]["target_passes_total"] == 1 + rounds
    assert rise["fused"]["draft_passes_total"] == rounds - alone
    # D20: rounds are those that drafted and those that did not; a position is accepted at most as
    # often as the one before it.
    assert statistics.round_count == rounds
    assert statistics.target_only_round_count == alone
    counts = rise["coordinator-fused"]
    assert counts["spec_decode_num_drafts_total"] == rounds - alone
    assert counts["spec_decode_num_draft_tokens_total"] == sum(drafted)
    assert counts["spec_decode_num_accepted_tokens_total"] == rounds * right
    stood = [
        counts.get(f'spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}', 0)
        for position in range(8)
    ]
    assert stood == [rounds] * right + [0] * (8 - right)


@pytest.mark.parametrize("draft_count", [1, 4, 7])
def test_d2_l5_a_chunk_of_a_prompt_costs_no_draft_pass_and_no_window_is_narrower_than_k_plus_1(
    served: Served, draft_count: int
) -> None:
    # A stop id ends the answer far from the budget's end: no round is cut short.
    end = max(i for i, token in enumerate(served.truth) if token not in served.truth[:i])
    stop, right = [served.truth[end]], draft_count // 2
    answer, rise = served.counted(
        "fused", LONG_PROMPT, draft_count=draft_count, stop_token_ids=stop, sampling={"seed": right}
    )
    assert answer.token_ids == served.truth[: end + 1]
    rounds = answer.finish.statistics.round_count
    assert rounds == -(-end // (right + 1))
    assert windows(rise["verifier"]) == [0] * draft_count + [rounds] + [0] * (7 - draft_count)
    assert rise["verifier"]["target_passes_total"] == 2 + rounds
    # The rows of the first chunk of two are projected without a pass.
    assert rise["fused"]["draft_passes_total"] == rounds


@pytest.mark.parametrize(
    ("draft_count", "right"), [(k, a) for k, a in K_AND_FORCED if k in (1, 4, 7)]
)
def test_d18_l6_bytes_on_the_wire_are_committed_rows_times_their_width(
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
