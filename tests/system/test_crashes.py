"""Kills, drains, faults and disconnects: no token lost or repeated, no slot kept (L1-L4, L7).

The verifier is gated: a peer ends while a pass is in flight, whatever the machine is busy with.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from splitspec.v1 import generation_pb2 as pb
from splitspec.v1 import verifier_pb2
from splitspec.v1.rows_pb2 import ROW_KIND_NONE
from splitspec.v1.verifier_pb2_grpc import VerifierStub
from tests.system.cluster import Answer, Cluster, running_cluster
from tests.system.conftest import RUNTIMES

TOKENS = 160
PROMPT = [20, 30, 40, 50] * 3
REQUEST: dict[str, Any] = {
    "token_ids": pb.TokenIds(ids=PROMPT),
    "sampling": {"temperature": 0.8, "top_k": 20, "seed": 77},
    "max_tokens": TOKENS,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def gated(
    tiny_model: Path, program_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Run the default runtime; verifiers in torch are killed in the rows' and the drafts' tests."""
    flags = [*RUNTIMES["executorch"], "--slot-count", "8", "--max-context-length", "256"]
    folder = tmp_path_factory.mktemp("g")
    yield from running_cluster(folder, tiny_model, flags, program_cache, gated=True)


@pytest.fixture(scope="module")
def served(gated: Cluster) -> tuple[Cluster, Answer]:
    reference = gated.generate(gated.start_coordinator(None), **REQUEST)
    assert len(reference.token_ids) == TOKENS
    gated.start_fake_drafter("right", {tuple(PROMPT): reference.token_ids})
    gated.start_coordinator("right")
    gated.start_coordinator("ngram")
    return gated, reference


@pytest.fixture(autouse=True)
def _mended(gated: Cluster) -> Iterator[None]:
    yield
    gated.restart_missing()


def _same(answer: Answer, reference: Answer) -> None:
    assert answer.token_ids == reference.token_ids
    assert answer.text == reference.text
    assert answer.finish.reason == reference.finish.reason
    statistics = answer.finish.statistics
    assert statistics.output_token_count == TOKENS


@pytest.mark.parametrize(("at", "drafter"), [(0, "right"), (37, "ngram")])
def test_l4_verifier_killed_mid_round_the_answer_is_replayed_and_unchanged(
    served: tuple[Cluster, Answer], at: int, drafter: str
) -> None:
    cluster, reference = served
    with cluster.answering(f"coordinator-{drafter}", len(PROMPT) + at, **REQUEST) as running:
        cluster.kill("verifier")
        cluster.restart("verifier")
    _same(running.result, reference)
    assert running.result.finish.statistics.replay_count == 1


def test_a_right_drafter_leaves_no_target_only_rounds(served: tuple[Cluster, Answer]) -> None:
    """Guard of the counts below: without a loss there is none but the one for the last token."""
    cluster, reference = served
    answer = cluster.generate("coordinator-right", **REQUEST)
    _same(answer, reference)
    assert answer.finish.statistics.target_only_round_count <= 1


@pytest.mark.parametrize("at", [1, 60])
def test_l4_drafter_killed_mid_round_the_answer_goes_on_target_only_and_drafts_again(
    served: tuple[Cluster, Answer], at: int
) -> None:
    cluster, reference = served
    lost, back = len(PROMPT) + at, len(PROMPT) + at + 40
    with cluster.answering("coordinator-right", lost, **REQUEST) as running:
        cluster.kill("right")
        cluster.wait_drafter("coordinator-right", connected=False)
        cluster.gate.hold(back)
        cluster.gate.wait_held(back)
        cluster.restart("right")
        cluster.wait_drafter("coordinator-right", connected=True)
    _same(running.result, reference)
    statistics = running.result.finish.statistics
    assert statistics.accepted_token_count == statistics.draft_token_count
    # The window that was held reaches 15 positions beyond `lost` at most; then one a round.
    assert 40 - 15 <= statistics.target_only_round_count <= 40 + 2
    drafted_before = at * 7 // 8, at + 15  # at least, at most
    drafted_after = (TOKENS - 1 - (at + 40) - 1) * 7 // 8 - 7
    assert drafted_after > 20
    assert statistics.draft_token_count >= drafted_before[0] + drafted_after
    assert statistics.draft_token_count > drafted_before[1]


@pytest.mark.parametrize("first", ["verifier", "right"])
def test_l4_both_killed_mid_round_the_answer_is_unchanged(
    served: tuple[Cluster, Answer], first: str
) -> None:
    cluster, reference = served
    second = {"verifier": "right", "right": "verifier"}[first]
    with cluster.answering("coordinator-right", len(PROMPT) + 20, **REQUEST) as running:
        cluster.kill(first)
        cluster.kill(second)
        cluster.restart(first)
        cluster.restart(second)
        cluster.wait_drafter("coordinator-right", connected=True)
    _same(running.result, reference)
    statistics = running.result.finish.statistics
    assert statistics.replay_count == 1
    assert statistics.draft_token_count > 20 + 15


