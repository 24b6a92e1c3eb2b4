"""Export a program into the cache: once, whoever asks, whatever fails on the way.

Programs are of several kinds: see `kinds`. Here is what is the same for all of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, ClassVar

from graph_runtime.programs.exporter import run_exporter
from splitspec.errors import UserError
from splitspec.folders import programs_dir

Report = Callable[[str], None]
"""Is called with each of `exporter.PHASES` as it starts."""
Source = Mapping[str, Any]
"""Where a kind's `build` reads from, as JSON: paths, and what the key has only the hash of."""
_LOCK_LIMIT_SECONDS = 1800.0
_LOCK_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class ProgramKey:
    """Everything that a program's bytes depend on; its hash names the file.

    A kind adds its fields, as JSON has them but with tuples for lists.
    """

    kind: ClassVar[str]
    """Not hashed: kinds differ in their fields, and a target's files keep their names."""
    precision: str
    executorch: str = version("executorch")
    torch: str = version("torch")

    def path(self, cache_dir: Path) -> Path:
        """Return where the program lies in the cache."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return programs_dir(cache_dir) / f"{digest[:32]}.pte"


def ensure(
    key: ProgramKey, source: Source, *, cache_dir: Path, stop: threading.Event | None = None
) -> Path:
    """Return the path of the program that `key` describes, exporting it where the cache lacks it.

    Args:
        key: what to export.
        source: what its kind's `build` needs besides.
        cache_dir: see `splitspec.folders`.
        stop: once it is set, an export and a wait for another process's end.

    Raises:
        UserError: what `build` reports, what is wrong with the disk, or that `stop` was set.
    """
    path = key.path(cache_dir)
    if path.is_file():
        return path
    stop = stop or threading.Event()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock"), stop) as lock:
            if not path.is_file():  # another process may have made it meanwhile
                _export(source, path, key, lock, stop)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def check_digest(path: Path) -> None:
    """Compare a program with the digest that was written with it.

    Raises:
        UserError: it cannot be read, is truncated, or has changed since it was written; or its
            digest is gone.
    """
    beside = path.with_suffix(".sha256")
    if path.is_file() and not beside.is_file():
        raise UserError(f"program {path} has no digest beside it: delete it to export it again")
    try:
        digest = beside.read_text(encoding="ascii", errors="replace").strip()
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read program {error.filename}: {error.strerror}") from error
    if found != digest:
        raise UserError(f"program {path} is corrupt or truncated: delete it to export it again")


def _export(
    source: Source, path: Path, key: ProgramKey, lock: IO[str], stop: threading.Event
) -> None:
    """Export in a process of its own, which holds the lock too and ends when `stop` is set.

    Raises:
        UserError: what the process reports, that it crashed, or that `stop` was set.
    """
    for partial in path.parent.glob(f"{path.stem}.*.partial"):
        partial.unlink(missing_ok=True)  # what a killed export left: the lock says that none runs
    run_exporter(
        [key.kind, str(path), json.dumps(source), json.dumps(asdict(key))],
        title=f"export {key.kind} {key.precision}",
        lock=lock,
        stop=stop,
    )


def cannot_write(path: Path, error: OSError) -> UserError:
    """Return the one line for a program that the disk does not take."""
    return UserError(f"cannot write program {path}: {error.strerror or error}")


def write_program(path: Path, data: bytes) -> None:
    """Write `path` and its digest, so that no reader ever sees half a file."""
    digest = hashlib.sha256(data).hexdigest()
    for target, content in ((path.with_suffix(".sha256"), digest.encode()), (path, data)):
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path, stop: threading.Event) -> Iterator[IO[str]]:
    """Hold the lock file `path`: two processes that need one program export it once.

    The lock is the open file's, and is held until every process that has it open is done with it.

    Raises:
        UserError: another process has held it for too long, or `stop` was set.
    """
    with path.open("w") as file:
        give_up = time.monotonic() + _LOCK_LIMIT_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise UserError(f"another export has held {path} for too long") from None
            if stop.wait(_LOCK_POLL_SECONDS):
                raise UserError("the wait for another export was stopped")
        yield file
