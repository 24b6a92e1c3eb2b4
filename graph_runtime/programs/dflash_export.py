"""Export a DFlash draft's program."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from graph_runtime.dflash.checkpoint import load_checkpoint, load_config
from graph_runtime.dflash.config import DFlashConfig
from graph_runtime.dflash.draft import checked_block_length
from graph_runtime.dflash.network import DFlashNetwork
from graph_runtime.drafts.source import DraftSource
from graph_runtime.model_files import model_hash
from graph_runtime.programs.draft_export import check_arguments, places_of, read_places
from graph_runtime.programs.export import ProgramKey, Report, Source, ensure
from graph_runtime.programs.metadata import DFLASH_FORMAT_VERSION, DFlashMetadata
from graph_runtime.programs.slot_cache import padded_capacity

CONTEXT_ROWS = 128
"""Most rows of one `context` call; longer packs take several."""
HEAD_ROWS = 16
"""Most rows of one `head` call: the largest block that drafts were published with."""


@dataclass(frozen=True, kw_only=True)
class DFlashKey(ProgramKey):
    """What a draft's program depends on."""

    kind: ClassVar[str] = "dflash"
    draft_hash: str
    target_hash: str | None
    """Of the target that fills what the checkpoint lacks, where one was given."""
    embeddings: str
    tap_layers: tuple[int, ...]
    block_length: int
    max_context_length: int
    max_context_rows: int = CONTEXT_ROWS
    max_head_rows: int = HEAD_ROWS
    format_version: int = DFLASH_FORMAT_VERSION


def dflash_key(
    source: DraftSource,
    config: DFlashConfig,
    *,
    block_length: int | None,
    precision: str,
    cache_dir: Path,
    max_context_length: int,
) -> DFlashKey:
    """Return the key of a draft's program.

    Args:
        source: the draft's folder, the target's, and what to make of them.
        config: the draft's shape.
        block_length: slots of a block, None: as trained.
        precision: one of DRAFT_PRECISIONS.
        cache_dir: where hashes are kept.
        max_context_length: context positions of one session.

    Raises:
        UserError: the precision is unknown, a length is no such length, or a folder holds no model.
    """
    check_arguments(precision, max_context_length)
    return DFlashKey(
        draft_hash=model_hash(source.folder, cache_dir),
        target_hash=None if source.target is None else model_hash(source.target, cache_dir),
        embeddings=source.embeddings,
        tap_layers=config.tap_layers,
        block_length=checked_block_length(config, block_length),
        precision=precision,
        max_context_length=max_context_length,
    )


def ensure_dflash_program(
    source: DraftSource,
    *,
    block_length: int | None,
    precision: str,
    cache_dir: Path,
    max_context_length: int,
    stop: threading.Event | None = None,
) -> Path:
    """Return the path of the draft's program, exporting it first where the cache lacks it.

    Args:
        source: the draft's folder, the target's, and what to make of them.
        block_length: slots of a block, 2 .. the trained block_size; None: as trained.
        precision: one of DRAFT_PRECISIONS.
        cache_dir: see `splitspec.folders`.
        max_context_length: context positions of one session.
        stop: once it is set, an export and a wait for another process's end.

    Raises:
        UserError: what is wrong with the checkpoint, an argument or the disk, in one line; or that
            `stop` was set.
    """
    key = dflash_key(
        source,
        load_config(source),
        block_length=block_length,
        precision=precision,
        cache_dir=cache_dir,
        max_context_length=max_context_length,
    )
    return ensure(key, places_of(source, cache_dir), cache_dir=cache_dir, stop=stop)


def build(key: DFlashKey, source: Source, report: Report) -> bytes:
    """Return the bytes of the program that `key` describes.

    Args:
        key: what to export.
        source: see `places_of`.
        report: is told of each phase.

    Raises:
        UserError: the weights cannot be read or do not fit the precision.
    """
    # Imported here: loading a program that exists needs none of the exporter.
    logging.getLogger("torchao").setLevel(logging.ERROR)  # kernels for GPUs that it cannot load
    from graph_runtime.programs.dflash_network import distinct_masks, prepare_draft, trace_draft
    from graph_runtime.programs.lowering import lower
    from graph_runtime.programs.network import InPlaceAttention

    report("read weights")
    fields, cache_dir = read_places(source)
    checkpoint = load_checkpoint(DraftSource(**fields, embeddings=key.embeddings), cache_dir)
    config = checkpoint.config
    metadata = _metadata(config, key, distinct_masks(config))
    network = DFlashNetwork(
        config,
        attentions=[InPlaceAttention(config) for _ in range(config.n_layers)],
        max_position=metadata.max_capacity,
    ).eval()
    network.requires_grad_(False)
    network.load_state_dict(checkpoint.tensors)
    report("quantise")
    prepare_draft(network, key.precision)
    report("trace")
    programs = trace_draft(network, metadata)
    return lower(programs, metadata.constant_methods(), report)


def _metadata(
    config: DFlashConfig, key: DFlashKey, masks: tuple[tuple[int | None, bool], ...]
) -> DFlashMetadata:
    return DFlashMetadata(
        format_version=key.format_version,
        draft_hash=key.draft_hash,
        target_hash=key.target_hash or "",
        precision=key.precision,
        max_seq_len=key.max_context_length,
        max_capacity=padded_capacity(key.max_context_length + key.block_length),
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        n_draft_layers=config.n_layers,
        hidden_size=config.hidden_size,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        tap_layers=config.tap_layers,
        mask_token_id=config.mask_token_id,
        block_size=config.block_size,
        block_length=key.block_length,
        first_draft_slot=config.first_draft_slot,
        draft_sliding_window=config.sliding_window or 0,
        mask_windows=tuple(window or 0 for window, _ in masks),
        mask_causal=tuple(int(causal) for _, causal in masks),
        final_softcap=config.final_softcap or 0.0,
        max_context_rows=key.max_context_rows,
        max_head_rows=key.max_head_rows,
    )
