"""Load a DFlash draft: one door, whichever runtime runs it; and the verifier's part of it."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from graph_runtime.dflash.checkpoint import DFlashCheckpoint, load_checkpoint, load_fusion
from graph_runtime.dflash.config import DFlashConfig
from graph_runtime.dflash.draft import BlockDraft, ContextLengths, checked_block_length
from graph_runtime.dflash.network import ContextFusion, build_fusion
from graph_runtime.dflash.torch_draft import TorchBlockDraft, build_network
from graph_runtime.drafts.source import DraftSource
from graph_runtime.load import TORCH_DTYPES, needing_executorch, torch_device
from splitspec.errors import UserError


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
    if runtime == "executorch":
        if device != "cpu":
            raise UserError(f"device is {device!r}; --runtime executorch runs on cpu only")
        with needing_executorch():
            from graph_runtime.programs import load_dflash_program
        return load_dflash_program(
            source,
            block_length=block_length,
            precision=precision,
            cache_dir=cache_dir,
            max_context_length=max_context_length,
            slot_count=slot_count,
            threads=threads,
            stop=stop,
        )
    if runtime != "torch":
        raise UserError(f"runtime is {runtime!r}; expected executorch or torch")
    return load_torch_draft(
        source,
        block_length=block_length,
        precision=precision,
        cache_dir=cache_dir,
        max_context_length=max_context_length,
        slot_count=slot_count,
        threads=threads,
        device=device,
    )


def load_torch_draft(
    source: DraftSource,
    *,
    block_length: int | None,
    precision: str,
    cache_dir: Path,
    max_context_length: int,
    slot_count: int,
    threads: int | None,
    device: str = "cpu",
) -> tuple[TorchBlockDraft, DFlashCheckpoint]:
    """Load the draft of `source` in plain torch; arguments and errors as in `load_draft`."""
    if precision not in TORCH_DTYPES:
        raise UserError(f"precision is {precision!r}; --runtime torch has {list(TORCH_DTYPES)}")
    place = torch_device(device)
    checkpoint = load_checkpoint(source, cache_dir)
    config = checkpoint.config
    slots = checked_block_length(config, block_length)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        network = build_network(
            config,
            block_length=slots,
            max_context_length=max_context_length,
            slot_count=slot_count,
            dtype=TORCH_DTYPES[precision],
            device=place,
        )
    except (RuntimeError, MemoryError) as error:  # torch has no class of its own for it on a CPU
        raise UserError(
            f"a draft of the shape in {source.folder} and the K/V of {slot_count} slots do not fit "
            f"in the memory of {device}"
        ) from error
    network.load_state_dict(checkpoint.tensors)
    draft = TorchBlockDraft(
        network,
        block_length=slots,
        lengths=ContextLengths(slot_count, max_context_length, config.max_draft_count(slots)),
        model_hash=checkpoint.model_hash,
        target_ids=checkpoint.target_ids,
    )
    return draft, checkpoint


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
    place = torch_device(device)
    config, digest, tensors = load_fusion(source, cache_dir)
    return config, digest, build_fusion(config, tensors).to(place)
