"""Export an EAGLE-3 draft's program."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from graph_runtime.eagle3.checkpoint import Eagle3Source, load_checkpoint
from graph_runtime.eagle3.config import Eagle3Config
from graph_runtime.eagle3.network import Eagle3Network
from graph_runtime.model_files import model_hash
from graph_runtime.programs.draft_export import check_arguments, places_of, read_places
from graph_runtime.programs.export import ProgramKey, Report, Source, ensure
from graph_runtime.programs.metadata import EAGLE3_FORMAT_VERSION, Eagle3Metadata
from graph_runtime.programs.slot_cache import padded_capacity

ENTER_ROWS = 128
"""Most rows of one `enter` call; longer packs take several."""
LEAVE_ROWS = 8
"""Most rows of one `leave` or `head` call: one a session of a packed step."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Key(ProgramKey):
    """What a draft's program depends on."""

    kind: ClassVar[str] = "eagle3"
    draft_hash: str
    target_hash: str | None
    """Of the target that fills what the checkpoint lacks, where one was given."""
    embeddings: str
    feedback: str
    max_context_length: int
    max_enter_rows: int = ENTER_ROWS
    max_leave_rows: int = LEAVE_ROWS
    format_version: int = EAGLE3_FORMAT_VERSION


def eagle3_key(
    source: Eagle3Source, *, precision: str, cache_dir: Path, max_context_length: int
) -> Eagle3Key:
    """Return the key of a draft's program.

    Raises:
        UserError: the precision is unknown, the length is no length, or a folder holds no model.
    """
    check_arguments(precision, max_context_length)
    target_hash = None if source.target is None else model_hash(source.target, cache_dir)
    return Eagle3Key(
        draft_hash=model_hash(source.folder, cache_dir),
        target_hash=target_hash,
        embeddings=source.embeddings,
        feedback=source.feedback,
        precision=precision,
        max_context_length=max_context_length,
    )


def ensure_eagle3_program(
    source: Eagle3Source,
    *,
    precision: str,
    cache_dir: Path,
    max_context_length: int,
    stop: threading.Event | None = None,
) -> Path:
    """Return the path of the draft's program, exporting it first where the cache lacks it.

    Args:
        source: the draft's folder, the target's, and what to make of them.
        precision: one of DRAFT_PRECISIONS.
        cache_dir: see `splitspec.folders`.
        max_context_length: KV positions of one session.
        stop: once it is set, an export and a wait for another process's end.

    Raises:
        UserError: what is wrong with the checkpoint, an argument or the disk, in one line; or that
            `stop` was set.
    """
    key = eagle3_key(
        source,
        precision=precision,
        cache_dir=cache_dir,
        max_context_length=max_context_length,
    )
    return ensure(key, places_of(source, cache_dir), cache_dir=cache_dir, stop=stop)


def build(key: Eagle3Key, source: Source, report: Report) -> bytes:
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
    from graph_runtime.programs.eagle3_network import prepare_draft, trace_draft
    from graph_runtime.programs.lowering import lower
    from graph_runtime.programs.network import InPlaceAttention

    report("read weights")
    fields, cache_dir = read_places(source)
    checkpoint = load_checkpoint(
        Eagle3Source(**fields, embeddings=key.embeddings, feedback=key.feedback), cache_dir
    )
    config = checkpoint.config
    metadata = _metadata(config, key)
    network = Eagle3Network(
        config, attention=InPlaceAttention(config), max_context_length=metadata.max_capacity
    ).eval()
    network.requires_grad_(False)
    network.load_state_dict(checkpoint.tensors)
    report("quantise")
    prepare_draft(network, key.precision)
    report("trace")
    programs = trace_draft(network, metadata)
    return lower(programs, metadata.constant_methods(), report)


def _metadata(config: Eagle3Config, key: Eagle3Key) -> Eagle3Metadata:
    # NOTE: more than the rows of a step. With as many, the trace proves that a step can only start
    # at 0, and the program then writes every step's K/V there.
    capacity = padded_capacity(max(key.max_context_length, key.max_enter_rows + 1))
    return Eagle3Metadata(
        format_version=key.format_version,
        draft_hash=key.draft_hash,
        target_hash=key.target_hash or "",
        precision=key.precision,
        max_seq_len=key.max_context_length,
        max_capacity=capacity,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        n_layers=1,
        hidden_size=config.hidden_size,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        max_enter_rows=min(key.max_enter_rows, capacity),
        max_leave_rows=key.max_leave_rows,
        sliding_window=config.sliding_window or 0,
    )
