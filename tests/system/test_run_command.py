"""`splitspec run` as a user types it: three services on a tiny model, and nothing left over."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dflash_layouts import random_weights, write_draft
from tests.graph_runtime.tiny_gguf import write_tiny_gguf
from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    write_tiny_model(tmp_path / "tiny")
    run = [sys.executable, "-m", "coordinator.cli", "run", "--model", str(tmp_path / "tiny")]
    return [*run, "--runtime", "torch", "--threads", "1", "--cache-dir", str(tmp_path / "cache")]


@pytest.fixture
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a temporary folder for the sockets, so that they can be counted; its path is short."""
    return tmp_path_factory.mktemp("s")


def environment(sockets: Path) -> dict[str, str]:
    """Return an environment in which temporary files lie under `sockets`."""
    return {**os.environ, "TMPDIR": str(sockets)}


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of running processes that name `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


def test_run_of_a_dflash_draft_says_so_and_its_text_is_the_targets(
    command: list[str], tmp_path: Path, sockets: Path
) -> None:
    folder = write_draft(tmp_path / "draft", random_weights(3), block_size=8)
    draft = ["--draft", "dflash", "--draft-model", str(folder), "--block-length", "5"]
    done = subprocess.run(
        [*command, *draft, "--max-tokens", "12", "--compare", "one two three one two"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=environment(sockets),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "draft dflash" in done.stderr
    assert "text identical" in done.stderr, "law L4"
    assert processes_of(tmp_path) == []


def test_run_answers_compares_traces_and_leaves_nothing(
    command: list[str], tmp_path: Path, sockets: Path
) -> None:
    trace_file = tmp_path / "spans.jsonl"
    flags = ["--max-tokens", "24", "--compare", "--seed", "3", "--temperature", "0.7"]
    done = subprocess.run(
        [*command, *flags, "--trace-file", str(trace_file), "one two three one two"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=environment(sockets),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "seed 3" in done.stderr
    assert "text identical" in done.stderr, "law L4"
    spans = [json.loads(line) for line in trace_file.read_text().splitlines()]
    assert len({span["trace_id"] for span in spans}) == 2, "one trace a request"
    assert processes_of(tmp_path) == []
    assert list(sockets.glob("splitspec-*")) == []


def test_run_converts_a_gguf_file_shows_the_progress_and_answers(
    tmp_path: Path, sockets: Path
) -> None:
    """Guards: the puller's progress bar was taken for the name of the model."""
    write_tiny_gguf(tmp_path / "t.gguf", write_tiny_model(tmp_path / "tiny"))
    run = [sys.executable, "-m", "coordinator.cli", "run", "--model", str(tmp_path / "t.gguf")]
    flags = ["--runtime", "torch", "--threads", "1", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [*run, *flags, "--max-tokens", "8", "--raw", "one two three"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=environment(sockets),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "convert t.gguf" in done.stderr
    assert "convert" not in done.stdout
    assert "tokens 8" in done.stderr


def test_variables_of_services_reach_none_of_runs_children(
    command: list[str], sockets: Path
) -> None:
    """Guards: all three services took the one SPLITSPEC_METRICS_ADDRESS, "in use" for two."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        in_use = f"127.0.0.1:{taken.getsockname()[1]}"
        services = {"METRICS_ADDRESS": in_use, "ADDRESS": in_use, "SLOT_COUNT": "0", "MODEL": "no"}
        variables = {f"SPLITSPEC_{name}": value for name, value in services.items()}
        done = subprocess.run(
            [*command, "--max-tokens", "4", "--raw", "one two three"],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=ROOT,
            env={**environment(sockets), **variables},
            check=False,
        )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("model", ["nothing", "gone.gguf"])
def test_a_model_that_cannot_be_had_is_one_line(model: str, tmp_path: Path) -> None:
    run = [sys.executable, "-m", "coordinator.cli", "run", "--model", model]
    done = subprocess.run(
        [*run, "--cache-dir", str(tmp_path), "hello"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert model in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_in_the_middle_of_an_answer_ends_everything(
    command: list[str], tmp_path: Path, sockets: Path
) -> None:
    with subprocess.Popen(
        [*command, "--raw", "one two three one two"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment(sockets),
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.read(1)
        os.kill(running.pid, signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert b"Traceback" not in errors
    assert processes_of(tmp_path) == []
    assert list(sockets.glob("splitspec-*")) == []
