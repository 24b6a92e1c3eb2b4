"""Load a speculator program from wherever it lies."""

from __future__ import annotations

from pathlib import Path

from graph_runtime.programs.executorch_runtime import start_threadpool
from graph_runtime.programs.load import open_program
from graph_runtime.programs.speculator_metadata import read_speculator_metadata
from graph_runtime.programs.speculator_runner import Speculator
from splitspec.errors import UserError


def load_speculator(path: Path, threads: int | None = None) -> Speculator:
    """Load the program at `path`; two of them have two sessions.

    Raises:
        UserError: it cannot be read, is no speculator, lacks a key of its metadata, or a method
            does not load.
    """
    start_threadpool(threads)
    program = open_program(path, cached=False)
    try:
        return Speculator(program, read_speculator_metadata(program, path), path)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"program {path} is corrupt or of another runtime: {reason}") from error
