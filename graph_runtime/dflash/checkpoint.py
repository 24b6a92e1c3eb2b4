"""Load DFlash draft checkpoints as users have them: safetensors, every tensor accounted for."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from graph_runtime.checkpoint import StoredTensor, stored_tensors
from graph_runtime.config_values import boolean, read_config_object
from graph_runtime.dflash.config import DFlashConfig
from graph_runtime.dflash.config_reader import read_dflash_config
from graph_runtime.dflash.keys import read_keys
from graph_runtime.dflash.layouts import (
    expected_shapes,
    find_layout,
    ignored_shapes,
    network_names,
    stored_name,
)
from graph_runtime.drafts.embeddings import choose_embedding
from graph_runtime.drafts.source import DraftSource
from graph_runtime.drafts.target import DraftTarget, read_target
from graph_runtime.drafts.tensors import (
    EMBEDDING,
    HEAD,
    TARGET_EMBEDDING,
    check_elements,
    check_names,
    choose_head,
    read_draft_vocabulary,
    target_tensor,
)
from graph_runtime.model_files import model_hash, tokenizer_hash
from splitspec.errors import UserError

logger = logging.getLogger(__name__)

_SHARED = (EMBEDDING, HEAD)
"""What a file may leave to the target."""


@dataclass(frozen=True, kw_only=True)
class DFlashCheckpoint:
    """A draft as it is loaded, whatever format it came in."""

    config: DFlashConfig
    model_hash: str
    """SHA-256 of the draft's own files, as hex."""
    target_ids: torch.Tensor | None
    """Target id of each draft id, [Vd] int64 strictly increasing; None: they are the same."""
    tensors: dict[str, torch.Tensor]
    """float32, under the names of the network's parameters: see `layouts.expected_shapes`."""
    tokenizer_hash: str | None
    """Of the target that was given."""


@dataclass(frozen=True, kw_only=True)
class _Files:
    """A draft's folder with its config read and every name and shape checked, no tensor read."""

    source: DraftSource
    config: DFlashConfig
    tied: bool
    """Whether the file says that its head is its own embedding."""
    stored: dict[str, StoredTensor]
    """Under the network's names, `d2t` and `t2d` too."""
    target: DraftTarget | None


def load_checkpoint(
    source: DraftSource, cache_dir: Path, *, fusion_only: bool = False
) -> DFlashCheckpoint:
    """Load a draft, with embeddings and head from the target where the file has none.

    Args:
        source: the draft's folder, the target's, and what to make of them.
        cache_dir: where hashes are kept.
        fusion_only: whether to read no other tensors than `fusion.*`: a program has the others.

    Raises:
        UserError: what is wrong, in one line that names the tensor or the key.
    """
    files = _open(source)
    return DFlashCheckpoint(
        config=files.config,
        model_hash=model_hash(source.folder, cache_dir),
        target_ids=read_draft_vocabulary(files.stored, source.folder, files.config.vocab_size),
        tensors=_fusion_tensors(files) if fusion_only else _all_tensors(files),
        tokenizer_hash=None if source.target is None else tokenizer_hash(source.target),
    )


def load_fusion(
    source: DraftSource, cache_dir: Path
) -> tuple[DFlashConfig, str, dict[str, torch.Tensor]]:
    """Load what turns raw rows into features: all that a verifier needs of a draft.

    Embeddings and head are neither read nor needed.

    Returns:
        The draft's shape, the SHA-256 of its files, and its `fusion.*` tensors in float32.

    Raises:
        UserError: as `load_checkpoint`.
    """
    files = _open(source)
    return files.config, model_hash(source.folder, cache_dir), _fusion_tensors(files)


def load_config(source: DraftSource) -> DFlashConfig:
    """Read a draft's shape; every name and shape of its tensors is checked, and none is read.

    Raises:
        UserError: as `load_checkpoint`.
    """
    return _open(source).config


def _fusion_tensors(files: _Files) -> dict[str, torch.Tensor]:
    names = [n for n in expected_shapes(files.config) if n.startswith("fusion.")]
    return {n: files.stored[n].read_weight() for n in names}


def _all_tensors(files: _Files) -> dict[str, torch.Tensor]:
    shapes = expected_shapes(files.config)
    tensors = {n: files.stored[n].read_weight() for n in shapes if n not in _SHARED}
    tensors[EMBEDDING] = choose_embedding(
        files.stored.get(EMBEDDING),
        target_tensor(files.source.target, TARGET_EMBEDDING, shapes[EMBEDDING]),
        choice=files.source.embeddings,
        vocabulary=files.config.vocab_size,
    )
    tensors[HEAD] = choose_head(
        files.stored,
        tensors[EMBEDDING],
        folder=files.source.folder,
        tied=files.tied,
        target=files.source.target,
        target_tied=files.target is not None and files.target.tied,
        shape=shapes[HEAD],
    )
    return tensors


def _open(source: DraftSource) -> _Files:
    target = None if source.target is None else read_target(source.target)
    content = read_config_object(source.folder / "config.json")
    by_stored_name = stored_tensors(source.folder)
    try:
        check_elements(by_stored_name)
        layout = find_layout(content, by_stored_name)
        names = network_names(by_stored_name)
        stored = {name: by_stored_name[names[name]] for name in names}
        keys = read_keys(layout, content)
        # Elsewhere the key is the target's, or a default that the exporter did not mean.
        tied = layout == "deepspec" and boolean(keys.layer, "tie_word_embeddings")
        config = read_dflash_config(
            keys,
            {name: tensor.shape for name, tensor in stored.items()},
            target=target,
            taps=source.tap_layers,
        )
        _check_names(config, stored)
    except UserError as error:
        raise UserError(f"{source.folder}: {error}") from error
    return _Files(source=source, config=config, tied=tied, stored=stored, target=target)


def _check_names(config: DFlashConfig, stored: dict[str, StoredTensor]) -> None:
    """Refuse a tensor that is missing, unexpected or misshapen.

    Raises:
        UserError: names it as the file does, with both shapes.
    """
    ignored = ignored_shapes(config)
    check_names(
        stored,
        {**expected_shapes(config), **ignored},
        optional=(*_SHARED, *ignored),
        stored_name=stored_name,
    )
    for name in sorted(set(ignored) & set(stored)):
        logger.info("%s: %s is training's copy and is not used", stored[name].path, name)
