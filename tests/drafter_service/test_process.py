"""The drafter as a process: start, stop, a user's mistakes, and what it does without."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitspec.rows import RowFormat, encode_rows
from splitspec.v1 import drafter_pb2 as pb
from splitspec.v1 import rows_pb2
from splitspec.v1.drafter_pb2_grpc import DrafterStub
from tests import dflash_layouts
from tests.drafter_service.served import draft, opened, released
from tests.eagle3_layouts import random_weights, write_draft
from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 30.0
SERVE = [sys.executable, "-m", "drafter_service", "serve"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def process(
    command: list[str], address: str
) -> Iterator[tuple[subprocess.Popen[str], DrafterStub]]:
    """Run `command`, wait for SERVING on `address`; end it by its id."""
    child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="splitspec.v1.Drafter")
            reply = health.Check(request, timeout=LIMIT_SECONDS, wait_for_ready=True)
            limit = time.monotonic() + LIMIT_SECONDS
            while reply.status != health_pb2.HealthCheckResponse.SERVING:
                assert time.monotonic() < limit
                time.sleep(0.02)
                reply = health.Check(request, timeout=LIMIT_SECONDS)
            yield child, DrafterStub(channel)
    finally:
        child.kill()
        child.communicate()


def failed(command: list[str], **environment: str) -> str:
    """Run a command that must fail by a user's mistake; return its one error line."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        env={**os.environ, **environment},
    )
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.stderr.splitlines()[-1:] == errors
    return errors[0]


def test_sigterm_drains_and_exits_with_0(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/d.sock"
    with process([*SERVE, "--address", address, "--slot-count", "2"], address) as (child, stub):
        assert stub.GetModel(pb.DrafterGetModelRequest()).slot_count == 2
        requests = (
            pb.DrafterRunStepsRequest(step=i + 1, items=items)
            for i, items in enumerate([[opened(1)], [draft(1, 0, [1])], [released(1)]])
        )
        assert len(list(stub.RunSteps(requests, timeout=LIMIT_SECONDS))) == 3
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=LIMIT_SECONDS)
        assert child.returncode == 0, errors
        assert "Traceback" not in errors


def test_sigterm_ends_a_stream_without_sessions_at_once(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/d.sock"
    with process([*SERVE, "--address", address], address) as (child, stub):
        replies = stub.RunSteps(_held_open(child), timeout=LIMIT_SECONDS)
        assert next(replies).step == 1
        child.send_signal(signal.SIGINT)
        started = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            next(replies)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        child.communicate(timeout=LIMIT_SECONDS)
        assert child.returncode == 0
        assert time.monotonic() - started < 9  # well before a drain's limit of ten seconds


def _held_open(child: subprocess.Popen[str]) -> Iterator[pb.DrafterRunStepsRequest]:
    yield pb.DrafterRunStepsRequest(step=1)
    while child.poll() is None:
        time.sleep(0.05)


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        assert failed([*SERVE, "--address", address]) == (
            f"error: cannot listen on {address}: Address already in use"
        )
        line = failed(
            [*SERVE, "--address", f"127.0.0.1:{free_port()}", "--metrics-address", address]
        )
        assert line == f"error: cannot serve metrics on {address}: Address already in use"


def test_a_socket_that_another_drafter_serves_on_is_not_taken_over(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/d.sock"
    with process([*SERVE, "--address", address], address) as (_, stub):
        line = failed([*SERVE, "--address", address])
        assert line == f"error: cannot listen on {address}: another process listens there"
        assert stub.GetModel(pb.DrafterGetModelRequest(), timeout=LIMIT_SECONDS).method == "ngram"


def test_the_socket_of_a_killed_drafter_is_taken_over(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/d.sock"
    with process([*SERVE, "--address", address], address) as (child, _):
        child.kill()
        child.wait()
    with process([*SERVE, "--address", address], address) as (_, stub):
        assert stub.GetModel(pb.DrafterGetModelRequest(), timeout=LIMIT_SECONDS).method == "ngram"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--draft", "/models/eagle3"], "--draft '/models/eagle3'"),
        (["--draft", "eagle3"], "--draft eagle3 needs --draft-model"),
        (["--draft", "dflash"], "--draft dflash needs --draft-model"),
        (["--block-length", "4"], "--block-length 4: --draft ngram has no blocks"),
        (["--tap-layers", "1-3"], "--tap-layers '1-3'"),
        (
            ["--draft", "eagle3", "--draft-model", "/nonexistent/d", "--runtime", "torch"],
            "/nonexistent/d",
        ),
        (["--ngram-min", "9"], "--ngram-min 9"),
        (["--address", "nonsense"], "nonsense"),
        (["--address", "127.0.0.1:99999"], "127.0.0.1:99999"),
        (["--address", "unix:/nonexistent/d.sock"], "/nonexistent/d.sock"),
        (["--trace-file", "/proc/nothing/t.jsonl"], "/proc/nothing/t.jsonl"),
    ],
)
def test_a_wrong_flag_is_one_clear_line(flags: list[str], named: str) -> None:
    assert named in failed([*SERVE, *flags])


def test_flags_are_read_from_the_environment() -> None:
    assert "--slot-count 0" in failed(SERVE, SPLITSPEC_SLOT_COUNT="0")


def test_the_metrics_endpoint_reports_steps_and_slots(tmp_path: Path) -> None:
    address, metrics = f"unix:{tmp_path}/d.sock", f"127.0.0.1:{free_port()}"
    command = [*SERVE, "--address", address, "--metrics-address", metrics]
    with process(command, address) as (_, stub):
        read = threading.Event()

        def requests() -> Iterator[pb.DrafterRunStepsRequest]:
            yield pb.DrafterRunStepsRequest(step=1, items=[opened(1), opened(2)])
            read.wait(LIMIT_SECONDS)
            yield pb.DrafterRunStepsRequest(step=2, items=[draft(7, 0, [1])])

        replies = stub.RunSteps(requests(), timeout=LIMIT_SECONDS)
        next(replies)
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=5) as page:
            assert "slots_in_use 2.0" in page.read().decode()
        read.set()
        assert len(list(replies)) == 1
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=5) as page:
            text = page.read().decode()
    assert "steps_total 2.0" in text
    assert "draft_passes_total 0.0" in text
    assert 'step_items_total{action="open"} 2.0' in text
    assert 'item_errors_total{reason="SESSION_NOT_FOUND"} 1.0' in text
    assert 'step_seconds_count{phase="device"} 2.0' in text
    assert "process_resident_memory_bytes" in text


