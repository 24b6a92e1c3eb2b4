"""The exporter's process as its parent sees it: one that ends with it and shows only progress.

The process says one line at a time: `phase NAME` as a phase starts, `error TEXT` for a user's
mistake. Everything else that it or a library prints is kept for the one case of a crash.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tqdm import tqdm

from splitspec.errors import UserError

PHASES = ("read weights", "quantise", "trace", "partition and lower", "plan memory and write")
STOP_POLL_SECONDS = 0.1
_MAIN = Path(__file__).with_name("__main__.py")


class Progress:
    """Shows phases on stderr: a bar on a terminal, elsewhere one plain line a phase."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._bar: tqdm[None] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=len(PHASES), desc=title, unit="phase")

    def start(self, phase: str) -> None:
        """Show that `phase` starts, and that those before it are done."""
        done = PHASES.index(phase)
        if self._bar is None:
            line = f"{self._title}: {phase} ({done + 1} of {len(PHASES)})"
            print(line, file=sys.stderr, flush=True)
            return
        self._bar.set_postfix_str(phase)
        self._bar.update(done - self._bar.n)

    def close(self, *, complete: bool) -> None:
        """Show the end, of all phases or of what was done until a failure."""
        if self._bar is None:
            return
        if complete:
            self._bar.update(len(PHASES) - self._bar.n)
        self._bar.close()


def run_exporter(
    arguments: Sequence[str], *, title: str, lock: IO[str], stop: threading.Event
) -> None:
    """Run the exporter with `arguments` and show its progress; it has ended when this returns.

    Args:
        arguments: KIND PATH SOURCE KEY of `__main__`.
        title: what the progress is shown under.
        lock: the locked file, which the process holds too: the lock lives as long as either.
        stop: once it is set, the process is killed.

    Raises:
        UserError: what the process reports, that it crashed, or that `stop` was set.
    """
    progress = Progress(title)
    complete = False
    errors: list[str] = []
    try:
        with tempfile.TemporaryFile() as noise, _exporter(arguments, lock, noise) as process:
            for line in _lines(process, stop):
                kind, _, text = line.partition(" ")
                if kind == "phase":
                    progress.start(text)
                else:
                    errors.append(text)
            code = process.wait()
            if code:
                raise UserError(errors[-1] if code == 2 and errors else _crash(code, noise))
            complete = True
    finally:
        progress.close(complete=complete)


@contextmanager
def _exporter(
    arguments: Sequence[str], lock: IO[str], noise: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process, and kill and reap it on every way out.

    NOTE: the process asks to be killed when the thread that started it ends, which on Linux is
    what "when the parent dies" means. That thread is in here for as long as the process lives.
    """
    process = subprocess.Popen(
        # By its path: `-m` would import the package, for seconds, before the process can tie its
        # life to ours. -P: nothing in the folder where the user happens to stand is imported.
        [sys.executable, "-P", str(_MAIN), str(os.getpid()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=noise,
        bufsize=0,  # a line that waits in a buffer is one that a selector does not see
        pass_fds=(lock.fileno(),),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _lines(process: subprocess.Popen[bytes], stop: threading.Event) -> Iterator[str]:
    """Yield what the process says, to its end.

    Raises:
        UserError: `stop` was set.
    """
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not stop.is_set():
            if not selector.select(STOP_POLL_SECONDS):
                continue
            line = process.stdout.readline()
            if not line:
                return
            yield line.decode().rstrip("\n")
    raise UserError("the export was stopped")


def _crash(code: int, noise: IO[bytes]) -> str:
    noise.seek(0)
    lines = noise.read().decode("utf-8", "replace").strip().splitlines()
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"the export {how}" + (f": {lines[-1].strip()}" if lines and code > 0 else "")
