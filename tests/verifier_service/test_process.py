"""`python -m verifier_service` as a real process: serves a tiny model, drains, names mistakes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from graph_runtime.choice import Sampling
from splitspec.v1 import rows_pb2, sampling_pb2, verifier_pb2_grpc
from splitspec.v1 import verifier_pb2 as pb
from tests.graph_runtime.test_choice import reference_choice
from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
START_LIMIT_SECONDS = 120
PROMPT = [10, 20, 30, 40, 50]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "verifier_service", *flags]


def serve(model: Path, address: str, *flags: str) -> list[str]:
    where = ("--model", str(model), "--runtime", "torch", "--threads", "1", "--address", address)
    return command("serve", *where, "--max-context-length", "128", *flags)


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a process while the block runs, and end it by its id."""
    process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@contextmanager
def connected(address: str) -> Iterator[verifier_pb2_grpc.VerifierStub]:
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(START_LIMIT_SECONDS)
        yield verifier_pb2_grpc.VerifierStub(channel)


def handshake(stub: verifier_pb2_grpc.VerifierStub) -> pb.VerifierGetModelResponse:
    """Return the model as soon as it is loaded."""
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while True:
        try:
            return stub.GetModel(pb.VerifierGetModelRequest(), timeout=10)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def generate(
    stub: verifier_pb2_grpc.VerifierStub, sampling: sampling_pb2.SamplingParameters, rounds: int
) -> list[int]:
    """Open, prefill in two chunks, then verify windows of junk drafts; return what was emitted."""
    opened = pb.OpenSession(sampling=sampling, row_kind=rows_pb2.ROW_KIND_RAW_TAPS)
    items = [
        [pb.VerifyItem(session=1, committed_length=0, open=opened)],
        [
            pb.VerifyItem(
                session=1, committed_length=0, prefill=pb.PrefillChunk(token_ids=PROMPT[:2])
            )
        ],
        [
            pb.VerifyItem(
                session=1,
                committed_length=2,
                prefill=pb.PrefillChunk(token_ids=PROMPT[2:], final=True),
            )
        ],
    ]
    tokens = list(PROMPT)
    inbox: list[pb.VerifierRunStepsResponse] = []

    def requests() -> Iterator[pb.VerifierRunStepsRequest]:
        for number, step in enumerate(items, start=1):
            yield pb.VerifierRunStepsRequest(step=number, items=step)
        while len(inbox) < 3:
            time.sleep(0.001)
        tokens.append(inbox[2].results[0].prefill.bonus_token_id)
        for number in range(rounds):
            drafts = [tokens[-1]] * (number % 8)
            window = pb.VerifyWindow(pending_token_id=tokens[-1], draft_token_ids=drafts)
            committed = len(tokens) - 1
            yield pb.VerifierRunStepsRequest(
                step=4 + number,
                items=[pb.VerifyItem(session=1, committed_length=committed, verify=window)],
            )
            while len(inbox) < 4 + number:
                time.sleep(0.001)
            result = inbox[-1].results[0].verify
            assert result.rows.count == result.accepted_count + 1  # L3
            tokens.extend([*drafts[: result.accepted_count], result.bonus_token_id])

    for response in stub.RunSteps(requests(), timeout=60):
        assert not any(result.HasField("error") for result in response.results), response
        inbox.append(response)
    return tokens[len(PROMPT) :]


def alone(model: Path, sampling: Sampling, count: int) -> list[int]:
    """Return what the model emits by itself: `transformers`, no cache, and the slow rule."""
    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(count):
            logits = decoder(torch.tensor([tokens])).logits[0, -1].tolist()
            tokens.append(reference_choice(logits, sampling, len(tokens)))
    return tokens[len(PROMPT) :]


