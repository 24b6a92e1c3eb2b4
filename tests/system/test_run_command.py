"""`splitspec run` as a user types it: three services on a tiny model, and nothing left over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    write_tiny_model(tmp_path / "tiny")
    run = [sys.executable, "-m", "coordinator.cli", "run", "--model", str(tmp_path / "tiny")]
    return [*run, "--runtime", "torch", "--threads", "1", "--cache-dir", str(tmp_path / "cache")]


def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which the sockets lie under `tmp_path`, so they can be counted."""
    return {**os.environ, "TMPDIR": str(tmp_path)}


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


def test_run_answers_compares_traces_and_leaves_nothing(command: list[str], tmp_path: Path) -> None:
    trace_file = tmp_path / "spans.jsonl"
    flags = ["--max-tokens", "24", "--compare", "--seed", "3", "--temperature", "0.7"]
    done = subprocess.run(
        [*command, *flags, "--trace-file", str(trace_file), "one two three one two"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=environment(tmp_path),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "seed 3" in done.stderr
    assert "text identical" in done.stderr, "law L4"
    spans = [json.loads(line) for line in trace_file.read_text().splitlines()]
    assert len({span["trace_id"] for span in spans}) == 2, "one trace a request"
    assert processes_of(tmp_path) == []
    assert list(tmp_path.glob("splitspec-*")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_in_the_middle_of_an_answer_ends_everything(
    command: list[str], tmp_path: Path
) -> None:
    with subprocess.Popen(
        [*command, "--raw", "one two three one two"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment(tmp_path),
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.read(1)
        os.kill(running.pid, signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert b"Traceback" not in errors
    assert processes_of(tmp_path) == []
    assert list(tmp_path.glob("splitspec-*")) == []
