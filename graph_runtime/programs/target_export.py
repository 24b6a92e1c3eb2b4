"""Export a target's program."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from graph_runtime.architecture import DecoderConfig, read_config
from graph_runtime.checkpoint import load_weights
from graph_runtime.decoder import Decoder
from graph_runtime.limits import LEAST_STEP_ROWS, check_context_length, check_tap_layers
from graph_runtime.model_files import model_hash
from graph_runtime.programs.export import ProgramKey, Report, Source, ensure
from graph_runtime.programs.metadata import FORMAT_VERSION, ProgramMetadata
from graph_runtime.programs.slot_cache import MIN_ROWS, padded_capacity
from splitspec.errors import UserError

PRECISIONS = ("fp32", "8da8w", "8da4w", "q4_1")
HEAD_ROWS = 8
"""Most rows of one `head` call: a window of 7 drafts and the pending token."""


@dataclass(frozen=True, kw_only=True)
class TargetKey(ProgramKey):
    """What a target's program depends on."""

    kind: ClassVar[str] = "target"
    model_hash: str
    tap_layers: tuple[int, ...]
    max_context_length: int
    max_prefill_chunk: int
    format_version: int = FORMAT_VERSION


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
    key = TargetKey(
        model_hash=model_hash(folder, cache_dir),
        precision=precision,
        tap_layers=check_tap_layers(config, tap_layers),
        max_context_length=max_context_length,
        max_prefill_chunk=max_prefill_chunk,
    )
    return ensure(key, {"folder": str(folder)}, cache_dir=cache_dir, stop=stop)


def build(key: TargetKey, source: Source, report: Report) -> bytes:
    """Return the bytes of the program that `key` describes.

    Args:
        key: what to export.
        source: "folder" of the model, HF layout.
        report: is told of each phase.

    Raises:
        UserError: the weights cannot be read or do not fit the precision.
    """
    # Imported here: loading a program that exists needs none of the exporter.
    logging.getLogger("torchao").setLevel(logging.ERROR)  # kernels for GPUs that it cannot load
    from graph_runtime.programs.lowering import lower, trace
    from graph_runtime.programs.network import InPlaceAttention, distinct_windows, prepare

    folder = Path(source["folder"])
    config = read_config(folder)
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
    config: DecoderConfig, key: TargetKey, windows: tuple[int | None, ...]
) -> ProgramMetadata:
    rows = max(key.max_prefill_chunk, LEAST_STEP_ROWS)
    # NOTE: more than the rows of a step. With as many, the trace proves that a step can only start
    # at 0, and the program then writes every step's K/V there.
    capacity = padded_capacity(max(key.max_context_length + MIN_ROWS - 1, rows + 1))
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
        max_step_rows=rows,
        max_head_rows=HEAD_ROWS,
        tap_layers=key.tap_layers,
        row_width=len(key.tap_layers) * config.hidden_size,
        windows=tuple(window or 0 for window in windows),
    )
