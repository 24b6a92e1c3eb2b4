"""Which of the target's tokens a draft with a small head can draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from splitspec.errors import UserError


def special_token_ids(folder: Path) -> list[int]:
    """Return the ids of the special tokens, those that end a turn among them, ascending.

    Args:
        folder: of the target, with its tokenizer.json.

    Raises:
        UserError: the tokenizer is missing or damaged.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more precise
        raise UserError(f"{path} cannot be read: {error}") from error
    added = tokenizer.get_added_tokens_decoder().items()
    return sorted(token_id for token_id, token in added if token.special)


def choose_target_ids(
    tokens: torch.Tensor,
    roles: torch.Tensor,
    *,
    size: int,
    vocab_size: int,
    always: list[int],
) -> tuple[torch.Tensor, float]:
    """Return the most frequent tokens of assistant turns, and the share of them that they cover.

    Args:
        tokens: [N, S] integers.
        roles: [N, S], 1 in assistant turns.
        size: Vd, how many to choose; in [1, vocab_size].
        vocab_size: V.
        always: ids that are chosen however rare they are.

    Returns:
        Ids [Vd] int64, strictly increasing, on the CPU; ties go to the lower id. And coverage,
        in [0, 1].

    Raises:
        UserError: `size` does not hold `always`.
    """
    assert 1 <= size <= vocab_size, (size, vocab_size)
    kept = [token_id for token_id in always if token_id < vocab_size]
    if len(kept) > size:
        raise UserError(
            f"--draft-vocab-size {size} is not in {len(kept)}..{vocab_size}: the tokenizer has "
            f"{len(kept)} special tokens"
        )
    counts = torch.bincount(tokens[roles == 1].long(), minlength=vocab_size)
    ranked = counts.clone()
    ranked[kept] = torch.iinfo(torch.int64).max
    order = ranked.sort(descending=True, stable=True).indices
    ids = order[:size].sort().values
    return ids, float(counts[ids].sum() / counts.sum().clamp(min=1))
