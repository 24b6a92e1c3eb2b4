"""Export a speculator: a target and its EAGLE-3 draft as one program of one session."""

from __future__ import annotations

import logging
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from graph_runtime.architecture import DecoderConfig, read_config
from graph_runtime.checkpoint import load_weights
from graph_runtime.decoder import Decoder
from graph_runtime.eagle3.checkpoint import Eagle3Checkpoint, Eagle3Source, load_checkpoint
from graph_runtime.eagle3.network import Eagle3Network
from graph_runtime.limits import check_context_length, check_tap_layers
from graph_runtime.model_files import model_hash, tokenizer_hash
from graph_runtime.programs.export import ProgramKey, Report, Source, ensure
from graph_runtime.programs.metadata import DRAFT_PRECISIONS
from graph_runtime.programs.slot_cache import MIN_ROWS, padded_capacity
from graph_runtime.programs.speculator_metadata import (
    MAX_CHAIN,
    SPECULATOR_FORMAT_VERSION,
    SpeculatorMetadata,
)
from graph_runtime.programs.target_export import PRECISIONS
from splitspec.errors import UserError

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@dataclass(frozen=True, kw_only=True)
class SpeculatorKey(ProgramKey):
    """What a speculator's program depends on."""

    kind: ClassVar[str] = "speculator"
    model_hash: str
    draft_model_hash: str
    tokenizer_hash: str
    draft_precision: str
    tap_layers: tuple[int, ...] | None
    embeddings: str
    feedback: str
    chain_len: int
    max_context_length: int
    max_prefill_chunk: int
    format_version: int = SPECULATOR_FORMAT_VERSION


def ensure_speculator(
    source: Eagle3Source,
    *,
    precision: str,
    draft_precision: str,
    chain: int,
    cache_dir: Path,
    max_context_length: int,
    max_prefill_chunk: int,
    stop: threading.Event | None = None,
) -> Path:
    """Return the path of the speculator, exporting it first where the cache lacks it.

    Args:
        source: the draft's folder, the target's, and what to make of the draft.
        precision: of the target, one of PRECISIONS.
        draft_precision: one of DRAFT_PRECISIONS.
        chain: draft tokens of a round, 1 to MAX_CHAIN.
        cache_dir: see `splitspec.folders`.
        max_context_length: positions of the session.
        max_prefill_chunk: longest prompt; cut to what the context leaves.
        stop: once it is set, an export and a wait for another process's end.

    Raises:
        UserError: what is wrong with a model, an argument or the disk, in one line.
    """
    assert source.target is not None, "the target is a half of the program"
    config = read_config(source.target)
    for name, value, known in (
        ("precision", precision, PRECISIONS),
        ("draft precision", draft_precision, DRAFT_PRECISIONS),
    ):
        if value not in known:
            raise UserError(f"{name} is {value!r}; expected one of {', '.join(known)}")
    check_context_length(config, max_context_length)
    key = SpeculatorKey(
        model_hash=model_hash(source.target, cache_dir),
        draft_model_hash=model_hash(source.folder, cache_dir),
        tokenizer_hash=tokenizer_hash(source.target),
        precision=precision,
        draft_precision=draft_precision,
        tap_layers=source.tap_layers,
        embeddings=source.embeddings,
        feedback=source.feedback,
        chain_len=_checked_chain(chain, max_context_length),
        max_context_length=max_context_length,
        max_prefill_chunk=_prefill_chunk(max_prefill_chunk, max_context_length),
    )
    places = {
        "folder": str(source.folder),
        "target": str(source.target),
        "cache_dir": str(cache_dir),
    }
    return ensure(key, places, cache_dir=cache_dir, stop=stop)


def build(key: SpeculatorKey, source: Source, report: Report) -> bytes:
    """Return the bytes of the program that `key` describes.

    Args:
        key: what to export.
        source: "folder" of the draft, "target" and "cache_dir".
        report: is told of each phase.

    Raises:
        UserError: weights cannot be read, do not fit the precision, or the two models not each
            other.
    """
    # Imported here: loading a program that exists needs none of the exporter.
    logging.getLogger("torchao").setLevel(logging.ERROR)  # kernels for GPUs that it cannot load
    from graph_runtime.programs.eagle3_network import prepare_draft
    from graph_runtime.programs.lowering import lower
    from graph_runtime.programs.network import InPlaceAttention, prepare
    from graph_runtime.programs.speculator_network import prepare_fusion

    folder = Path(source["target"])
    config = read_config(folder)
    report("read weights")
    checkpoint = load_checkpoint(
        Eagle3Source(
            folder=Path(source["folder"]),
            target=folder,
            tap_layers=key.tap_layers,
            embeddings=key.embeddings,
            feedback=key.feedback,
        ),
        Path(source["cache_dir"]),
    )
    check_pair(config, checkpoint)
    capacity = padded_capacity(key.max_context_length)
    decoder = Decoder(
        config,
        attentions=[InPlaceAttention(config) for _ in range(config.n_layers)],
        tap_layers=check_tap_layers(config, checkpoint.config.tap_layers),
        max_context_length=capacity,
    ).eval()
    decoder.requires_grad_(False)
    load_weights(decoder, folder, tied=config.tied)
    network = Eagle3Network(
        checkpoint.config,
        attention=InPlaceAttention(checkpoint.config),
        max_context_length=capacity,
    ).eval()
    network.requires_grad_(False)
    network.load_state_dict(checkpoint.tensors)
    report("quantise")
    prepare(decoder, config, key.precision)
    prepare_draft(network, key.draft_precision)
    prepare_fusion(network.fusion)
    report("trace")
    metadata = _metadata(config, checkpoint, key)
    programs = _trace(decoder, config, network, checkpoint, metadata, capacity)
    return lower(programs, metadata.constant_methods(), report)


