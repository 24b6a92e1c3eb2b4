"""Load EAGLE-3 draft checkpoints as users have them: safetensors, every tensor accounted for."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from graph_runtime.architecture import DecoderConfig, read_config
from graph_runtime.checkpoint import StoredTensor, stored_tensors
from graph_runtime.config_values import boolean, read_config_object
from graph_runtime.drafts.embeddings import choose_embedding
from graph_runtime.drafts.source import DraftSource, check_choice
from graph_runtime.drafts.vocabulary import is_padded, read_target_ids
from graph_runtime.eagle3.config import Eagle3Config
from graph_runtime.eagle3.config_reader import FEEDBACKS, read_eagle3_config, read_keys
from graph_runtime.eagle3.layouts import (
    VOCABULARY,
    Shape,
    expected_shapes,
    find_layout,
    network_names,
    stored_name,
)
from graph_runtime.model_files import model_hash, tokenizer_hash
from splitspec.errors import UserError

logger = logging.getLogger(__name__)

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_TARGET_NORM = "fusion.target_norm.weight"
_SHARED = (_EMBEDDING, _HEAD, _TARGET_NORM)
"""What a file may leave to the target."""
_TARGET_EMBEDDING = "model.embed_tokens.weight"


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


def load_checkpoint(source: Eagle3Source, cache_dir: Path) -> Eagle3Checkpoint:
    """Load a draft, with embeddings and head from the target where the file has none.

    Args:
        source: the draft's folder, the target's, and what to make of them.
        cache_dir: where hashes are kept.

    Raises:
        UserError: what is wrong, in one line that names the tensor or the key.
    """
    files = _open(source)
    tensors = {
        name: files.stored[name].read_weight()
        for name in expected_shapes(files.config)
        if name not in _SHARED
    }
    tensors |= _target_norm(files)
    tensors[_EMBEDDING] = choose_embedding(
        files.stored.get(_EMBEDDING),
        _target_tensor(files, _TARGET_EMBEDDING, _EMBEDDING),
        choice=source.embeddings,
        vocabulary=files.config.vocab_size,
    )
    tensors[_HEAD] = _head(files, tensors[_EMBEDDING])
    return Eagle3Checkpoint(
        config=files.config,
        model_hash=model_hash(source.folder, cache_dir),
        target_ids=_target_ids(files),
        tensors=tensors,
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
    wanted = expected_shapes(files.config)
    tensors = {
        name: files.stored[name].read_weight()
        for name in wanted
        if name.startswith("fusion.") and name not in _SHARED
    }
    tensors |= _target_norm(files)
    return files.config, model_hash(source.folder, cache_dir), tensors


def _open(source: Eagle3Source) -> _Files:
    target = None if source.target is None else _read_target(source.target)
    content = read_config_object(source.folder / "config.json")
    by_stored_name = stored_tensors(source.folder)
    try:
        _check_elements(by_stored_name)
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
    try:
        return read_config(folder)
    except UserError as error:
        raise UserError(f"target {folder}: {error}") from error


def _check_elements(stored: dict[str, StoredTensor]) -> None:
    """Refuse files without tensors and tensors without elements: no layout has either.

    Raises:
        UserError: names the first such tensor and its shape.
    """
    if not stored:
        raise UserError("its safetensors hold no tensors")
    for name, tensor in sorted(stored.items()):
        if 0 in tensor.shape:
            raise UserError(f"tensor {name} is {list(tensor.shape)}, without elements")


def _check_names(config: Eagle3Config, stored: dict[str, StoredTensor]) -> None:
    """Refuse a tensor that is missing, unexpected or misshapen.

    Raises:
        UserError: names it as the file does, with both shapes.
    """
    wanted = expected_shapes(config)
    for name, tensor in sorted(stored.items()):
        if name in VOCABULARY:
            continue
        if name not in wanted or name == _TARGET_NORM:
            raise UserError(f"unexpected tensor {tensor.name} {list(tensor.shape)}")
        if not _fits(name, tensor.shape, wanted[name]):
            raise UserError(
                f"tensor {tensor.name} is {list(tensor.shape)}; "
                f"config.json asks for {list(wanted[name])}"
            )
    missing = sorted(set(wanted) - set(stored) - set(_SHARED))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"missing tensor {stored_name(config.layout, missing[0])}{more}")


def _fits(name: str, shape: Shape, wanted: Shape) -> bool:
    if name in (_EMBEDDING, _HEAD):
        return len(shape) == 2 and shape[1] == wanted[1] and is_padded(shape[0], wanted[0])
    return shape == wanted


def _target_ids(files: _Files) -> torch.Tensor | None:
    head, vocabulary = files.stored.get(_HEAD), files.config.vocab_size
    maps = [files.stored[name].read() if name in files.stored else None for name in VOCABULARY]
    try:
        return read_target_ids(
            *maps, head_rows=head.shape[0] if head else vocabulary, vocabulary=vocabulary
        )
    except UserError as error:
        raise UserError(f"{files.source.folder}: {error}") from error


def _head(files: _Files, embedding: torch.Tensor) -> torch.Tensor:
    """Return the head [Vd, H]: the file's whenever it has one, whatever it says about ties."""
    rows = files.config.draft_vocab_size
    own = files.stored.get(_HEAD)
    if own is not None:
        if own.shape[0] > rows:
            logger.info("%s: padding rows of %s are dropped", own.path, _HEAD)
        return own.read_weight()[:rows]
    if files.tied and _EMBEDDING in files.stored:
        logger.info("the draft's head is its embedding: tie_word_embeddings is true")
        return embedding
    tied = files.target is not None and files.target.tied
    shared = _target_tensor(files, _TARGET_EMBEDDING if tied else _HEAD, _HEAD)
    if shared is None:
        raise UserError(
            f"{files.source.folder}: missing tensor {_HEAD}; give --target, of the draft's "
            "hidden_size, to share its head"
        )
    logger.info("the draft has no head of its own: %s of %s is shared", shared.name, shared.path)
    return shared.read_weight()


def _target_norm(files: _Files) -> dict[str, torch.Tensor]:
    if files.config.use_aux_hidden_state:
        return {}
    norm = _target_tensor(files, "model.norm.weight", _TARGET_NORM)
    assert norm is not None, "such a draft is refused without a target"
    return {_TARGET_NORM: norm.read_weight()}


def _target_tensor(files: _Files, name: str, as_name: str) -> StoredTensor | None:
    """Return one of the target's tensors; None where there is none of the draft's shape."""
    if files.source.target is None:
        return None
    tensor = stored_tensors(files.source.target).get(name)
    if tensor is None:
        raise UserError(f"{files.source.target}: missing tensor {name}")
    same = tensor.shape == expected_shapes(files.config)[as_name]
    return tensor if same else None
