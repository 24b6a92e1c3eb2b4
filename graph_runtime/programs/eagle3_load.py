"""Load an EAGLE-3 draft that runs as an ExecuTorch program."""

from __future__ import annotations

import threading
from pathlib import Path

from graph_runtime.eagle3.checkpoint import Eagle3Checkpoint, Eagle3Source, load_checkpoint
from graph_runtime.programs.eagle3_export import eagle3_key, ensure_eagle3_program
from graph_runtime.programs.eagle3_program import ProgramDraft
from graph_runtime.programs.executorch_runtime import start_threadpool
from graph_runtime.programs.load import open_program
from graph_runtime.programs.metadata import Eagle3Metadata, check_values, read_keys


def load_eagle3_program(
    source: Eagle3Source,
    *,
    precision: str,
    cache_dir: Path,
    max_context_length: int,
    slot_count: int,
    threads: int | None,
    stop: threading.Event | None = None,
) -> tuple[ProgramDraft, Eagle3Checkpoint]:
    """Load the draft of `source` as a program, exporting it first where the cache lacks it.

    Arguments are those of `graph_runtime.eagle3.load.load_draft`. Of the checkpoint's tensors only
    the fusion's are read: the program has the others.

    Raises:
        UserError: what is wrong with the checkpoint, an argument or the program, in one line.
    """
    key = eagle3_key(
        source, precision=precision, cache_dir=cache_dir, max_context_length=max_context_length
    )
    path = ensure_eagle3_program(
        source,
        precision=precision,
        cache_dir=cache_dir,
        max_context_length=max_context_length,
        stop=stop,
    )
    checkpoint = load_checkpoint(source, cache_dir, fusion_only=True)
    start_threadpool(threads)
    program = open_program(path)
    metadata = read_keys(Eagle3Metadata, program, path)
    wanted = {
        "draft_hash": key.draft_hash,
        "target_hash": key.target_hash or "",
        "precision": precision,
    }
    check_values(metadata, path, wanted)
    return ProgramDraft(program, metadata, checkpoint, slot_count), checkpoint
