"""What would draft nonsense is refused: pairs at the coordinator's start, naming what differs;
block lengths at the drafter's (D19); rows that have not committed, at their own item (L2)."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitspec.v1 import drafter_pb2, rows_pb2
from splitspec.v1 import generation_pb2 as pb
from splitspec.v1.drafter_pb2_grpc import DrafterStub
from tests.copy_target import HIDDEN, widen
from tests.dflash_planted import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    write_planted_draft,
    write_planted_target,
    write_random_draft,
)
from tests.system.cluster import Cluster
from tests.system.conftest import DFLASH_FLAGS, DFLASH_VERIFIER

PROMPT = random.Random(1).choices(range(3, VOCAB_SIZE), k=12)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, program_cache: Path) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("h")
    target = write_planted_target(folder / "target")
    draft = write_planted_draft(folder / "draft")
    wide_target, wide_draft = folder / "wide-target", folder / "wide-draft"
    shutil.copytree(target, wide_target)
    shutil.copytree(draft, wide_draft)
    for wide in (wide_target, wide_draft):
        widen(wide, 20)
    flags = [*DFLASH_VERIFIER, "--fuse-for", str(draft)]
    cluster = Cluster(folder, target, flags, program_cache)
    raw, fused = ([*DFLASH_FLAGS, "--rows", rows] for rows in ("raw", "fused"))
    try:
        cluster.start_verifier(wait=False)
        cluster.start_dflash("other-taps", draft, *raw, "--tap-layers", "0,1,3", wait=False)
        cluster.start_dflash("other-vocabulary", wide_draft, *raw, target=wide_target, wait=False)
        random_draft = write_random_draft(folder / "random")
        cluster.start_dflash("other-draft", random_draft, *fused, wait=False)
        cluster.start_dflash("short", draft, *fused, "--block-length", "4", wait=False)
        cluster.wait_all_serving()
        cluster.start_coordinator("short", "--draft-seconds", "60")
        yield cluster
    finally:
        cluster.close()


@pytest.mark.parametrize(
    ("drafter", "names"),
    [
        pytest.param("other-taps", "tap_layers: .*0, 1, 3.*0, 1, 2", id="taps off by one"),
        pytest.param("other-vocabulary", "vocab_size: .*320.*300", id="another vocabulary"),
        pytest.param("other-draft", "fused_model_hash: ", id="rows fused for another"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(cluster: Cluster, drafter: str, names: str) -> None:
    with pytest.raises(RuntimeError, match=names):
        cluster.start_coordinator(drafter)
    name = f"coordinator-{drafter}"
    # Refused, and nothing is left that answers without drafts.
    assert cluster.processes.pop(name).wait() != 0
    assert "error: " in cluster.log(name)


def test_d19_lengths_and_counts_beyond_the_trained_block_are_refused_in_one_line(
    cluster: Cluster,
) -> None:
    draft = cluster.folder / "draft"
    refused = {
        "longer-block": (("--block-length", "9"), ("9", f"2 to {BLOCK_SIZE}")),
        "more-than-short": (
            ("--block-length", "4", "--max-draft-count", "4"),
            ("--max-draft-count 4", "1..3"),
        ),
    }
    for name, (flags, _) in refused.items():
        cluster.start_dflash(name, draft, *DFLASH_FLAGS, *flags, wait=False)
    for name, (_, words) in refused.items():
        assert cluster.ended(name) != 0
        (line,) = (x for x in cluster.log(name).splitlines() if x.startswith("error: "))
        assert all(word in line for word in words), line


@pytest.mark.parametrize("draft_count", [2, 3, 7])
def test_d19_a_block_shorter_than_trained_drafts_what_it_has_room_for(
    cluster: Cluster, draft_count: int
) -> None:
    answer = cluster.generate(
        "coordinator-short",
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling={"temperature": 1.0, "seed": 5},
        max_tokens=25,
        draft_count=draft_count,
    )
    length = min(draft_count, 3) + 1
    counts = answer.finish.statistics.acceptance_length_counts
    assert list(counts) == [0] * (length - 1) + [24 // length]


def test_l2_a_bonus_tokens_row_that_is_committed_too_early_is_refused_and_spoils_no_other(
    cluster: Cluster,
) -> None:
    stub = DrafterStub(cluster.channel("short"))
    length = len(PROMPT)

    def draft(session: int, begin: int, tokens: list[int], row_count: int) -> drafter_pb2.DraftItem:
        rows = rows_pb2.Rows(
            kind=rows_pb2.ROW_KIND_FUSED,
            dtype=rows_pb2.ROW_DTYPE_FLOAT32,
            width=HIDDEN,
            start=begin,
            count=row_count,
            inline=bytes(4 * HIDDEN * row_count),
        )
        item = drafter_pb2.Draft(token_ids=tokens, rows=rows, pending_token_id=9, draft_count=3)
        return drafter_pb2.DraftItem(session=session, context_length=begin, draft=item)

    opened = [
        drafter_pb2.DraftItem(
            session=session, context_length=0, open=drafter_pb2.OpenDraftSession()
        )
        for session in (1, 2, 3)
    ]
    steps = [
        opened,
        [
            # A row more than tokens: the pending token's own.
            draft(1, 0, PROMPT, length + 1),
            # Its token too: the context is then longer than what has committed.
            draft(2, 0, [*PROMPT, 9], length + 1),
            draft(3, 0, PROMPT, length),
        ],
        # The next round of the session begins where rows have committed.
        [draft(2, length, [9], 1), draft(3, length, [9], 1)],
    ]
    requests = [
        drafter_pb2.DrafterRunStepsRequest(step=n, items=items) for n, items in enumerate(steps, 1)
    ]
    _, first, second = stub.RunSteps(iter(requests), timeout=60)
    assert [result.HasField("error") for result in first.results] == [True, False, False]
    assert first.results[0].context_length == 0
    assert first.results[0].error.reason == "INVALID_ARGUMENT"
    early, right = second.results
    assert early.error.reason == "COMMITTED_LENGTH_MISMATCH"
    assert early.context_length == length + 1
    assert len(right.draft.draft_token_ids) == 3
    assert right.context_length == length + 1
