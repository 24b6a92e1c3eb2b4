"""Load a target that runs as an ExecuTorch program."""

from __future__ import annotations

import threading
from pathlib import Path

import executorch.extension.llm
import executorch.kernels.quantized
import torch

from graph_runtime.model_files import model_hash, tokenizer_hash
from graph_runtime.programs.executorch_runtime import Program, Runtime, start_threadpool
from graph_runtime.programs.export import check_digest
from graph_runtime.programs.metadata import ProgramMetadata, check_values, read_metadata
from graph_runtime.programs.program_target import ProgramTarget
from graph_runtime.programs.target_export import ensure_program
from graph_runtime.target import TargetInfo
from splitspec.errors import UserError


def load_program_target(
    *,
    folder: Path,
    model_id: str,
    precision: str,
    cache_dir: Path,
    tap_layers: tuple[int, ...] | None,
    max_context_length: int,
    slot_count: int,
    max_prefill_chunk: int,
    threads: int | None,
    stop: threading.Event | None = None,
) -> ProgramTarget:
    """Load the model in `folder` as a program, exporting it first where the cache lacks it.

    Arguments are those of `graph_runtime.load.load_target`.

    Raises:
        UserError: what is wrong with the model, an argument or the program, in one line.
    """
    path = ensure_program(
        folder=folder,
        precision=precision,
        cache_dir=cache_dir,
        tap_layers=tap_layers,
        max_context_length=max_context_length,
        max_prefill_chunk=max_prefill_chunk,
        stop=stop,
    )
    start_threadpool(threads)
    program = open_program(path)
    metadata = read_metadata(program, path)
    wanted = {"model_hash": model_hash(folder, cache_dir), "precision": precision}
    check_values(metadata, path, wanted)
    return ProgramTarget(
        program, metadata, _info(metadata, model_id, tokenizer_hash(folder), slot_count)
    )


def open_program(path: Path, *, cached: bool = True) -> Program:
    """Open the `.pte` at `path` once its digest is checked.

    Args:
        path: where it lies.
        cached: whether that is the cache, where every program has its digest beside it.

    Raises:
        UserError: it cannot be read, is corrupt, truncated, or not a program of this runtime.
    """
    if cached or path.with_suffix(".sha256").is_file():
        check_digest(path)
    elif not path.is_file():
        raise UserError(f"program {path} is not a file")
    _register_kernels()
    try:
        return Runtime.get().load_program(path)
    except RuntimeError as error:
        raise UserError(f"program {path} is not a program that this runtime can load") from error


def _register_kernels() -> None:
    """Register `llama.update_cache` with the runtime.

    NOTE: the package's own module would do, but it imports torch's compiler: 2 s and 100 MB.
    """
    (library,) = Path(executorch.extension.llm.__path__[0]).glob("custom_ops/*custom_ops_aot_lib.*")
    torch.ops.load_library(library)


def _info(
    metadata: ProgramMetadata, model_id: str, tokenizer_digest: str, slot_count: int
) -> TargetInfo:
    return TargetInfo(
        model_id=model_id,
        model_hash=metadata.model_hash,
        tokenizer_hash=tokenizer_digest,
        vocab_size=metadata.vocab_size,
        n_layers=metadata.n_layers,
        tap_layers=metadata.tap_layers,
        row_width=metadata.row_width,
        row_dtype=torch.float32,
        min_prefill_chunk=metadata.min_prefill_chunk,
        max_prefill_chunk=metadata.max_prefill_chunk,
        max_context_length=metadata.max_seq_len,
        slot_count=slot_count,
        precision=metadata.precision,
        runtime="executorch",
    )
