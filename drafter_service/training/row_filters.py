"""Which rows of the target's text are worth training on, and which are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from drafter_service.training.rollouts_config import RowFilters

LOOP_GRAM = 8
"""Tokens that must come again to count as a repeat."""
ANSWER_KEY = 64
"""Answer tokens that tell two rows apart that begin with the same user turn."""
_ROWS_AT_ONCE = 2048


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Rows that are kept."""

    training_rows: torch.Tensor
    """[M] int64, ascending."""
    held_out_rows: torch.Tensor
    """[M'] int64, ascending."""
    counts: Mapping[str, int]
    """`rows` = `short` + `looping` + `duplicate` + `training` + `held_out`, in rows; `tokens` of
    all rows; `answer_tokens` of those kept."""


def select(
    tokens: torch.Tensor,
    roles: torch.Tensor,
    *,
    opening_length: int,
    user_end_token: int,
    filters: RowFilters,
) -> Selection:
    """Drop short, looping and repeated rows, in this order, and split the rest.

    A row repeats an earlier one when its first user turn and its first `ANSWER_KEY` answer tokens
    are the same. A row is held out when the hash of its first user turn says so: rows with the
    same question are never on both sides.

    Args:
        tokens: [N, S] int32.
        roles: [N, S] uint8; 1: a token that the target chose in an assistant turn.
        opening_length: tokens before the first user turn's text.
        user_end_token: ends a user turn.
        filters: the limits.
    """
    answer_counts = (roles == 1).sum(dim=1)
    short = answer_counts < max(filters.min_answer_tokens, 1)
    looping = ~short & (loop_shares(tokens, roles) > filters.max_loop_share)
    seen: set[bytes] = set()
    training: list[int] = []
    held_out: list[int] = []
    for index in torch.nonzero(~short & ~looping).flatten().tolist():
        row = tokens[index].numpy()
        turn = _first_user_turn(row, opening_length, user_end_token)
        answer = row[roles[index].numpy() == 1][:ANSWER_KEY].tobytes()
        key = hashlib.blake2b(answer, key=_digest(turn)).digest()
        if key in seen:
            continue
        seen.add(key)
        (held_out if _is_held_out(turn, filters.held_out_share) else training).append(index)
    kept = torch.tensor([*training, *held_out], dtype=torch.int64)
    counts = {
        "rows": len(tokens),
        "tokens": tokens.numel(),
        "short": int(short.sum()),
        "looping": int(looping.sum()),
        "duplicate": int((~short & ~looping).sum()) - len(kept),
        "training": len(training),
        "held_out": len(held_out),
        "answer_tokens": int(answer_counts[kept].sum()),
    }
    return Selection(
        training_rows=torch.tensor(training, dtype=torch.int64),
        held_out_rows=torch.tensor(held_out, dtype=torch.int64),
        counts=counts,
    )


def loop_shares(tokens: torch.Tensor, roles: torch.Tensor) -> torch.Tensor:
    """Return [N] float32: the share of answer tokens that are part of a repeated 8-gram.

    An 8-gram counts where all its tokens are answer tokens, and is repeated when it comes twice
    or more in the row.

    Args:
        tokens: [N, S] int32.
        roles: [N, S] uint8.
    """
    parts = zip(tokens.split(_ROWS_AT_ONCE), roles.split(_ROWS_AT_ONCE), strict=True)
    return torch.cat([_loop_shares(some, of) for some, of in parts])


def _loop_shares(tokens: torch.Tensor, roles: torch.Tensor) -> torch.Tensor:
    rows, length = tokens.shape
    answers = roles == 1
    starts = length - LOOP_GRAM + 1
    if starts < 1:
        return torch.zeros(rows)
    inside = answers.unfold(1, LOOP_GRAM, 1).all(dim=2)
    # A polynomial in an odd number modulo 2^64 stands for a gram. What is no gram of an answer
    # gets a negative number of its own; those of grams are made positive.
    codes = torch.zeros(rows, starts, dtype=torch.int64)
    for i in range(LOOP_GRAM):
        codes = codes * 6364136223846793005 + tokens[:, i : i + starts].long() + 1
    codes = torch.where(inside, codes & (2**63 - 1), -1 - torch.arange(starts))
    ordered, order = codes.sort(dim=1)
    same = ordered[:, 1:] == ordered[:, :-1]
    repeated = torch.zeros_like(inside)
    repeated[:, 1:] |= same
    repeated[:, :-1] |= same
    repeated = torch.zeros_like(inside).scatter(1, order, repeated)
    covered = torch.zeros_like(answers)
    for i in range(LOOP_GRAM):
        covered[:, i : i + starts] |= repeated
    return covered.sum(dim=1) / answers.sum(dim=1).clamp(min=1)


def _first_user_turn(row: np.ndarray, opening_length: int, user_end_token: int) -> bytes:
    """Return the first user turn's token ids as bytes; all the rest where it does not end."""
    rest = row[opening_length:]
    ends = np.flatnonzero(rest == user_end_token)
    return rest[: ends[0] if len(ends) else None].tobytes()


def _digest(turn: bytes) -> bytes:
    return hashlib.blake2b(turn, digest_size=16).digest()


def _is_held_out(turn: bytes, share: float) -> bool:
    return int.from_bytes(_digest(turn)[:8], "little") < share * 2**64