def test_l4_a_verifier_that_drains_finishes_what_runs_and_the_next_answer_waits_for_its_successor(
    served: tuple[Cluster, Answer],
) -> None:
    cluster, reference = served
    name = "coordinator-right"
    with ThreadPoolExecutor(1) as pool:
        with cluster.answering(name, len(PROMPT) + 20, **REQUEST) as running:
            cluster.processes["verifier"].send_signal(signal.SIGTERM)
            cluster.wait_not_serving("verifier")
            # Its open is refused with DRAINING, which is not the end of it.
            waiting = pool.submit(cluster.generate, name, **REQUEST)
        assert cluster.ended("verifier") == 0
        cluster.restart("verifier")
        _same(running.result, reference)
        assert running.result.finish.statistics.replay_count == 0
        _same(waiting.result(), reference)


def test_l4_a_drain_that_is_cut_short_by_a_kill_is_replayed(
    served: tuple[Cluster, Answer],
) -> None:
    cluster, reference = served
    with cluster.answering("coordinator-right", len(PROMPT) + 20, **REQUEST) as running:
        cluster.processes["verifier"].send_signal(signal.SIGTERM)
        cluster.wait_not_serving("verifier")
        cluster.kill("verifier")
        cluster.restart("verifier")
    _same(running.result, reference)
    assert running.result.finish.statistics.replay_count == 1


def test_l4_a_device_fault_ends_the_verifier_and_the_answer_is_replayed_on_its_successor(
    served: tuple[Cluster, Answer],
) -> None:
    cluster, reference = served
    with cluster.answering("coordinator-right", len(PROMPT) + 20, **REQUEST) as running:
        cluster.gate.fail()
        assert cluster.ended("verifier") == 1
        assert "device lost" in cluster.log("verifier").splitlines()[-1]
        cluster.gate.open()
        cluster.restart("verifier")
    _same(running.result, reference)
    assert running.result.finish.statistics.replay_count == 1


def test_the_drafter_is_picked_up_again_after_it_was_lost(served: tuple[Cluster, Answer]) -> None:
    cluster, reference = served
    cluster.kill("ngram")
    lost = cluster.generate("coordinator-ngram", **REQUEST)
    assert lost.finish.statistics.draft_token_count == 0
    cluster.restart("ngram")
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        answer = cluster.generate("coordinator-ngram", **REQUEST)
        _same(answer, reference)
        if answer.finish.statistics.draft_token_count:
            return
    pytest.fail("no draft after the drafter came back")


def _all_slots_free(cluster: Cluster) -> bool:
    """Try to take every slot of the verifier at once on a stream of our own."""
    stub = VerifierStub(cluster.channel("verifier"))
    count = stub.GetModel(verifier_pb2.VerifierGetModelRequest()).slot_count
    items = [
        verifier_pb2.VerifyItem(
            session=i + 1,
            committed_length=0,
            open=verifier_pb2.OpenSession(sampling={}, row_kind=ROW_KIND_NONE),
        )
        for i in range(count)
    ]
    request = verifier_pb2.VerifierRunStepsRequest(step=1, items=items)
    reply = next(iter(stub.RunSteps(iter([request]), timeout=5)))
    return not any(result.HasField("error") for result in reply.results)


def _wait_all_slots_free(cluster: Cluster, seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not _all_slots_free(cluster):
        assert time.monotonic() < limit, "slots are still taken"
        time.sleep(0.05)


def test_l7_a_client_that_goes_away_frees_its_slots_within_a_second(
    served: tuple[Cluster, Answer],
) -> None:
    cluster, _ = served
    stub = cluster.stub("coordinator-ngram")
    calls = [stub.Generate(pb.GenerateRequest(**REQUEST)) for _ in range(8)]
    for call in calls:
        next(call)
    for call in calls:
        call.cancel()
    _wait_all_slots_free(cluster, 1.0)


def test_l7_a_killed_coordinator_frees_its_slots_within_a_second(
    served: tuple[Cluster, Answer],
) -> None:
    cluster, reference = served
    call = cluster.stub("coordinator-ngram").Generate(pb.GenerateRequest(**REQUEST))
    next(call)
    cluster.kill("coordinator-ngram")
    with pytest.raises(grpc.RpcError):
        list(call)
    _wait_all_slots_free(cluster, 1.0)
    cluster.restart("coordinator-ngram")
    _same(cluster.generate("coordinator-ngram", **REQUEST), reference)


def test_cancelling_one_request_leaves_the_others_unchanged(
    served: tuple[Cluster, Answer],
) -> None:
    cluster, reference = served
    doomed = cluster.stub("coordinator-ngram").Generate(pb.GenerateRequest(**REQUEST))
    with cluster.answering("coordinator-ngram", len(PROMPT) + 30, **REQUEST) as running:
        doomed.cancel()
    _same(running.result, reference)