def test_a_real_process_serves_a_real_model_and_SIGTERM_drains_it(
    model: Path, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/verifier.sock"
    with running(serve(model, address)) as process, connected(address) as stub:
        served = handshake(stub)
        assert (served.model_id, served.runtime, served.precision) == ("tiny", "torch", "fp32")
        assert served.slot_count == 8
        assert len(served.model_hash) >= 32
        greedy = generate(stub, sampling_pb2.SamplingParameters(), 12)
        assert greedy == alone(model, Sampling(), len(greedy))
        drawn = generate(stub, sampling_pb2.SamplingParameters(temperature=0.9, seed=5), 12)
        assert drawn == alone(model, Sampling(temperature=0.9, seed=5), len(drawn))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        with pytest.raises(grpc.RpcError):
            stub.GetModel(pb.VerifierGetModelRequest(), timeout=5)


def test_L7_the_slots_of_a_client_that_was_killed_are_free_within_a_second(
    model: Path, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/verifier.sock"
    holder = f"""
import sys, time, grpc
from splitspec.v1 import verifier_pb2 as pb, verifier_pb2_grpc
def requests():
    opened = pb.OpenSession(row_kind=1)
    yield pb.VerifierRunStepsRequest(step=1, items=[
        pb.VerifyItem(session=n, committed_length=0, open=opened) for n in range(1, 9)])
    time.sleep(600)
with grpc.insecure_channel({address!r}) as channel:
    for _ in verifier_pb2_grpc.VerifierStub(channel).RunSteps(requests()):
        print("held", flush=True)
"""
    opened = pb.OpenSession(row_kind=rows_pb2.ROW_KIND_NONE)
    item = pb.VerifyItem(session=1, committed_length=0, open=opened)
    steps = [pb.VerifierRunStepsRequest(step=1, items=[item])]
    with running(serve(model, address)), connected(address) as stub:
        handshake(stub)
        client = subprocess.Popen(
            [sys.executable, "-c", holder], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert client.stdout is not None
        with client.stdout:
            assert client.stdout.readline() == "held\n"
            (full,) = stub.RunSteps(iter(steps), timeout=10)
            assert full.results[0].error.reason == "NO_FREE_SLOT"
            os.kill(client.pid, signal.SIGKILL)
            client.wait()
        limit = time.monotonic() + 1.0
        while True:
            asked = time.monotonic()
            (free,) = stub.RunSteps(iter(steps), timeout=10)
            if not free.results[0].HasField("error"):
                break
            assert asked < limit, "slots are still taken"
            time.sleep(0.02)


def test_a_device_fault_ends_the_process_with_one_line_and_exit_code_1(
    model: Path, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/verifier.sock"
    flags = serve(model, address)[3:]
    script = f"""
import sys
import verifier_service.__main__ as verifier
from tests.fakes import FakeTarget
from verifier_service.engine import Engine
target = FakeTarget()
target.fault = RuntimeError("device lost")
verifier.load_engine = lambda config, folder, stop: Engine(target, max_draft_count=7)
sys.argv[1:] = {flags!r}
verifier.main()
"""
    opened = pb.OpenSession(row_kind=rows_pb2.ROW_KIND_NONE)
    items = [
        pb.VerifyItem(session=1, committed_length=0, open=opened),
        pb.VerifyItem(
            session=1, committed_length=0, prefill=pb.PrefillChunk(token_ids=[1], final=True)
        ),
    ]
    with running([sys.executable, "-c", script]) as process, connected(address) as stub:
        handshake(stub)
        with pytest.raises(grpc.RpcError) as failed:
            list(stub.RunSteps(iter([pb.VerifierRunStepsRequest(step=1, items=items)]), timeout=20))
        assert failed.value.code() == grpc.StatusCode.INTERNAL
        assert process.wait(20) == 1
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
    assert lines[-1] == "error: RuntimeError: device lost"
    assert not any("Traceback" in line for line in lines)


def fails_with(arguments: Sequence[str]) -> str:
    """Return the one line that a user's mistake prints; the exit code is 2."""
    done = subprocess.run(
        arguments, cwd=ROOT, capture_output=True, text=True, timeout=START_LIMIT_SECONDS
    )
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in done.stderr
    return lines[0]


def test_a_port_in_use_is_one_clear_line(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert address in fails_with(serve(model, address))


def test_a_model_that_does_not_exist_is_one_clear_line(tmp_path: Path) -> None:
    line = fails_with(serve(tmp_path / "nowhere", f"unix:{tmp_path}/v.sock"))
    assert "nowhere" in line


def test_a_flag_out_of_range_is_one_clear_line(model: Path, tmp_path: Path) -> None:
    line = fails_with(serve(model, f"unix:{tmp_path}/v.sock", "--slot-count", "0"))
    assert "--slot-count" in line


def test_a_corrupt_checkpoint_is_one_clear_line_of_the_process_that_was_loading(
    model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"\x10" + bytes(40))
    assert "model.safetensors" in fails_with(serve(broken, f"unix:{tmp_path}/v.sock"))
