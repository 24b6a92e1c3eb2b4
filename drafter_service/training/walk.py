"""Acceptance as it is served, counted over text that the target wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

DRAFT_COUNT = 7
"""Most draft tokens a round, and as many as a recipe counts."""
COUNTS = (3, 5, 7)


def acceptance(
    accepted: torch.Tensor, roles: torch.Tensor, counts: Sequence[int] = COUNTS
) -> dict[int, tuple[int, int]]:
    """Return the tokens and the rounds that K draft tokens a round take, for each K.

    A round's pending token is one of the text, its draft tokens stand as far as they equal the text
    after it, and it emits one token more. This is exact for greedy text and for seeded samples
    alike, because a draft token stands iff it equals the token that the target emits. A turn's
    first token is the prefill bonus and not counted; a round ends with its turn.

    Args:
        accepted: [R, S] int64: leading draft tokens, at most DRAFT_COUNT, that equal the text when
            position p is pending.
        roles: [R, S] uint8, 1 in assistant turns.
        counts: the values of K, each at most DRAFT_COUNT.

    Returns:
        K -> (tokens, rounds). Rounds that a row's end would cut are in neither.
    """
    assert accepted.shape == roles.shape, (accepted.shape, roles.shape)
    assert all(1 <= count <= DRAFT_COUNT for count in counts), counts
    totals = dict.fromkeys(counts, (0, 0))
    for row, row_roles in zip(accepted.tolist(), roles.tolist(), strict=True):
        for first, last in _turns(row_roles):
            for count in counts:
                tokens, rounds = _walk(row, first, last, count)
                totals[count] = (totals[count][0] + tokens, totals[count][1] + rounds)
    return totals


def merge(parts: Sequence[Mapping[int, tuple[int, int]]]) -> dict[int, tuple[int, int]]:
    """Return the sums of what `acceptance` gave for parts of a text."""
    counts = parts[0] if parts else ()
    return {k: (sum(p[k][0] for p in parts), sum(p[k][1] for p in parts)) for k in counts}


def taus(totals: Mapping[int, tuple[int, int]]) -> dict[str, float]:
    """Return tau by K, as a decimal string; a K without rounds is left out."""
    return {str(k): tokens / rounds for k, (tokens, rounds) in totals.items() if rounds}


def _turns(roles: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last position of each assistant turn."""
    turns, first = [], None
    for place, role in enumerate([*roles, 0]):
        if role == 1 and first is None:
            first = place
        elif role != 1 and first is not None:
            turns.append((first, place - 1))
            first = None
    return turns


def _walk(accepted: Sequence[int], first: int, last: int, count: int) -> tuple[int, int]:
    """Return the tokens and the rounds of one turn."""
    tokens = rounds = 0
    pending = first
    while pending < last and pending + DRAFT_COUNT < len(accepted):
        emitted = min(accepted[pending], count) + 1
        emitted = min(emitted, last - pending)  # the stop token ends the round
        tokens, rounds, pending = tokens + emitted, rounds + 1, pending + emitted
    return tokens, rounds
