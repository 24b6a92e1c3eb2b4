"""Export a model's program into the cache: once, whoever asks, whatever fails on the way."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO

from graph_runtime.architecture import DecoderConfig, read_config
from graph_runtime.checkpoint import load_weights
from graph_runtime.decoder import Decoder
from graph_runtime.limits import LEAST_STEP_ROWS, check_context_length, check_tap_layers
from graph_runtime.model_files import model_hash
from graph_runtime.programs.exporter import run_exporter
from graph_runtime.programs.metadata import FORMAT_VERSION, ProgramMetadata
from graph_runtime.programs.program_target import MIN_ROWS, padded_capacity
from splitspec.errors import UserError
from splitspec.folders import programs_dir

PRECISIONS = ("fp32", "8da8w", "8da4w", "q4_1")
HEAD_ROWS = 8
"""Most rows of one `head` call: a window of 7 drafts and the pending token."""
_LOCK_LIMIT_SECONDS = 1800.0
_LOCK_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class ProgramKey:
    """Everything that a program's bytes depend on; its hash names the file."""

    model_hash: str
    precision: str
    tap_layers: tuple[int, ...]
    max_context_length: int
    max_prefill_chunk: int
    format_version: int = FORMAT_VERSION
    executorch: str = version("executorch")
    torch: str = version("torch")

    def path(self, cache_dir: Path) -> Path:
        """Return where the program lies in the cache."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return programs_dir(cache_dir) / f"{digest[:32]}.pte"


def ensure_program(
    *,
    folder: Path,
    precision: str,
    cache_dir: Path,
    tap_layers: tuple[int, ...] | None,
    max_context_length: int,
    max_prefill_chunk: int,
    stop: threading.Event | None = None,
) -> Path:
    """Return the path of the model's program, exporting it first where the cache lacks it.

    Args:
        folder: HF layout.
        precision: one of PRECISIONS.
        cache_dir: see `splitspec.folders`.
        tap_layers: 0-based layer outputs of a raw row; None: the default ones.
        max_context_length: KV positions of one session.
        max_prefill_chunk: most tokens of one step.
        stop: once it is set, an export and a wait for another process's end.

    Raises:
        UserError: what is wrong with the model, an argument or the disk, in one line; or that
            `stop` was set.
    """
    if precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}")
    if max_prefill_chunk < 1:
        raise UserError(f"max prefill chunk is {max_prefill_chunk}; expected at least 1")
    config = read_config(folder)
    check_context_length(config, max_context_length)
    key = ProgramKey(
        model_hash=model_hash(folder, cache_dir),
        precision=precision,
        tap_layers=check_tap_layers(config, tap_layers),
        max_context_length=max_context_length,
        max_prefill_chunk=max_prefill_chunk,
    )
    path = key.path(cache_dir)
    if path.is_file():
        return path
    stop = stop or threading.Event()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock"), stop) as lock:
            if not path.is_file():  # another process may have made it meanwhile
                _export(folder, path, key, lock, stop)
    except OSError as error:
        raise _cannot_write(path, error) from error
    return path


def check_digest(path: Path) -> None:
    """Compare a program with the digest that was written with it.

    Raises:
        UserError: it cannot be read, is truncated, or has changed since it was written.
    """
    try:
        digest = path.with_suffix(".sha256").read_text(encoding="ascii").strip()
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read program {error.filename}: {error.strerror}") from error
    if found != digest:
        raise UserError(f"program {path} is corrupt or truncated: delete it to export it again")


def _export(
    folder: Path, path: Path, key: ProgramKey, lock: IO[str], stop: threading.Event
) -> None:
    """Export in a process of its own, which holds the lock too and ends when `stop` is set.

    Raises:
        UserError: what the process reports, that it crashed, or that `stop` was set.
    """
    for partial in path.parent.glob(f"{path.stem}.*.partial"):
        partial.unlink(missing_ok=True)  # what a killed export left: the lock says that none runs
    run_exporter(
        [str(folder), str(path), json.dumps(asdict(key))],
        title=f"export {key.precision}",
        lock=lock,
        stop=stop,
    )


def export_here(folder: Path, path: Path, key: ProgramKey, report: Callable[[str], None]) -> None:
    """Export in this process and write the program to `path`.

    Args:
        folder: HF layout.
        path: where the program goes.
        key: what to export.
        report: called with each of `exporter.PHASES` as it starts.

    Raises:
        UserError: the weights cannot be read, do not fit the precision, or the disk is full.
    """
    data = build(folder, read_config(folder), key, report)
    try:
        write_program(path, data)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot write program {path}: {error.strerror or error}")


def build(
    folder: Path, config: DecoderConfig, key: ProgramKey, report: Callable[[str], None]
) -> bytes:
    """Return the bytes of the program that `key` describes.

    Raises:
        UserError: the weights cannot be read or do not fit the precision.
    """
    # Imported here: loading a program that exists needs none of the exporter.
    logging.getLogger("torchao").setLevel(logging.ERROR)  # kernels for GPUs that it cannot load
    from graph_runtime.programs.lowering import lower, trace
    from graph_runtime.programs.network import InPlaceAttention, distinct_windows, prepare

    metadata = _metadata(config, key, distinct_windows(config))
    report("read weights")
    decoder = Decoder(
        config,
        attentions=[InPlaceAttention(config) for _ in range(config.n_layers)],
        tap_layers=key.tap_layers,
        max_context_length=metadata.max_capacity,
    ).eval()
    decoder.requires_grad_(False)
    load_weights(decoder, folder, tied=config.tied)
    report("quantise")
    prepare(decoder, config, key.precision)
    report("trace")
    programs = trace(decoder, config, metadata)
    return lower(programs, metadata.constant_methods(), report)


def _metadata(
    config: DecoderConfig, key: ProgramKey, windows: tuple[int | None, ...]
) -> ProgramMetadata:
    capacity = padded_capacity(key.max_context_length + MIN_ROWS - 1)
    return ProgramMetadata(
        format_version=FORMAT_VERSION,
        model_hash=key.model_hash,
        precision=key.precision,
        max_seq_len=key.max_context_length,
        max_capacity=capacity,
        vocab_size=config.vocab_size,
        n_layers=config.n_layers,
        hidden_size=config.hidden_size,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        min_prefill_chunk=1,
        max_prefill_chunk=key.max_prefill_chunk,
        max_step_rows=min(max(key.max_prefill_chunk, LEAST_STEP_ROWS), capacity),
        max_head_rows=HEAD_ROWS,
        tap_layers=key.tap_layers,
        row_width=len(key.tap_layers) * config.hidden_size,
        windows=tuple(window or 0 for window in windows),
    )


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
