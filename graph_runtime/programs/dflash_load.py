"""Load a DFlash draft that runs as an ExecuTorch program."""

from __future__ import annotations

import threading
from pathlib import Path

from graph_runtime.dflash.checkpoint import DFlashCheckpoint, load_checkpoint
from graph_runtime.drafts.source import DraftSource
from graph_runtime.programs.dflash_export import dflash_key
from graph_runtime.programs.dflash_program import ProgramBlockDraft
from graph_runtime.programs.draft_export import places_of
from graph_runtime.programs.executorch_runtime import start_threadpool
from graph_runtime.programs.export import ensure
from graph_runtime.programs.load import open_program
from graph_runtime.programs.metadata import DFlashMetadata, check_values, read_keys


def load_dflash_program(
    source: DraftSource,
    *,
    block_length: int | None,
    precision: str,
    cache_dir: Path,
    max_context_length: int,
    slot_count: int,
    threads: int | None,
    stop: threading.Event | None = None,
) -> tuple[ProgramBlockDraft, DFlashCheckpoint]:
    """Load the draft of `source` as a program, exporting it first where the cache lacks it.

    Arguments are those of `graph_runtime.dflash.load.load_draft`. Of the checkpoint's tensors only
    the fusion's are read: the program has the others.

    Raises:
        UserError: what is wrong with the checkpoint, an argument or the program, in one line.
    """
    checkpoint = load_checkpoint(source, cache_dir, fusion_only=True)
    key = dflash_key(
        source,
        checkpoint.config,
        block_length=block_length,
        precision=precision,
        cache_dir=cache_dir,
        max_context_length=max_context_length,
    )
    path = ensure(key, places_of(source, cache_dir), cache_dir=cache_dir, stop=stop)
    start_threadpool(threads)
    program = open_program(path)
    metadata = read_keys(DFlashMetadata, program, path)
    wanted = {
        "draft_hash": key.draft_hash,
        "target_hash": key.target_hash or "",
        "precision": precision,
        "block_length": key.block_length,
    }
    check_values(metadata, path, wanted)
    return ProgramBlockDraft(program, metadata, checkpoint, slot_count), checkpoint
