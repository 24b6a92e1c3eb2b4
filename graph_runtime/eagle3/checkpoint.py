"""Load EAGLE-3 draft checkpoints as users have them: safetensors, every tensor accounted for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from graph_runtime.architecture import DecoderConfig, read_config
from graph_runtime.checkpoint import StoredTensor, stored_tensors
from graph_runtime.config_values import boolean, read_config_object
from graph_runtime.drafts.embeddings import choose_embedding
from graph_runtime.drafts.source import DraftSource, check_choice
from graph_runtime.drafts.target import reading_target
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
from graph_runtime.eagle3.config import Eagle3Config
from graph_runtime.eagle3.config_reader import FEEDBACKS, read_eagle3_config, read_keys
from graph_runtime.eagle3.layouts import (
    expected_shapes,
    find_layout,
    network_names,
    stored_name,
)
from graph_runtime.model_files import model_hash, tokenizer_hash
from splitspec.errors import UserError

_TARGET_NORM = "fusion.target_norm.weight"
_SHARED = (EMBEDDING, HEAD, _TARGET_NORM)
"""What a file may leave to the target."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Source(DraftSource):
    """What a user says about an EAGLE-3 checkpoint."""

    feedback: str = "auto"
    """"auto", "pre-norm" or "post-norm"."""

    def __post_init__(self) -> None:
        """Refuse what is no choice.

        Raises:
            UserError: names the flag, its value and the choices.
        """
        super().__post_init__()
        check_choice("--feedback", self.feedback, FEEDBACKS)


@dataclass(frozen=True, kw_only=True)
class Eagle3Checkpoint:
    """A draft as it is loaded, whatever format it came in."""

    config: Eagle3Config
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

    source: Eagle3Source
    config: Eagle3Config
    tied: bool
    """Whether the file says that its head is its own embedding."""
    stored: dict[str, StoredTensor]
    """Under the network's names, `d2t` and `t2d` too."""
    target: DecoderConfig | None


def load_checkpoint(
    source: Eagle3Source, cache_dir: Path, *, fusion_only: bool = False
) -> Eagle3Checkpoint:
    """Load a draft, with embeddings and head from the target where the file has none.

    Args:
        source: the draft's folder, the target's, and what to make of them.
        cache_dir: where hashes are kept.
        fusion_only: whether to read no other tensors than `fusion.*`: a program has the others.

    Raises:
        UserError: what is wrong, in one line that names the tensor or the key.
    """
    files = _open(source)
    return Eagle3Checkpoint(
        config=files.config,
        model_hash=model_hash(source.folder, cache_dir),
        target_ids=read_draft_vocabulary(files.stored, source.folder, files.config.vocab_size),
        tensors=_fusion_tensors(files) if fusion_only else _all_tensors(files),
        tokenizer_hash=None if source.target is None else tokenizer_hash(source.target),
    )


def load_fusion(
    source: Eagle3Source, cache_dir: Path
) -> tuple[Eagle3Config, str, dict[str, torch.Tensor]]:
    """Load what turns raw rows into features: all that a verifier needs of a draft.

    Embeddings and head are neither read nor needed.

    Returns:
        The draft's shape, the SHA-256 of its files, and its `fusion.*` tensors in float32.

    Raises:
        UserError: as `load_checkpoint`.
    """
    files = _open(source)
    return files.config, model_hash(source.folder, cache_dir), _fusion_tensors(files)


def _fusion_tensors(files: _Files) -> dict[str, torch.Tensor]:
    names = [n for n in expected_shapes(files.config) if n.startswith("fusion.")]
    tensors = {n: files.stored[n].read_weight() for n in names if n not in _SHARED}
    return tensors | _target_norm(files)


def _all_tensors(files: _Files) -> dict[str, torch.Tensor]:
    shapes = expected_shapes(files.config)
    tensors = {n: files.stored[n].read_weight() for n in shapes if n not in _SHARED}
    tensors |= _target_norm(files)
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


def _open(source: Eagle3Source) -> _Files:
    target = None if source.target is None else _read_target(source.target)
    content = read_config_object(source.folder / "config.json")
    by_stored_name = stored_tensors(source.folder)
    try:
        check_elements(by_stored_name)
        layout = find_layout(content, by_stored_name)
        names = network_names(layout, by_stored_name)
        stored = {name: by_stored_name[names[name]] for name in names}
        keys = read_keys(layout, content)
        # Elsewhere the key is a default that the exporter did not mean.
        tied = layout == "deepspec" and boolean(keys.layer, "tie_word_embeddings")
        config = read_eagle3_config(
            keys,
            {name: tensor.shape for name, tensor in stored.items()},
            target=target,
            taps=source.tap_layers,
            feedback=source.feedback,
        )
        _check_names(config, stored)
    except UserError as error:
        raise UserError(f"{source.folder}: {error}") from error
    return _Files(source=source, config=config, tied=tied, stored=stored, target=target)


def _read_target(folder: Path) -> DecoderConfig:
    with reading_target(folder):
        return read_config(folder)


def _check_names(config: Eagle3Config, stored: dict[str, StoredTensor]) -> None:
    """Refuse a tensor that is missing, unexpected or misshapen.

    Raises:
        UserError: names it as the file does, with both shapes.
    """
    wanted = expected_shapes(config)
    wanted.pop(_TARGET_NORM, None)
    layout = config.layout
    check_names(
        stored,
        wanted,
        optional=(EMBEDDING, HEAD),
        stored_name=lambda name: stored_name(layout, name),
    )


def _target_norm(files: _Files) -> dict[str, torch.Tensor]:
    if files.config.use_aux_hidden_state:
        return {}
    shape = expected_shapes(files.config)[_TARGET_NORM]
    norm = target_tensor(files.source.target, "model.norm.weight", shape)
    assert norm is not None, "such a draft is refused without a target"
    return {_TARGET_NORM: norm.read_weight()}
