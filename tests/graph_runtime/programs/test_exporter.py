"""The exporter's process: what it shows, and that nothing and nobody leaves it behind."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

pytest.importorskip("executorch")

from graph_runtime.programs import exporter
from graph_runtime.programs.exporter import PHASES, run_exporter
from graph_runtime.programs.target_export import ensure_program
from splitspec.errors import UserError
from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[3]
START_LIMIT_SECONDS = 120.0
GONE_LIMIT_SECONDS = 4.0
"""Less than the 5 s for which a verifier waits for an engine's thread that does not end."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; the tie is Linux's")

RunScript = Callable[..., None]


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[IO[str]]:
    with (tmp_path / "x.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


@pytest.fixture
def run_script(lock: IO[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunScript:
    """Return a function that runs a script in the exporter's place; it gets the arguments."""

    def run(script: str, *arguments: str, stop: threading.Event | None = None) -> None:
        main = tmp_path / "main.py"
        main.write_text(f"import os, sys, time\n{script}\n")
        monkeypatch.setattr(exporter, "_MAIN", main)
        run_exporter(arguments, title="export x", lock=lock, stop=stop or threading.Event())

    return run


def is_free(path: Path) -> bool:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def eventually(is_so: Callable[[], bool], limit_seconds: float = GONE_LIMIT_SECONDS) -> bool:
    deadline = time.monotonic() + limit_seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_without_a_terminal_each_phase_is_one_plain_line_and_noise_is_not_shown(
    run_script: RunScript, capfd: pytest.CaptureFixture[str]
) -> None:
    run_script(
        "print('phase trace', flush=True)\n"
        "print('Failed to load a library', file=sys.stderr, flush=True)\n"
        "print('phase partition and lower')"
    )
    shown = capfd.readouterr()
    assert shown.err.splitlines() == [
        "export x: trace (3 of 5)",
        "export x: partition and lower (4 of 5)",
    ]
    assert shown.out == ""


def test_on_a_terminal_the_phases_are_a_bar(
    run_script: RunScript, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run_script(f"for name in {PHASES!r}: print('phase', name)")
    shown = capsys.readouterr().err
    assert "export x: 100%" in shown
    assert "5/5" in shown


def test_a_mistake_is_the_line_that_the_exporter_reports(run_script: RunScript) -> None:
    with pytest.raises(UserError, match=r"^the disk is full$"):
        run_script("print('error the disk is full'); sys.exit(2)")


def test_a_crash_is_one_line_with_the_last_thing_that_was_said(run_script: RunScript) -> None:
    with pytest.raises(UserError, match=r"^the export ended with code 1: ValueError: odd$"):
        run_script("raise ValueError('odd')")
    with pytest.raises(UserError, match=r"^the export was ended by signal 9$"):
        run_script("os.kill(os.getpid(), 9)")


def test_the_lock_lives_as_long_as_the_exporter(
    run_script: RunScript, lock: IO[str], tmp_path: Path
) -> None:
    started, stop = tmp_path / "started", threading.Event()

    def run() -> None:
        with pytest.raises(UserError, match="the export was stopped"):
            run_script("open(sys.argv[2], 'w').close(); time.sleep(60)", str(started), stop=stop)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert eventually(started.exists, START_LIMIT_SECONDS)
        lock.close()  # as when the parent dies
        assert not is_free(Path(lock.name))
    finally:
        stop.set()
        thread.join()
    assert is_free(Path(lock.name))


def test_a_stop_kills_and_reaps_the_exporter(run_script: RunScript, tmp_path: Path) -> None:
    stop, pid = threading.Event(), tmp_path / "pid"
    timer = threading.Timer(1.0, stop.set)
    timer.start()
    with pytest.raises(UserError, match="the export was stopped"):
        run_script(
            "open(sys.argv[2], 'w').write(str(os.getpid())); time.sleep(60)", str(pid), stop=stop
        )
    timer.join()
    assert not pid.exists() or not Path(f"/proc/{pid.read_text()}").exists()


def test_a_stop_ends_the_wait_for_another_export(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", n_layers=1)
    stop = threading.Event()
    stop.set()
    (tmp_path / "programs").mkdir()

    def ensure() -> Path:
        return ensure_program(
            folder=folder,
            precision="fp32",
            cache_dir=tmp_path,
            tap_layers=(0,),
            max_context_length=64,
            max_prefill_chunk=8,
            stop=stop,
        )

    with pytest.raises(UserError, match="the export was stopped"):
        ensure()
    (path,) = (tmp_path / "programs").glob("*.lock")
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="the wait for another export was stopped"):
            ensure()


@pytest.mark.parametrize("threads", [None, 1])
def test_the_start_of_the_threads_says_nothing_and_leaves_stderr_as_it_was(
    threads: int | None,
) -> None:
    script = (
        "import sys; from graph_runtime.programs.executorch_runtime import start_threadpool\n"
        f"start_threadpool({threads})\nprint('heard', file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=True)
    assert done.stderr == b"heard\n"


@contextmanager
def exporting(tmp_path: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a verifier's command in a session of its own until it exports; yields the exporter."""
    folder = write_tiny_model(tmp_path / "model", n_layers=32)
    flags = ("--model", str(folder), "--cache-dir", str(tmp_path), "--max-context-length", "128")
    process = subprocess.Popen(
        [sys.executable, "-m", "verifier_service", *arguments, *flags],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    )
    assert process.stderr is not None
    try:
        line = b""
        while b"quantise (2 of 5)" not in line:
            assert select.select([process.stderr], [], [], START_LIMIT_SECONDS)[0], line
            line = process.stderr.readline()
            assert line, "it ended before it exported"
        yield process, exporter_of(process.pid)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def exporter_of(parent: int) -> int:
    """Return the id of the one process that `parent` started, on whichever thread."""
    children = [
        path.read_text().split() for path in Path(f"/proc/{parent}/task").glob("*/children")
    ]
    (pid,) = [int(pid) for pids in children for pid in pids]
    return pid


def is_unlocked(tmp_path: Path) -> bool:
    (path,) = (tmp_path / "programs").glob("*.lock")
    return is_free(path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_export_leaves_no_process_and_no_lock(
    number: signal.Signals, tmp_path: Path
) -> None:
    with exporting(tmp_path, "export", "target") as (process, pid):
        process.send_signal(number)
        assert process.wait(GONE_LIMIT_SECONDS) == -number
        assert eventually(lambda: not runs(pid))
        assert eventually(lambda: is_unlocked(tmp_path))


def test_ctrl_c_ends_an_export_without_a_traceback(tmp_path: Path) -> None:
    with exporting(tmp_path, "export", "target") as (process, pid):
        os.killpg(process.pid, signal.SIGINT)  # a terminal's: both processes get it
        assert process.wait(GONE_LIMIT_SECONDS) > 0
        assert not runs(pid)
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


def test_a_verifier_that_is_stopped_while_it_exports_ends_at_once(tmp_path: Path) -> None:
    address = ("--address", f"unix:{tmp_path}/s")
    with exporting(tmp_path, "serve", *address) as (process, pid):
        os.killpg(process.pid, signal.SIGTERM)  # as `splitspec run` does
        assert process.wait(GONE_LIMIT_SECONDS) == 0
        assert not runs(pid)
        assert is_unlocked(tmp_path)
        assert process.stderr is not None
        said = process.stderr.read().decode().splitlines()
    assert all(line.startswith("export target 8da8w: ") for line in said), said
