"""A draft's tensors: every one accounted for, embedding and head its own or the target's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from graph_runtime.checkpoint import StoredTensor, stored_tensors
from graph_runtime.drafts.shapes import Shape
from graph_runtime.drafts.vocabulary import is_padded, read_target_ids
from splitspec.errors import UserError

logger = logging.getLogger(__name__)

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
TARGET_EMBEDDING = "model.embed_tokens.weight"
VOCABULARY = ("d2t", "t2d")
"""What a file holds besides weights."""


def check_elements(stored: Mapping[str, StoredTensor]) -> None:
    """Refuse files without tensors and tensors without elements: no layout has either.

    Raises:
        UserError: names the first such tensor and its shape.
    """
    if not stored:
        raise UserError("its safetensors hold no tensors")
    for name, tensor in sorted(stored.items()):
        if 0 in tensor.shape:
            raise UserError(f"tensor {name} is {list(tensor.shape)}, without elements")


def check_names(
    stored: Mapping[str, StoredTensor],
    wanted: Mapping[str, Shape],
    *,
    optional: Collection[str],
    stored_name: Callable[[str], str],
) -> None:
    """Refuse a tensor that is missing, unexpected or misshapen.

    Args:
        stored: under the network's names; `VOCABULARY` is left alone.
        wanted: shapes under the network's names.
        optional: which of `wanted` may be missing.
        stored_name: gives the name that the file has for one of the network's tensors.

    Raises:
        UserError: names it as the file does, with both shapes.
    """
    for name, tensor in sorted(stored.items()):
        if name in VOCABULARY:
            continue
        if name not in wanted:
            raise UserError(f"unexpected tensor {tensor.name} {list(tensor.shape)}")
        if not _fits(name, tensor.shape, wanted[name]):
            raise UserError(
                f"tensor {tensor.name} is {list(tensor.shape)}; "
                f"config.json asks for {list(wanted[name])}"
            )
    missing = sorted(set(wanted) - set(stored) - set(optional))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"missing tensor {stored_name(missing[0])}{more}")


def _fits(name: str, shape: Shape, wanted: Shape) -> bool:
    if name in (EMBEDDING, HEAD):
        return len(shape) == 2 and shape[1] == wanted[1] and is_padded(shape[0], wanted[0])
    return shape == wanted


def target_tensor(target: Path | None, name: str, shape: Shape) -> StoredTensor | None:
    """Return one of the target's tensors; None where there is no target, or not of that shape.

    Raises:
        UserError: the target has no such tensor.
    """
    if target is None:
        return None
    tensor = stored_tensors(target).get(name)
    if tensor is None:
        raise UserError(f"{target}: missing tensor {name}")
    return tensor if tensor.shape == shape else None


def read_draft_vocabulary(
    stored: Mapping[str, StoredTensor], folder: Path, vocabulary: int
) -> torch.Tensor | None:
    """Return the target id of each draft id, [Vd] int64 strictly increasing; None: the same.

    Args:
        stored: the draft's tensors.
        folder: of the draft.
        vocabulary: V.

    Raises:
        UserError: the map is missing or wrong, see `read_target_ids`.
    """
    head = stored.get(HEAD)
    maps = [stored[name].read() if name in stored else None for name in VOCABULARY]
    try:
        return read_target_ids(
            *maps, head_rows=head.shape[0] if head else vocabulary, vocabulary=vocabulary
        )
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error


def choose_head(
    stored: Mapping[str, StoredTensor],
    embedding: torch.Tensor,
    *,
    folder: Path,
    tied: bool,
    target: Path | None,
    target_tied: bool,
    shape: Shape,
) -> torch.Tensor:
    """Return the head [Vd, H] float32: the file's whenever it has one, whatever it says of ties.

    Args:
        stored: the draft's tensors.
        embedding: the draft's, as it was chosen.
        folder: of the draft.
        tied: whether the draft's file says that its head is its own embedding.
        target: of the target, where it is known.
        target_tied: whether the target's head is its embedding.
        shape: what the draft needs.

    Raises:
        UserError: the file has none, and no target has one of that shape.
    """
    head = _own_head(stored, shape[0])
    if head is not None:
        return head
    if tied and EMBEDDING in stored:
        logger.info("the draft's head is its embedding: tie_word_embeddings is true")
        return embedding
    return _shared_head(folder, target, tied=target_tied, shape=shape)


def _own_head(stored: Mapping[str, StoredTensor], rows: int) -> torch.Tensor | None:
    """Return the file's head [rows, H] float32, less padding; None: it has none."""
    own = stored.get(HEAD)
    if own is None:
        return None
    if own.shape[0] > rows:
        logger.info("%s: padding rows of %s are dropped", own.path, HEAD)
    return own.read_weight()[:rows]


def _shared_head(folder: Path, target: Path | None, *, tied: bool, shape: Shape) -> torch.Tensor:
    """Return the target's head [V, H] float32 for a draft without one.

    Args:
        folder: of the draft.
        target: of the target, where it is known.
        tied: whether the target's head is its embedding.
        shape: what the draft needs.

    Raises:
        UserError: there is no target, or its head has another shape.
    """
    shared = target_tensor(target, TARGET_EMBEDDING if tied else HEAD, shape)
    if shared is None:
        raise UserError(
            f"{folder}: missing tensor {HEAD}; give --target, of the draft's hidden_size, to "
            "share its head"
        )
    logger.info("the draft has no head of its own: %s of %s is shared", shared.name, shared.path)
    return shared.read_weight()


def fusion_weights(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a draft's fusion, those named `fusion.*`, as the fusion names them."""
    prefix = "fusion."
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
