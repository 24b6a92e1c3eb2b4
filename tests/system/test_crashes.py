"""Kills and disconnects at many moments: no token lost or repeated, no slot kept (L1-L4, L7)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from splitspec.v1 import generation_pb2 as pb
from splitspec.v1 import verifier_pb2
from splitspec.v1.rows_pb2 import ROW_KIND_NONE
from splitspec.v1.verifier_pb2_grpc import VerifierStub
from tests.system.cluster import Answer, Cluster

TOKENS = 160
REQUEST: dict[str, Any] = {
    "text": "one two three one two three one two",
    "sampling": {"temperature": 0.8, "top_k": 20, "seed": 77},
    "max_tokens": TOKENS,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> tuple[Cluster, Answer]:
    cluster.start_coordinator("ngram")
    reference = cluster.generate(cluster.start_coordinator(None), **REQUEST)
    assert len(reference.token_ids) == TOKENS
    return cluster, reference


def _generate_and(cluster: Cluster, at: int, act: Callable[[], None]) -> Answer:
    """Generate; run `act` in a thread once `at` tokens have come."""
    threads: list[threading.Thread] = []

    def on_response(count: int) -> None:
        if count >= at and not threads:
            threads.append(threading.Thread(target=act))
            threads[0].start()

    answer = cluster.generate("coordinator-ngram", on_response, **REQUEST)
    assert threads, "the answer ended before the kill"
    threads[0].join()
    return answer


def _same(answer: Answer, reference: Answer) -> None:
    assert answer.token_ids == reference.token_ids
    assert answer.text == reference.text
    assert answer.finish.reason == reference.finish.reason
    statistics = answer.finish.statistics
    assert statistics.output_token_count == TOKENS


@pytest.mark.parametrize("at", [1, 5, 37, 90])
def test_l4_verifier_killed_mid_round_the_answer_is_replayed_and_unchanged(
    served: tuple[Cluster, Answer], at: int
) -> None:
    cluster, reference = served

    def crash() -> None:
        cluster.kill("verifier")
        cluster.restart("verifier")

    answer = _generate_and(cluster, at, crash)
    _same(answer, reference)
    assert answer.finish.statistics.replay_count >= 1


@pytest.mark.parametrize("at", [1, 20, 90])
def test_l4_drafter_killed_mid_round_the_answer_goes_on_target_only(
    served: tuple[Cluster, Answer], at: int
) -> None:
    cluster, reference = served
    try:
        answer = _generate_and(cluster, at, lambda: cluster.kill("ngram"))
        _same(answer, reference)
        assert answer.finish.statistics.target_only_round_count > 0
    finally:
        cluster.restart("ngram")


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
    answer = _generate_and(cluster, 30, doomed.cancel)
    _same(answer, reference)
