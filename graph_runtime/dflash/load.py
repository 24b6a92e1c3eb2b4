"""Load a DFlash draft: one door, whichever runtime runs it; and the verifier's part of it."""

from __future__ import annotations

import threading
from pathlib import Path

from graph_runtime.dflash.checkpoint import DFlashCheckpoint
from graph_runtime.dflash.config import DFlashConfig
from graph_runtime.dflash.draft import BlockDraft
from graph_runtime.dflash.network import ContextFusion
from graph_runtime.drafts.source import DraftSource


def load_draft(
    source: DraftSource,
    *,
    block_length: int | None,
    runtime: str,
    precision: str,
    cache_dir: Path,
    max_context_length: int,
    slot_count: int,
    threads: int | None,
    device: str = "cpu",
    stop: threading.Event | None = None,
) -> tuple[BlockDraft, DFlashCheckpoint]:
    """Load the draft of `source` with empty caches.

    Args:
        source: the checkpoint, and what the user says about it.
        block_length: slots of a block, 2 .. the trained block_size; None: as trained.
        runtime: "executorch" (exports the program first when the cache has none) or "torch".
        precision: torch: "fp32" or "bf16"; executorch: see graph_runtime.programs.
        cache_dir: where hashes and exported programs are kept.
        max_context_length: context positions of one session: positions that the target serves.
        slot_count: sessions at once.
        threads: compute threads; None: the runtime's own choice.
        device: torch: "cpu" or "cuda".
        stop: once it is set, an export ends and the load fails.

    Raises:
        UserError: what is wrong with the checkpoint or an argument, in one line.
    """
    raise NotImplementedError


def load_fusion_module(
    source: DraftSource, cache_dir: Path, device: str = "cpu"
) -> tuple[DFlashConfig, str, ContextFusion]:
    """Load what a verifier needs to send fused rows of a draft.

    Args:
        source: the draft's checkpoint, with the verifier's own model as its target.
        cache_dir: where hashes are kept.
        device: where the rows are: "cpu" or "cuda".

    Returns:
        The draft's shape, the SHA-256 of its files, and the float32 fusion on `device`.

    Raises:
        UserError: what is wrong with the checkpoint or the device, in one line.
    """
    raise NotImplementedError
