"""Which token logits choose at each position: one rule for greedy and sampled, target and draft.

Order: temperature -> top-k -> top-p (the crossing token is kept, ties go to the lower id) -> min-p
-> plus temperature * Gumbel noise -> argmax, lowest id on ties. Temperature 0 is the argmax alone.
The noise belongs to a position and a **target** token id: a draft that chooses by the same rule,
whatever its vocabulary, meets the noise that the target will meet there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from graph_runtime.noise import (
    GUMBEL_SPAN,
    gumbel_of_word,
    gumbel_of_words,
    position_words,
    token_words,
)
from splitspec.checks import check_sampling_ranges
from splitspec.errors import InvalidArgument, NonFiniteLogits

_SPANS = (*(4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0), GUMBEL_SPAN)
"""How far below the peak truncation looks for its borders, step by step: sorting costs most."""
_CERTAIN_SPAN = 3.0
"""Tokens this near the peak get their noise first; one of them wins nearly always."""
_CROWD = 4096  # survivors from which on it pays to find out first who can win at all
_BLOCK = 8192  # elements that stay in a core's first cache
_NEAR_TIE = 1e-9
"""Far above the error of a float64 logarithm or sum, far below any gap that matters."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a session's tokens are chosen.

    Raises:
        InvalidArgument: a value is out of its range; names it as in the proto.
    """

    temperature: float = 0.0
    top_k: int = 0
    """0: keep all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Key of the noise; means nothing at temperature 0."""

    def __post_init__(self) -> None:
        check_sampling_ranges(temperature=self.temperature, top_p=self.top_p, min_p=self.min_p)
        if not 0 <= self.top_k < 2**32:
            raise InvalidArgument.of("sampling.top_k", self.top_k, "0..4294967295")
        if not 0 <= self.seed < 2**64:
            raise InvalidArgument.of("sampling.seed", self.seed, "0..2^64-1")


def choose(
    logits: torch.Tensor,
    sampling: Sampling,
    positions: Sequence[int],
    draft_token_ids: Sequence[int] = (),
    target_ids: np.ndarray | None = None,
) -> list[int]:
    """Return the token chosen at each of `positions`, as a target id.

    A row's choice depends on that row alone, bit for bit, never on how many rows came with it. With
    draft tokens, d1.. for the first rows, rows after the first that rejects may be left out: nobody
    reads them, and most windows end early.

    Args:
        logits: [T, V] float32; row t decides the token at positions[t].
        sampling: the session's parameters.
        positions: T absolute positions, each one past the position that its row was computed at.
        draft_token_ids: at most T target ids.
        target_ids: [V] int64 strictly increasing, the target id of each column; None: its index.

    Raises:
        NonFiniteLogits: a row has no largest finite logit (NaN, +inf, or nothing but -inf).
    """
    # NOTE: numpy on the host, a tenth of the time of torch's own CPU kernels. From another device
    # this is a copy of [T, V] logits, which law L6 forbids: such a target brings its own kernel.
    rows = logits.cpu().numpy()
    largest = rows.argmax(axis=1)  # the first NaN, or the first of equals: lowest id on ties
    peaks = rows[np.arange(len(rows)), largest]
    if not np.isfinite(peaks).all():
        row = int(np.isfinite(peaks).argmin())
        raise NonFiniteLogits(
            f"the largest logit for position {positions[row]} is {peaks[row]}",
            position=positions[row],
        )
    if sampling.temperature == 0.0 or sampling.top_k == 1:
        token_ids = largest if target_ids is None else target_ids[largest]
        return [int(token_id) for token_id in token_ids]
    # One row at a time where a rejection may spare the rest, else all share one Philox call.
    group = 1 if draft_token_ids else len(rows)
    chosen: list[int] = []
    with np.errstate(over="ignore"):  # a tiny temperature makes distances infinite: as it should
        for first in range(0, len(rows), group):
            places = range(first, first + group)
            contests = [
                _contest(rows[t], peaks[t], positions[t], sampling, target_ids) for t in places
            ]
            chosen += _decide(contests, sampling)
            if first < len(draft_token_ids) and draft_token_ids[first] != chosen[first]:
                break
    return chosen


@dataclass(frozen=True, slots=True)
class _Contest:
    """One row's tokens that truncation kept and that noise can still lift to the top."""

    position: int
    token_ids: np.ndarray
    """[M] int64, ascending: columns of the row while truncation looks, target ids after it."""
    below: np.ndarray
    """[M] float64 <= 0: logits minus the row's largest."""


def _contest(
    row: np.ndarray,
    peak: np.float32,
    position: int,
    sampling: Sampling,
    target_ids: np.ndarray | None,
) -> _Contest:
    """Truncate one row [V] float32 by top-k, top-p and min-p, and drop who cannot win."""
    if sampling.top_k or sampling.top_p < 1.0:
        contest = _truncated(row, peak, position, sampling)
    else:
        span = GUMBEL_SPAN
        if sampling.min_p > 0.0:
            span = min(span, _NEAR_TIE - math.log(sampling.min_p))
        contest = _within(row, peak, position, span * sampling.temperature)
    if sampling.min_p > 0.0:
        likely = np.exp(contest.below / sampling.temperature) >= sampling.min_p
        contest = _Contest(position, contest.token_ids[likely], contest.below[likely])
    if target_ids is not None:  # increasing: the order of the ids is the order of the columns
        contest = _Contest(position, target_ids[contest.token_ids], contest.below)
    if contest.token_ids.size > _CROWD:
        contest = _without_losers(contest, sampling)
    return contest


