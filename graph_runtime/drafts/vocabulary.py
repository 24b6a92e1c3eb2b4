"""A draft's vocabulary: its size, and which target id each of its ids stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graph_runtime.architecture import MOST
from graph_runtime.config_values import integer
from graph_runtime.drafts.target import TargetSizes
from splitspec.errors import UserError

_PADDINGS = (64, 128, 256, 512)
"""Exporters round a vocabulary up to a multiple of one of these."""
_MANY = 1024
"""No real vocabulary of so many ids lacks a neighbour of each."""
_HEAD = "lm_head.weight"


def vocab_size(layer: Mapping[str, Any], target: TargetSizes | None) -> int:
    """Return V: the target's where it is known, else what the draft states.

    Raises:
        UserError: the two differ by more than the draft's padding.
    """
    stated = integer(layer, "vocab_size", least=1, most=MOST["vocab_size"])
    if target is None:
        return stated
    if not is_padded(stated, target.vocab_size):
        raise UserError(f"config.json: vocab_size is {stated}; the target's is {target.vocab_size}")
    return target.vocab_size


def draft_vocab_size(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], vocabulary: int
) -> int:
    """Return Vd, the rows of the head that are used: all that it has but padding.

    Args:
        config: top level of config.json.
        shapes: of the file's tensors.
        vocabulary: V.

    Raises:
        UserError: the head and config.json disagree, or there are more rows than target ids.
    """
    key = "draft_vocab_size"
    stated = None
    if config.get(key) is not None:
        stated = integer(config, key, least=1, most=MOST["vocab_size"])
    head = shapes.get(_HEAD)
    mapped = shapes["d2t"][0] if shapes.get("d2t") else None
    rows = head[0] if head else stated or mapped or vocabulary
    if head and stated is not None and rows != stated:
        raise UserError(f"tensor {_HEAD} is {list(head)}; config.json's {key} is {stated}")
    if head is None and rows < vocabulary:
        raise UserError(
            f"missing tensor {_HEAD}: of a draft vocabulary of {rows} ids, so it is not the "
            f"target's, of {vocabulary}"
        )
    if rows > vocabulary and not is_padded(rows, vocabulary):
        of = f"tensor {_HEAD} is {list(head)}" if head else f"config.json: {key} is {rows}"
        raise UserError(f"{of}; the target's vocabulary is of {vocabulary} ids")
    return min(rows, vocabulary)


def is_padded(rows: int, size: int) -> bool:
    """Return whether `rows` is `size`, or `size` rounded up as exporters do."""
    return rows == size or any(rows == -(-size // step) * step for step in _PADDINGS)


def read_target_ids(
    d2t: torch.Tensor | None,
    t2d: torch.Tensor | None,
    *,
    head_rows: int,
    vocabulary: int,
) -> torch.Tensor | None:
    """Return the target id of each draft id, [Vd] int64 strictly increasing; None: the same.

    Args:
        d2t: what is added to a draft id to give its target id, as stored.
        t2d: which target ids the draft knows, as stored.
        head_rows: of the head, padding included.
        vocabulary: V.

    Raises:
        UserError: the map is missing, malformed, holds ids for offsets, or the two disagree.
    """
    if d2t is None:
        if head_rows < vocabulary:
            raise UserError(
                f"missing tensor d2t: {_HEAD} has {head_rows} rows for {vocabulary} target ids"
            )
        known = _known(t2d, vocabulary)
        if known is not None and not known.all():
            raise UserError(
                f"tensor t2d marks {int(known.sum())} of {vocabulary} target ids, and there is no "
                "d2t; expected all of them"
            )
        return None
    if d2t.dtype != torch.int64 or list(d2t.shape) != [head_rows]:
        raise UserError(
            f"tensor d2t is {list(d2t.shape)} {d2t.dtype}; expected [{head_rows}] torch.int64"
        )
    known = _known(t2d, vocabulary)
    offsets = d2t[:vocabulary]  # further rows are padding, as those of the head
    if head_rows >= vocabulary and not offsets.any():
        if known is not None and known.any() and not known.all():
            raise UserError("tensors t2d and d2t disagree: d2t maps every id to itself")
        return None
    ids = torch.arange(len(offsets)) + offsets
    problem = _problem(ids, known, vocabulary)
    if problem is None and known is None and len(ids) >= _MANY and bool((offsets.diff() > 0).all()):
        raise UserError(
            f"tensor d2t rises at every one of its {len(ids)} entries, as a list of target ids "
            "does: as offsets they would leave out a neighbour of each id; expected offsets to "
            "target ids, or a t2d that confirms them"
        )
    if problem is None:
        return ids
    if _problem(offsets, known, vocabulary) is None:
        problem += "; it seems to hold the target ids themselves"
    raise UserError(f"tensor d2t: i + d2t[i] {problem}; expected offsets to target ids")


def _problem(ids: torch.Tensor, known: torch.Tensor | None, vocabulary: int) -> str | None:
    """Return what is wrong with target ids; None: nothing."""
    outside = ids[(ids < 0) | (ids >= vocabulary)]
    if len(outside):
        return f"is {int(outside[0])} where [0, {vocabulary}) are the target's ids"
    falling = (ids.diff() <= 0).nonzero()
    if len(falling):
        i = int(falling[0])
        return f"is {int(ids[i])} and then {int(ids[i + 1])}, which is not increasing"
    if known is not None and (int(known.sum()) != len(ids) or not bool(known[ids].all())):
        return "are other ids than those that t2d marks"
    return None


def _known(t2d: torch.Tensor | None, vocabulary: int) -> torch.Tensor | None:
    if t2d is None:
        return None
    fits = t2d.ndim == 1 and is_padded(len(t2d), vocabulary)
    if t2d.dtype != torch.bool or not fits or bool(t2d[vocabulary:].any()):
        raise UserError(
            f"tensor t2d is {list(t2d.shape)} {t2d.dtype}; expected [{vocabulary}] torch.bool"
        )
    return t2d[:vocabulary]