@pytest.mark.parametrize("rows_kind", ["raw", "fused"])
def test_e14_an_eagle3_process_answers_its_handshake_and_a_round_in_k_passes(
    tmp_path: Path, rows_kind: str
) -> None:
    draft_model = write_draft(
        tmp_path / "tiny-draft",
        layout="safeailab",
        weights=random_weights(2),
        tensors={"embed_tokens.weight": None},
    )
    target = write_tiny_model(tmp_path / "target", n_layers=8)
    address, metrics = f"unix:{tmp_path}/d.sock", f"127.0.0.1:{free_port()}"
    command = [*SERVE, "--draft", "eagle3", "--draft-model", str(draft_model), "--runtime", "torch"]
    command += ["--target", str(target), "--rows", rows_kind, "--threads", "1"]
    command += ["--address", address, "--cache-dir", str(tmp_path / "cache")]
    with process([*command, "--metrics-address", metrics], address) as (child, stub):
        info = stub.GetModel(pb.DrafterGetModelRequest(), timeout=LIMIT_SECONDS)
        assert (info.method, info.model_id, info.vocab_size) == ("eagle3", "tiny-draft", 300)
        assert (list(info.tap_layers), info.row_width) == (
            [1, 3, 4],
            64 if rows_kind == "fused" else 192,
        )
        assert (info.slot_count, info.max_context_length, info.max_draft_count) == (8, 1024, 7)
        row_format = RowFormat(kind=info.row_kind, dtype=info.row_dtype, width=info.row_width)
        rows = partial(rows_of, row_format)
        steps = [
            [opened(1), opened(2)],
            [draft(1, 0, [5, 6, 7], rows=rows(0, 3)), draft(2, 0, [9], rows=rows(0, 1))],
            [draft(1, 3, pending=8, count=4), draft(2, 1, pending=4, count=2)],
            [draft(1, 3, [8], pending=11, count=6, rows=rows(3, 1)), released(2)],
        ]
        requests = (
            pb.DrafterRunStepsRequest(step=i + 1, items=items) for i, items in enumerate(steps)
        )
        replies = list(stub.RunSteps(requests, timeout=LIMIT_SECONDS))
        assert not any(result.HasField("error") for r in replies for result in r.results)
        drafts = [[list(x.draft.draft_token_ids) for x in r.results] for r in replies]
        assert [[len(ids) for ids in step] for step in drafts] == [[0, 0], [0, 0], [4, 2], [6, 0]]
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=5) as page:
            assert f"draft_passes_total {4 + 6}.0" in page.read().decode()
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=LIMIT_SECONDS)
        assert child.returncode == 0, errors
        assert "Traceback" not in errors


