"""Choose between a draft's own embedding and its target's."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F

from graph_runtime.checkpoint import StoredTensor
from splitspec.errors import UserError

logger = logging.getLogger(__name__)

EMBEDDINGS = ("auto", "own", "target")
_LEAST_COSINE = 0.3
"""Mean over rows. A table that was trained from the target's stays far above; unrelated ones give
0 +- 1 / sqrt(rows * width)."""
_COMPARED_ROWS = 4096


def choose_embedding(
    own: StoredTensor | None, target: StoredTensor | None, *, choice: str, vocabulary: int
) -> torch.Tensor:
    """Return the embedding [V, H] float32, and say in the log whose it is.

    Args:
        own: the draft's, where its file has one; padding rows are dropped.
        target: the target's, where it is known and of the draft's width.
        choice: one of EMBEDDINGS.
        vocabulary: V.

    Raises:
        UserError: there is none, or the draft's own is unrelated to the target's and nobody said
            that it is meant: an exporter that never trained it saves a random table.
    """
    if choice == "target" and target is None:
        raise UserError("--embeddings is target; give --target, of the draft's hidden_size")
    if choice == "own" and own is None:
        raise UserError("--embeddings is own; the draft holds no tensor embed_tokens.weight")
    if own is None or choice == "target":
        if target is None:
            raise UserError(
                "the draft holds no tensor embed_tokens.weight; give --target, of the draft's "
                "hidden_size, to share its embedding"
            )
        logger.info("the draft shares the target's embedding: %s of %s", target.name, target.path)
        return target.read_weight()
    weight = own.read_weight()[:vocabulary]
    if own.shape[0] > vocabulary:
        logger.info("%s: padding rows of %s are dropped", own.path, own.name)
    if choice == "auto" and target is not None:
        _compare(own, weight, target)
    elif choice == "auto":
        logger.warning(
            "%s: its own tensor %s is used; without --target nobody can tell a trained table from "
            "one that an exporter never trained",
            own.path,
            own.name,
        )
    else:
        logger.info("the draft uses its own embedding: %s of %s", own.name, own.path)
    return weight


def _compare(own: StoredTensor, weight: torch.Tensor, target: StoredTensor) -> None:
    stored = target.read_weight()
    if torch.equal(stored, weight):
        logger.info("the draft's embedding is the target's: %s of %s", target.name, target.path)
        return
    step = max(1, len(weight) // _COMPARED_ROWS)
    cosine = F.cosine_similarity(weight[::step], stored[::step], dim=-1).mean().item()
    if cosine < _LEAST_COSINE:
        raise UserError(
            f"{own.path}: tensor {own.name} is unrelated to the target's embedding (mean cosine of "
            f"their rows {cosine:.2f}), as an exporter's untrained table is; "
            "give --embeddings own or target"
        )
    logger.info(
        "the draft uses its own embedding: %s of %s (mean cosine to the target's %.2f)",
        own.name,
        own.path,
        cosine,
    )