def check_pair(config: DecoderConfig, checkpoint: Eagle3Checkpoint) -> None:
    """Refuse a draft that was not made for a target of this shape.

    Raises:
        UserError: names the field and both values.
    """
    draft = checkpoint.config
    for name, found, wanted in (
        ("target_hidden_size", draft.target_hidden_size, config.hidden_size),
        ("vocab_size", draft.vocab_size, config.vocab_size),
    ):
        if found != wanted:
            raise UserError(f"the draft's {name} is {found}; the target's is {wanted}")
    ids = checkpoint.target_ids
    if ids is not None and not bool(((ids >= 0) & (ids < config.vocab_size)).all()):
        outside = ids[(ids < 0) | (ids >= config.vocab_size)]
        raise UserError(
            f"draft id maps to {int(outside[0])}; the target's ids are 0..{config.vocab_size - 1}"
        )


def _checked_chain(chain: int, max_context_length: int) -> int:
    most = min(MAX_CHAIN, max_context_length - 2)
    if not 1 <= chain <= most:
        reason = "" if most == MAX_CHAIN else f" in a context of {max_context_length}"
        raise UserError(
            f"chain is {chain}; expected 1 to {most}{reason}: a verify takes chain + 1 tokens"
        )
    return chain


def _prefill_chunk(wanted: int, max_context_length: int) -> int:
    """Return the longest prompt: of a context one position at least is the answer's."""
    chunk = min(wanted, max_context_length - 1)
    if chunk < MIN_ROWS:
        raise UserError(
            f"max prefill chunk is {wanted} in a context of {max_context_length}; "
            f"expected at least {MIN_ROWS}"
        )
    return chunk


def _metadata(
    config: DecoderConfig, checkpoint: Eagle3Checkpoint, key: SpeculatorKey
) -> SpeculatorMetadata:
    return SpeculatorMetadata(
        format_version=key.format_version,
        model_hash=key.model_hash,
        draft_model_hash=key.draft_model_hash,
        tokenizer_hash=key.tokenizer_hash,
        precision=key.precision,
        draft_precision=key.draft_precision,
        max_seq_len=key.max_context_length,
        vocab_size=config.vocab_size,
        draft_vocab_size=checkpoint.config.draft_vocab_size,
        n_layers=config.n_layers,
        hidden_size=checkpoint.config.hidden_size,
        chain_len=key.chain_len,
        min_prefill_chunk=MIN_ROWS,
        max_prefill_chunk=key.max_prefill_chunk,
    )


def _trace(
    decoder: Decoder,
    config: DecoderConfig,
    network: Eagle3Network,
    checkpoint: Eagle3Checkpoint,
    metadata: SpeculatorMetadata,
    capacity: int,
) -> dict[str, ExportedProgram]:
    """Return the three methods, traced at their largest."""
    from graph_runtime.programs.speculator_network import (
        Caches,
        DraftDecode,
        Prefill,
        TargetVerify,
        attentions_of,
    )

    target_caches = Caches(attentions_of(decoder), config.sliding_windows, capacity)
    draft_caches = Caches(attentions_of(network), [network.config.sliding_window], capacity)
    fusion = network.fusion
    del network.fusion  # a method stores what its modules hold, and the draft's needs none
    longest, window = metadata.max_prefill_chunk, metadata.chain_len + 1
    draft = DraftDecode(network, draft_caches, checkpoint.target_ids)
    slots = max(longest, window)
    features = torch.zeros(1, slots, metadata.hidden_size)
    methods: dict[str, tuple[torch.nn.Module, tuple[Any, ...]]] = {
        "prefill": (Prefill(decoder, target_caches, fusion, draft_caches), _rows(longest)),
        "target_verify": (TargetVerify(decoder, target_caches, fusion), _rows(window)),
        "draft_decode": (draft, (_rows(slots)[0], features, _rows(slots)[1])),
    }
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        return {
            name: torch.export.export(module, inputs) for name, (module, inputs) in methods.items()
        }


def _rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, count, dtype=torch.int64), torch.arange(count)
