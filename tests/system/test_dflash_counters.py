"""What a DFlash stack's counters say of passes (D2, L5), row bytes (D18, L6), drafts (D20)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from splitspec.v1 import generation_pb2 as pb
from tests.copy_target import HIDDEN, TAP_LAYERS
from tests.dflash_planted import (
    LEAST_WINDOW,
    write_planted_draft,
    write_planted_target,
)
from tests.system.cluster import Cluster, free_address
from tests.system.conftest import DFLASH_FLAGS, DFLASH_VERIFIER
from tests.system.counting import (
    K_AND_FORCED,
    LONG_PROMPT,
    PROMPT,
    TOKENS,
    Served,
    check_row_bytes,
    windows,
)

FLOAT_BYTES = 4
ROW_BYTES = {"raw": len(TAP_LAYERS) * HIDDEN * FLOAT_BYTES, "fused": HIDDEN * FLOAT_BYTES}


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
    check_row_bytes(served, ROW_BYTES, draft_count, right)
