"""Pairs that would draft nonsense are refused at the coordinator's start, naming what differs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.copy_target import widen
from tests.eagle3_copy import write_copy_head, write_copy_target, write_random_head
from tests.system.cluster import Cluster
from tests.system.conftest import EAGLE3_FLAGS, EAGLE3_VERIFIER

MORE_IDS = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, program_cache: Path) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("h")
    target, head = write_copy_target(folder / "target"), write_copy_head(folder / "head")
    wide_target, wide_head = folder / "wide-target", folder / "wide-head"
    shutil.copytree(target, wide_target)
    shutil.copytree(head, wide_head)
    for wide in (wide_target, wide_head):
        widen(wide, MORE_IDS)
    flags = [*EAGLE3_VERIFIER, "--fuse-for", str(head)]
    cluster = Cluster(folder, target, flags, program_cache)
    raw, fused = ([*EAGLE3_FLAGS, "--rows", rows] for rows in ("raw", "fused"))
    try:
        cluster.start_verifier(wait=False)
        cluster.start_eagle3("other-taps", head, *raw, "--tap-layers", "0,1,3", wait=False)
        cluster.start_eagle3("other-vocabulary", wide_head, *raw, target=wide_target, wait=False)
        random_head = write_random_head(folder / "random")
        cluster.start_eagle3("other-draft", random_head, *fused, wait=False)
        cluster.wait_all_serving()
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