def _within(row: np.ndarray, peak: np.float32, position: int, span: float) -> _Contest:
    """Return the tokens whose logits are at most `span` below the peak."""
    border = np.nextafter(np.float32(float(peak) - span), np.float32(-np.inf))  # may round up
    token_ids = np.flatnonzero(row >= border)
    return _Contest(position, token_ids, row[token_ids].astype(np.float64) - float(peak))


def _truncated(row: np.ndarray, peak: np.float32, position: int, sampling: Sampling) -> _Contest:
    """Return the tokens that top-k and top-p keep, as far as they can win.

    Looks near the peak first: if both borders lie there, nothing else needs sorting.
    """
    k = sampling.top_k if sampling.top_k < row.size else 0
    total: float | None = None
    for span in _SPANS:
        contest = _within(row, peak, position, span * sampling.temperature)
        order = np.argsort(-contest.below, kind="stable")  # equals stay in order of their ids
        has_all_k = 0 < k <= order.size
        order = order[:k] if k else order
        is_settled = has_all_k
        if sampling.top_p < 1.0:
            mass = np.cumsum(np.exp(contest.below[order] / sampling.temperature))
            if has_all_k:
                total = float(mass[-1])
            elif total is None:
                total = _mass(row, peak, k, sampling.temperature)
            target = sampling.top_p * total
            is_settled = has_all_k or mass[-1] >= target * (1.0 + _NEAR_TIE)
            # A token stays iff the mass strictly before it is short: the crossing one stays.
            order = order[: 1 + int(np.searchsorted(mass[:-1], target, side="left"))]
        if is_settled:
            break
    order.sort()
    return _Contest(position, contest.token_ids[order], contest.below[order])


def _mass(row: np.ndarray, peak: np.float32, k: int, temperature: float) -> float:
    """Return the unnormalised probability of the k most likely tokens, of all where k is 0.

    Exponentials in float32 (error 1e-7 of the sum, a third of float64's time), summed in float64.
    """
    if k:
        row = np.partition(row, row.size - k)[row.size - k :]
    scale = np.float32(min(1.0 / temperature, 1e30))  # finite in float32: 0 * scale must be 0
    scratch = np.empty(min(row.size, _BLOCK), np.float32)
    total = 0.0
    for at in range(0, row.size, _BLOCK):
        part = row[at : at + _BLOCK]
        weights = np.subtract(part, peak, out=scratch[: part.size])
        weights *= scale
        total += float(np.exp(weights, out=weights).sum(dtype=np.float64))
    return total


def _without_losers(contest: _Contest, sampling: Sampling) -> _Contest:
    """Drop tokens far below the peak whose noise is too small to reach what the near ones score.

    Saves the logarithms of a crowd: a far token's word must reach a common threshold.
    """
    token_ids, below, temperature = contest.token_ids, contest.below, sampling.temperature
    is_kept = below >= -_CERTAIN_SPAN * temperature
    best = _scores(contest.position, token_ids[is_kept], below[is_kept], sampling).max()
    needed = best / temperature + _CERTAIN_SPAN - _NEAR_TIE
    threshold = max(0, int(math.exp(-math.exp(-needed)) * 2.0**24) - 1) << 8
    words = position_words(sampling.seed, contest.position, int(token_ids[-1]) + 1)
    lanes, columns = np.nonzero(words >= np.uint64(threshold))
    hopeful = 4 * columns + lanes
    at = np.minimum(np.searchsorted(token_ids, hopeful), token_ids.size - 1)
    is_kept[at[token_ids[at] == hopeful]] = True
    return _Contest(contest.position, token_ids[is_kept], below[is_kept])


def _scores(
    positions: np.ndarray | int, token_ids: np.ndarray, below: np.ndarray, sampling: Sampling
) -> np.ndarray:
    """Return logits plus noise, [N] float64."""
    positions = np.broadcast_to(positions, token_ids.shape)
    noise = gumbel_of_words(token_words(sampling.seed, positions, token_ids))
    noise *= sampling.temperature
    noise += below
    return noise


def _decide(contests: Sequence[_Contest], sampling: Sampling) -> list[int]:
    """Return, a contest, the token with the largest logit plus noise."""
    counts = [contest.token_ids.size for contest in contests]
    scores = _scores(
        np.repeat([contest.position for contest in contests], counts),
        np.concatenate([contest.token_ids for contest in contests]),
        np.concatenate([contest.below for contest in contests]),
        sampling,
    )
    parts = np.split(scores, np.cumsum(counts)[:-1])
    return [_winner(*pair, sampling) for pair in zip(contests, parts, strict=True)]


def _winner(contest: _Contest, scores: np.ndarray, sampling: Sampling) -> int:
    """Return the token of the largest score, lowest id on ties.

    NOTE: the last bit of a vectorised logarithm may depend on an element's place in its array, and
    so on the other rows of the window. Scores that close are decided by scalar logarithms.
    """
    near = np.flatnonzero(scores >= scores.max() - sampling.temperature * _NEAR_TIE)
    if near.size == 1:
        return int(contest.token_ids[near[0]])
    token_ids = contest.token_ids[near]
    words = token_words(sampling.seed, np.full(near.size, contest.position), token_ids)
    exact = [
        below + sampling.temperature * gumbel_of_word(word)
        for below, word in zip(contest.below[near].tolist(), words.tolist(), strict=True)
    ]
    return int(token_ids[exact.index(max(exact))])  # the first of equals: ids ascend
