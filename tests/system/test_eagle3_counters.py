"""What an EAGLE-3 stack's own counters say of passes (E14), windows (L5) and row bytes (L6)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from splitspec.v1 import generation_pb2 as pb
from tests.eagle3_copy import (
    HIDDEN,
    TAP_LAYERS,
    write_copy_head,
    write_copy_target,
    write_random_head,
)
from tests.system.cluster import Cluster, free_address
from tests.system.conftest import EAGLE3_FLAGS, EAGLE3_VERIFIER
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
    check_row_bytes(served, ROW_BYTES, draft_count, right)
