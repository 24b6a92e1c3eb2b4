"""Child processes: waited for until they serve, explained when they fail, never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordinator import launch
from coordinator.launch import Child, ServiceCommand, ServiceFailed, services
from splitspec.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _children_find_the_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def command(folder: Path, mode: str, *arguments: str, name: str = "drafter") -> ServiceCommand:
    address = f"unix:{folder}/{name}.sock"
    module = ("-m", "tests.coordinator.fake_service", mode, "--address", address)
    return ServiceCommand(name=name, address=address, arguments=(*module, *arguments))


def gone(pid: int, seconds: float = 5.0) -> bool:
    """Return whether the process ends in time; a zombie that waits for its parent has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_services_serve_inside_the_block_and_are_gone_after_it(tmp_path: Path) -> None:
    commands = [command(tmp_path, "serve", name=name) for name in ("drafter", "verifier")]
    with services(commands, log_dir=tmp_path / "logs", timeout_seconds=30) as children:
        assert [child.process.poll() for child in children] == [None, None]
        assert (tmp_path / "logs" / "drafter.log").read_text().startswith("arguments: serve")
    assert [child.process.returncode for child in children] == [-signal.SIGTERM] * 2


def test_a_child_gets_the_environment_without_the_services_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPLITSPEC_METRICS_ADDRESS", "127.0.0.1:9100")
    monkeypatch.setenv("SPLITSPEC_CACHE_DIR", "/cache")
    monkeypatch.setenv("PIP_INDEX_URL", "http://index")
    environment = launch.child_environment()
    assert [name for name in environment if name.startswith("SPLITSPEC_")] == [
        "SPLITSPEC_CACHE_DIR"
    ]
    assert environment["PIP_INDEX_URL"] == "http://index"


def test_a_child_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "STOP_SECONDS", 0.3)
    commands = [command(tmp_path, "stubborn")]
    with services(commands, log_dir=tmp_path, timeout_seconds=30) as children:
        pass
    assert children[0].process.returncode == -signal.SIGKILL


def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    commands = [command(tmp_path, "parent", "--pid-file", str(pid_file))]
    with services(commands, log_dir=tmp_path, timeout_seconds=30):
        pass
    assert gone(int(pid_file.read_text()))


def test_children_end_when_the_block_raises(tmp_path: Path) -> None:
    children: list[Child] = []
    with (
        contextlib.suppress(KeyboardInterrupt),
        services([command(tmp_path, "serve")], log_dir=tmp_path, timeout_seconds=30) as started,
    ):
        children += started
        raise KeyboardInterrupt
    assert [child.process.returncode for child in children] == [-signal.SIGTERM]


def test_a_refusal_is_a_users_mistake_in_the_childs_own_words(tmp_path: Path) -> None:
    commands = [command(tmp_path, "serve", name="drafter"), command(tmp_path, "refuse", name="v")]
    with (
        pytest.raises(UserError, match=r"^the v did not start: cannot listen there: in use$"),
        services(commands, log_dir=tmp_path, timeout_seconds=30),
    ):
        pass


def test_a_crash_is_one_line_with_the_last_words_and_the_log(tmp_path: Path) -> None:
    with (
        pytest.raises(ServiceFailed, match=r"exited with status 1: ValueError: a bug .*\.log\)$"),
        services([command(tmp_path, "crash")], log_dir=tmp_path, timeout_seconds=30),
    ):
        pass


def test_a_wait_has_a_limit_and_shows_the_newest_progress(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    with (
        pytest.raises(ServiceFailed, match="not ready after 3 s"),
        services(
            [command(tmp_path, "silent")],
            log_dir=tmp_path,
            timeout_seconds=3,
            on_wait=lambda name, line: seen.append((name, line)),
        ),
    ):
        pass
    assert seen[-1] == ("drafter", "exporting: 41%")


PARENT = """
import sys, time
from pathlib import Path
from coordinator.launch import services
from tests.coordinator.test_launch import command
folder = Path(sys.argv[1])
with services([command(folder, "serve")], log_dir=folder, timeout_seconds=30) as children:
    print(children[0].process.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent's life")
def test_children_end_when_their_parent_is_killed_with_sigkill(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    assert gone(child)


def test_old_runs_logs_are_cleared_away(tmp_path: Path) -> None:
    for second in range(15):
        (tmp_path / "logs" / f"run-20260101-0000{second:02}-1").mkdir(parents=True)
    folder = launch.new_log_dir(tmp_path)
    folder.mkdir()
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert len(names) == launch.KEPT_LOG_DIRS
    assert names[0] == "run-20260101-000006-1"
    assert names[-1] == folder.name