@pytest.mark.parametrize("rows_kind", ["raw", "fused"])
def test_d2_a_dflash_process_answers_its_handshake_and_a_round_in_one_pass(
    tmp_path: Path, rows_kind: str
) -> None:
    draft_model = dflash_layouts.write_draft(
        tmp_path / "tiny-draft", dflash_layouts.random_weights(2)
    )
    target = write_tiny_model(tmp_path / "target")
    address, metrics = f"unix:{tmp_path}/d.sock", f"127.0.0.1:{free_port()}"
    command = [*SERVE, "--draft", "dflash", "--draft-model", str(draft_model), "--runtime", "torch"]
    command += ["--target", str(target), "--rows", rows_kind, "--threads", "1"]
    command += ["--block-length", "6", "--address", address, "--cache-dir", str(tmp_path / "cache")]
    with process([*command, "--metrics-address", metrics], address) as (child, stub):
        info = stub.GetModel(pb.DrafterGetModelRequest(), timeout=LIMIT_SECONDS)
        assert (info.method, info.model_id, info.vocab_size) == ("dflash", "tiny-draft", 300)
        assert (list(info.tap_layers), info.row_width) == (
            [0, 1, 2],
            64 if rows_kind == "fused" else 192,
        )
        assert (info.slot_count, info.max_context_length, info.max_draft_count) == (8, 1024, 5)
        row_format = RowFormat(kind=info.row_kind, dtype=info.row_dtype, width=info.row_width)
        rows = partial(rows_of, row_format)
        steps = [
            [opened(1), opened(2)],
            [draft(1, 0, [5, 6, 7], rows=rows(0, 3)), draft(2, 0, [9], rows=rows(0, 1))],
            [draft(1, 3, pending=8, count=4), draft(2, 1, pending=4, count=2)],
            [draft(1, 3, [8], pending=11, count=6, rows=rows(3, 1)), released(2)],
            [draft(1, 3, [8], pending=11, count=5, rows=rows(3, 1))],
        ]
        requests = (
            pb.DrafterRunStepsRequest(step=i + 1, items=items) for i, items in enumerate(steps)
        )
        replies = list(stub.RunSteps(requests, timeout=LIMIT_SECONDS))
        (refused,) = (r for reply in replies for r in reply.results if r.HasField("error"))
        assert (refused.error.reason, refused.context_length) == ("INVALID_ARGUMENT", 3)
        assert "draft.draft_count is 6" in refused.error.message  # d19
        assert "0..5" in refused.error.message
        drafts = [[list(x.draft.draft_token_ids) for x in r.results] for r in replies]
        counts = [[len(ids) for ids in step] for step in drafts]
        assert counts == [[0, 0], [0, 0], [4, 2], [0, 0], [5]]
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=5) as page:
            assert "draft_passes_total 2.0" in page.read().decode()
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=LIMIT_SECONDS)
        assert child.returncode == 0, errors
        assert "Traceback" not in errors


def rows_of(row_format: RowFormat, start: int, count: int) -> rows_pb2.Rows:
    """Return float32 rows that count up."""
    values = [0.01 * (start + i) for i in range(count) for _ in range(row_format.width)]
    return encode_rows(row_format, start, struct.pack(f"<{len(values)}f", *values))


def test_sigterm_ends_a_load_that_takes_long(tmp_path: Path) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    script = f"""
import sys
from pathlib import Path
import drafter_service.__main__ as drafter
from drafter_service import ngram
from splitspec.errors import UserError

def load(config, stop):
    Path({str(started)!r}).touch()
    assert stop.wait(60)
    Path({str(ended)!r}).touch()
    raise UserError("the export was stopped")

ngram.load = load
sys.argv[1:] = ["serve", "--address", "unix:{tmp_path}/d.sock"]
drafter.main()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        limit = time.monotonic() + LIMIT_SECONDS
        while not started.exists():
            assert time.monotonic() < limit
            time.sleep(0.02)
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=LIMIT_SECONDS)
        assert child.returncode == 0, errors
        assert ended.exists()
        assert "Traceback" not in errors
    finally:
        child.kill()
        child.communicate()


def test_ngram_is_served_without_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; import drafter_service.__main__, "
    script += "drafter_service.ngram as n; from drafter_service.config import DrafterConfig; "
    script += "assert n.load(DrafterConfig()).info.method == 'ngram'"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=LIMIT_SECONDS)
