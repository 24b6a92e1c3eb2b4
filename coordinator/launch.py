"""Run services as child processes that never outlive the command that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitspec.errors import UserError

POLL_SECONDS = 0.05
STOP_SECONDS = 5.0
"""How long a child may take over a polite end before it is killed."""
KEPT_LOG_DIRS = 10


class ServiceFailed(Exception):
    """A child ended or did not get ready; one line for a person."""


@dataclass(frozen=True, kw_only=True)
class ServiceCommand:
    """One service to start."""

    name: str
    """"verifier", "drafter" or "coordinator": names its log file."""
    arguments: tuple[str, ...]
    """What follows the interpreter: ("-m", "drafter_service", "serve", ...)."""
    address: str
    """Where it will answer."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """A started service."""

    command: ServiceCommand
    process: subprocess.Popen[bytes]
    log: Path

    def last_line(self) -> str:
        """Return the newest line it logged; a progress bar's carriage returns count as lines."""
        lines = self.log_lines()
        return lines[-1] if lines else ""

    def log_lines(self) -> list[str]:
        """Return the last lines of its log, blank ones left out."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 8192))
            text = file.read().decode("utf-8", "replace")
        return [line.strip() for line in text.replace("\r", "\n").split("\n") if line.strip()]


@contextlib.contextmanager
def services(
    commands: Sequence[ServiceCommand],
    *,
    log_dir: Path,
    timeout_seconds: float,
    on_wait: Callable[[str, str], None] = lambda _name, _line: None,
) -> Iterator[list[Child]]:
    """Start `commands` in order, wait until all serve, and end them all on the way out.

    `on_wait` gets the name and the newest log line of a service that is not ready, again and again.

    Raises:
        UserError: a child refused to start because of a user's mistake; carries its line.
        ServiceFailed: a child ended, or was not ready in time.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    children: list[Child] = []
    try:
        for command in commands:
            children.append(_start(command, log_dir / f"{command.name}.log"))
        _wait_until_serving(children, timeout_seconds, on_wait)
        yield children
    finally:
        end(children)


def new_log_dir(cache_dir: Path) -> Path:
    """Return a fresh folder for one run's logs; of older runs' folders a few are kept."""
    logs = cache_dir.expanduser() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for old in sorted(logs.glob("run-*"))[: -KEPT_LOG_DIRS + 1 or None]:
        shutil.rmtree(old, ignore_errors=True)
    return logs / f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def child_environment() -> dict[str, str]:
    """Return our environment without the variables that stand for a service's flags.

    All services read the same names, so that one SPLITSPEC_METRICS_ADDRESS would make three of
    them listen on one port. What a child is to know is in its arguments; the cache's place is the
    one thing that is the same for all.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SPLITSPEC_") or name == "SPLITSPEC_CACHE_DIR"
    }


def _start(command: ServiceCommand, log: Path) -> Child:
    # -P: a folder of the same name where the user happens to stand must not be run instead.
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", *command.arguments],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C reaches this process alone
            preexec_fn=_die_with_parent(),
        )
    return Child(command=command, process=process, log=log)


def _die_with_parent() -> Callable[[], None] | None:
    """Return what ties a child's life to ours, so that even our SIGKILL leaves nothing behind.

    Linux only. Elsewhere the children of a killed command have to be ended by hand.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()
    set_parent_death_signal = 1

    def tie() -> None:
        prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the tie held
            os.kill(os.getpid(), signal.SIGKILL)

    return tie


def _wait_until_serving(
    children: Sequence[Child], timeout_seconds: float, on_wait: Callable[[str, str], None]
) -> None:
    deadline = time.monotonic() + timeout_seconds
    waiting = list(children)
    with contextlib.ExitStack() as channels:
        probes = {
            child.command.name: health_pb2_grpc.HealthStub(
                channels.enter_context(
                    grpc.insecure_channel(
                        child.command.address, [("grpc.max_reconnect_backoff_ms", 100)]
                    )
                )
            )
            for child in children
        }
        while waiting:
            for child in children:
                _check_alive(child)
            waiting = [child for child in waiting if not _serves(probes[child.command.name])]
            if not waiting:
                return
            first = waiting[0]
            if time.monotonic() > deadline:
                raise ServiceFailed(
                    f"the {first.command.name} was not ready after {timeout_seconds:.0f} s"
                    f" (last line: {first.last_line()!r}, log: {first.log})"
                )
            on_wait(first.command.name, first.last_line())
            time.sleep(POLL_SECONDS)


def _serves(probe: health_pb2_grpc.HealthStub) -> bool:
    try:
        status = probe.Check(health_pb2.HealthCheckRequest(), timeout=1.0).status
    except grpc.RpcError:
        return False
    return bool(status == health_pb2.HealthCheckResponse.SERVING)


def _check_alive(child: Child) -> None:
    code = child.process.poll()
    if code is None:
        return
    said = [line for line in child.log_lines() if line.startswith("error: ")]
    if said:
        raise UserError(f"the {child.command.name} did not start: {said[-1][len('error: ') :]}")
    how = f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"
    raise ServiceFailed(
        f"the {child.command.name} {how}: {child.last_line() or 'it said nothing'}"
        f" (log: {child.log})"
    )


def end(children: Sequence[Child]) -> None:
    """End children and whatever they started, by their own process groups, last started first."""
    for child in reversed(children):
        _signal(child, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    for child in reversed(children):
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
    for child in children:
        _signal(child, signal.SIGKILL)
        child.process.wait()


def _signal(child: Child, number: signal.Signals) -> None:
    # NOTE: a group outlives its leader while a grandchild runs, so a dead leader is no reason to
    # stop; and its id is not given to another group as long as that grandchild is there.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)
