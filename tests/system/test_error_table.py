"""Design 9, row by row, by real calls to real processes; after each, service goes on."""

from __future__ import annotations

import hashlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from splitspec.v1 import generation_pb2 as pb
from splitspec.v1 import verifier_pb2 as vpb
from splitspec.v1.rows_pb2 import ROW_KIND_NONE
from splitspec.v1.verifier_pb2_grpc import VerifierStub
from tests.system.cluster import ROOT, Cluster, free_address, scrape, wait_until

METRICS = free_address()
VERIFIER = ["--runtime", "torch", "--precision", "fp32", "--max-context-length", "128"]


@pytest.fixture(scope="module")
def small(
    tiny_model: Path, program_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Run a verifier with one slot and a coordinator whose waiting room holds one request."""
    folder = tmp_path_factory.mktemp("e")
    flags = [*VERIFIER, "--slot-count", "1"]
    cluster = Cluster(folder, tiny_model, flags, program_cache, gated=True)
    try:
        cluster.start_verifier()
        cluster.start_ngram()
        cluster.start_coordinator("ngram", "--queue-limit", "1")
        yield cluster
    finally:
        cluster.close()


def _refused(cluster: Cluster, **fields: Any) -> tuple[grpc.StatusCode, str, str, list[Any]]:
    """Return code, reason, message and all details of a request that must be refused."""
    return _refused_by(cluster, "coordinator-ngram", **fields)


def _refused_by(
    cluster: Cluster, coordinator: str, **fields: Any
) -> tuple[grpc.StatusCode, str, str, list[Any]]:
    with pytest.raises(grpc.RpcError) as caught:
        cluster.generate(coordinator, **fields)
    return _status(caught.value)


def _status(error: Any) -> tuple[grpc.StatusCode, str, str, list[Any]]:
    status = rpc_status.from_call(error)
    assert status is not None, error
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    assert info.domain == "splitspec"
    return error.code(), info.reason, error.details(), list(status.details)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"token_ids": pb.TokenIds(ids=[5, 4_000_000_000])}, "4000000000"),
        ({"token_ids": pb.TokenIds()}, "token_ids"),
        ({}, "prompt"),
        ({"text": "a", "sampling": {"temperature": -1}}, "temperature"),
        ({"text": "a", "sampling": {"temperature": float("nan")}}, "temperature"),
        ({"text": "a", "sampling": {"temperature": 1, "top_p": 0}}, "top_p"),
        ({"text": "a", "sampling": {"temperature": 1, "min_p": 1.5}}, "min_p"),
        ({"text": "a", "sampling": {"presence_penalty": 0.5}}, "presence_penalty"),
        ({"text": "a", "sampling": {"logit_bias": {3: 1.0}}}, "logit_bias"),
        ({"text": "a", "max_tokens": 0}, "max_tokens"),
        ({"text": "a", "stop": [""]}, "stop"),
        ({"text": "a", "draft_count": 1000}, "draft_count"),
        ({"conversation": pb.Conversation()}, "messages"),
        ({"conversation": {"messages": [{"role": "robot", "content": "a"}]}}, "role"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(
    small: Cluster, fields: dict[str, Any], named: str
) -> None:
    code, reason, message, _ = _refused(small, **fields)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert reason == "INVALID_ARGUMENT"
    assert named in message


def test_an_unknown_field_is_refused_never_ignored(small: Cluster) -> None:
    future = pb.GenerateRequest(text="a").SerializeToString() + bytes([0xF8, 0x3F, 0x01])
    call = small.channel("coordinator-ngram").unary_stream(
        "/splitspec.v1.Generation/Generate", response_deserializer=pb.GenerateResponse.FromString
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(call(future, timeout=10))
    assert _status(caught.value)[0] == grpc.StatusCode.INVALID_ARGUMENT


def test_a_prompt_that_does_not_fit_is_context_full(small: Cluster) -> None:
    code, reason, message, _ = _refused(small, token_ids=pb.TokenIds(ids=[5] * 200))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_FULL")
    assert "200" in message
    assert "128" in message


def test_the_context_is_filled_exactly_and_the_answer_ends_with_length(small: Cluster) -> None:
    for draft_count in (0, 3, 7):
        answer = small.generate(
            "coordinator-ngram",
            token_ids=pb.TokenIds(ids=[5] * 100),
            ignore_eos=True,
            draft_count=draft_count,
        )
        assert answer.finish.reason == pb.FINISH_REASON_LENGTH
        assert len(answer.token_ids) == 28


def test_lengths_that_disagree_are_refused_and_the_session_goes_on(small: Cluster) -> None:
    def item(length: int, **action: Any) -> vpb.VerifyItem:
        return vpb.VerifyItem(session=1, committed_length=length, **action)

    opened = vpb.OpenSession(sampling={}, row_kind=ROW_KIND_NONE)
    steps = [
        [item(0, open=opened), item(0, prefill=vpb.PrefillChunk(token_ids=[5, 6], final=True))],
        [item(3, verify=vpb.VerifyWindow(pending_token_id=7))],
        [item(2, verify=vpb.VerifyWindow(pending_token_id=7))],
    ]
    requests = [vpb.VerifierRunStepsRequest(step=i + 1, items=s) for i, s in enumerate(steps)]
    stub = VerifierStub(small.channel("verifier"))
    replies = list(stub.RunSteps(iter(requests), timeout=10))
    assert replies[1].results[0].error.reason == "COMMITTED_LENGTH_MISMATCH"
    assert replies[1].results[0].error.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
    assert replies[1].results[0].committed_length == 2
    assert replies[2].results[0].committed_length == 3


def test_a_full_queue_is_QUEUE_FULL_and_says_when_to_retry(small: Cluster) -> None:
    name = small.start_coordinator(None, "--queue-limit", "1", "--metrics-address", METRICS)
    request: dict[str, Any] = {"text": "a", "max_tokens": 100, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool, small.answering(name, 50, **request) as running:
        waiting = pool.submit(small.generate, name, **request)
        wait_until(lambda: scrape(METRICS)["num_requests_waiting"] == 1, "one request in the queue")
        code, reason, _, details = _refused_by(small, name, text="b")
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert any(d.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for d in details)
        small.gate.open()
        assert waiting.result().finish.reason == pb.FINISH_REASON_LENGTH
    assert running.result.token_ids == waiting.result().token_ids
    small.kill(name)


def test_a_slot_that_another_coordinator_keeps_is_NO_FREE_SLOT_and_says_when_to_retry(
    small: Cluster,
) -> None:
    name = small.start_coordinator(None, "--queue-seconds", "1")
    opened = vpb.OpenSession(sampling={}, row_kind=ROW_KIND_NONE)
    step = vpb.VerifierRunStepsRequest(
        step=1, items=[vpb.VerifyItem(session=9, committed_length=0, open=opened)]
    )
    done = threading.Event()

    def requests() -> Iterator[vpb.VerifierRunStepsRequest]:
        yield step
        done.wait(60)

    replies = VerifierStub(small.channel("verifier")).RunSteps(requests(), timeout=60)
    try:
        assert not next(replies).results[0].HasField("error")
        code, reason, _, details = _refused_by(small, name, text="b")
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_FREE_SLOT")
        assert any(d.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for d in details)
    finally:
        done.set()
    assert list(replies) == []
    assert small.generate(name, text="b", max_tokens=3, ignore_eos=True).token_ids
    small.kill(name)


def test_a_verifier_that_is_not_there_is_unavailable(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "coordinator", "serve", "--model", str(tiny_model)]
    command += ["--verifier", f"unix:{tmp_path}/nobody.sock", "--address", f"unix:{tmp_path}/c"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        with grpc.insecure_channel(f"unix:{tmp_path}/c") as channel:
            grpc.channel_ready_future(channel).result(timeout=20)
            call = channel.unary_stream(
                "/splitspec.v1.Generation/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateResponse.FromString,
            )
            with pytest.raises(grpc.RpcError) as caught:
                list(call(pb.GenerateRequest(text="a"), timeout=60))
        code, reason, _, _ = _status(caught.value)
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")
    finally:
        process.kill()
        process.communicate()


def test_sigterm_drains_the_answer_ends_and_new_requests_are_refused(small: Cluster) -> None:
    name = "coordinator-ngram"
    request: dict[str, Any] = {"text": "a", "max_tokens": 110, "ignore_eos": True, "draft_count": 0}
    with small.answering(name, 40, **request) as running:
        small.processes[name].send_signal(signal.SIGTERM)
        small.wait_not_serving(name)
        code, reason, _, _ = _refused_by(small, name, text="b")
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert running.result.finish.reason == pb.FINISH_REASON_LENGTH
    assert len(running.result.token_ids) == 110
    assert small.ended(name) == 0
    small.restart(name)
    assert small.generate(name, text="a", max_tokens=3, ignore_eos=True).token_ids


def _last_line_of_a_start(cluster: Cluster, model: Path, drafter: str | None) -> str:
    """Return the last line of a coordinator that must refuse to start with exit code 2."""
    command = [sys.executable, "-m", "coordinator", "serve", "--model", str(model)]
    command += ["--verifier", cluster.address("verifier")]
    command += ["--address", cluster.address("refused")]
    if drafter is not None:
        command += ["--drafter", cluster.address(drafter)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    return lines[-1]


def test_MODEL_MISMATCH_another_tokenizer_is_one_line_with_both_hashes(
    small: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    tokenizer = (tiny_model / "tokenizer.json").read_bytes()
    (other / "tokenizer.json").write_bytes(tokenizer + b"\n")
    hashes = [hashlib.sha256(content).hexdigest() for content in (tokenizer, tokenizer + b"\n")]
    line = _last_line_of_a_start(small, other, None)
    assert "tokenizer_hash" in line
    assert all(value in line for value in hashes)


def test_MODEL_MISMATCH_a_drafter_that_wants_other_rows_is_one_line_with_both_widths(
    small: Cluster,
) -> None:
    model = VerifierStub(small.channel("verifier")).GetModel(vpb.VerifierGetModelRequest())
    taps = ",".join(map(str, model.tap_layers))
    width = 64 * len(model.tap_layers)
    small.start_fake_drafter("rows", {}, "--tap-layers", taps, "--row-width", str(width + 1))
    line = _last_line_of_a_start(small, small.model, "rows")
    assert "row_width" in line
    assert str(width) in line
    assert str(width + 1) in line
    other = next(layer for layer in range(4) if layer not in model.tap_layers)
    small.kill("rows")
    small.start_fake_drafter("rows", {}, "--tap-layers", str(other), "--row-width", str(width))
    line = _last_line_of_a_start(small, small.model, "rows")
    assert "tap_layers" in line
    assert str([other]) in line
    assert str(list(model.tap_layers)) in line
    small.kill("rows")


def test_an_address_in_use_is_one_line(small: Cluster, tiny_model: Path) -> None:
    holder = small.processes["ngram"]
    assert holder.poll() is None
    for command in (
        ["drafter_service", "serve", "--draft", "ngram"],
        ["verifier_service", "serve", "--model", str(tiny_model), *VERIFIER],
        ["coordinator", "serve", "--model", str(tiny_model), "--verifier", "127.0.0.1:1"],
    ):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            result = subprocess.run(
                [sys.executable, "-m", *command, "--address", f"127.0.0.1:{port}"],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=60,
            )
        assert result.returncode == 2, result.stderr
        last = result.stderr.strip().splitlines()[-1]
        assert last.startswith("error: ")
        assert str(port) in last
        assert "Traceback" not in result.stderr
