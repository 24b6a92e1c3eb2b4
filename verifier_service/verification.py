"""Which token the target chooses at each position: one rule for greedy and sampled (design 7).

Order: temperature -> top-k -> top-p (the crossing token is kept, ties go to the lower id) -> min-p
-> plus temperature * Gumbel noise -> argmax, lowest id on ties. Temperature 0 is the argmax alone.
A draft token stands iff it equals the target's choice, so the emitted tokens are a function of the
target, the prompt and the parameters only (law L4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graph_runtime.noise import GUMBEL_SPAN, gumbel_noise, gumbel_of_word, token_words
from splitspec.errors import EngineFailed, InvalidArgument

MAX_TEMPERATURE = 100.0
_NUCLEUS_SPAN = 6.0  # most nuclei end above exp(-6) of the largest probability: sort those only
_NEAR_TIE = 1e-9  # far above the error of a float64 log, far below any gap that matters


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
        # NOTE: written so that NaN fails every range.
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise InvalidArgument.of("sampling.temperature", self.temperature, "0..100")
        if not 0 <= self.top_k < 2**32:
            raise InvalidArgument.of("sampling.top_k", self.top_k, "0..4294967295")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidArgument.of("sampling.top_p", self.top_p, "above 0, up to 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise InvalidArgument.of("sampling.min_p", self.min_p, "0..1")
        if not 0 <= self.seed < 2**64:
            raise InvalidArgument.of("sampling.seed", self.seed, "0..2^64-1")


def choose(logits: torch.Tensor, sampling: Sampling, positions: Sequence[int]) -> list[int]:
    """Return the target's token at each of `positions`.

    A row's choice depends on that row alone, bit for bit, never on how many rows came with it.

    Args:
        logits: [T, V] float32; row t decides the token at positions[t].
        sampling: the session's parameters.
        positions: T absolute positions, each one past the position that its row was computed at.

    Raises:
        EngineFailed: a row has no largest finite logit (NaN, +inf, or nothing but -inf).
    """
    largest, argmax = logits.max(dim=1)  # the first index of equal maxima: lowest id on ties
    peaks = largest.tolist()
    if not all(map(math.isfinite, peaks)):
        raise EngineFailed(f"the target's largest logits are {peaks[:8]} at {list(positions)[:8]}")
    if sampling.temperature == 0.0 or sampling.top_k == 1:
        return argmax.tolist()
    survivors = [_survivors(row, peak, sampling) for row, peak in zip(logits, peaks, strict=True)]
    return _noisiest(survivors, sampling, positions)


def accept(draft_token_ids: Sequence[int], chosen: Sequence[int]) -> int:
    """Return how many leading draft tokens stand: those that equal the target's choice."""
    for index, token_id in enumerate(draft_token_ids):
        if token_id != chosen[index]:
            return index
    return len(draft_token_ids)


def _survivors(
    row: torch.Tensor, peak: float, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids, ascending, that can still win, and their logits below the peak.

    Both [M]: int64, and float64 <= 0 at the row's own scale. Everything that truncation keeps and
    noise could lift to the top is here.
    """
    below = row.double() - peak
    allowed = below >= _window(sampling) * sampling.temperature
    kept = _top_k(below, sampling.top_k) if 0 < sampling.top_k < row.numel() else None
    if kept is not None:
        allowed &= kept
    if sampling.top_p < 1.0:
        weights = (below / sampling.temperature).exp_()
        if kept is not None:
            weights *= kept
        ids = _nucleus(below, weights, allowed, sampling)
    else:
        ids = allowed.nonzero()[:, 0]
    return ids, below[ids]


def _window(sampling: Sampling) -> float:
    """Return how far below the peak a scaled logit may lie: by min-p, or for noise to reach it."""
    if sampling.min_p == 0.0:
        return -GUMBEL_SPAN
    return max(-GUMBEL_SPAN, math.log(sampling.min_p))


def _top_k(below: torch.Tensor, k: int) -> torch.Tensor:
    """Return a mask [V] of the k largest, ties to the lower id."""
    threshold = below.topk(k, sorted=True).values[-1]
    kept = below > threshold
    ties = (below == threshold).nonzero()[:, 0]
    kept[ties[: k - int(kept.sum())]] = True
    return kept


def _nucleus(
    below: torch.Tensor, weights: torch.Tensor, allowed: torch.Tensor, sampling: Sampling
) -> torch.Tensor:
    """Return the allowed ids, ascending, of the smallest leading set that reaches top_p.

    `weights` [V] float64 are unnormalised probabilities after temperature and top-k. A token stays
    iff the mass strictly before it is short of the target, so the crossing token stays.
    """
    target = sampling.top_p * float(weights.sum())
    near = allowed & (below >= -_NUCLEUS_SPAN * sampling.temperature)
    ids = near.nonzero()[:, 0]
    if float(weights[ids].sum()) < target * (1.0 + _NEAR_TIE):
        ids = allowed.nonzero()[:, 0]
    # `allowed` is a prefix in this order, so cutting it first changes no mass before a token.
    order = below[ids].sort(descending=True, stable=True).indices
    ids = ids[order]
    mass = weights[ids].cumsum(0)
    keep = torch.cat([mass.new_zeros(1), mass[:-1]]) < target
    return ids[keep].sort().values


def _noisiest(
    survivors: Sequence[tuple[torch.Tensor, torch.Tensor]],
    sampling: Sampling,
    positions: Sequence[int],
) -> list[int]:
    """Return, a row, the survivor whose logit plus noise is largest."""
    counts = [ids.numel() for ids, _ in survivors]
    token_ids = torch.cat([ids for ids, _ in survivors])
    where = torch.tensor(positions, device=token_ids.device).repeat_interleave(
        torch.tensor(counts, device=token_ids.device)
    )
    noise = gumbel_noise(sampling.seed, where, token_ids)
    scores = torch.cat([below for _, below in survivors]) + sampling.temperature * noise
    rows = zip(scores.split(counts), survivors, positions, strict=True)
    return [_winner(*row, sampling) for row in rows]


def _winner(
    scores: torch.Tensor,
    survivors: tuple[torch.Tensor, torch.Tensor],
    position: int,
    sampling: Sampling,
) -> int:
    """Return the id of the largest score; survivors are as `_survivors` returns them.

    NOTE: the last bit of a vectorised logarithm may depend on an element's place in its array, and
    so on the other rows of the window. Scores that close are decided by scalar logarithms.
    """
    ids, below = survivors
    near = (scores >= scores.max() - sampling.temperature * _NEAR_TIE).nonzero()[:, 0]
    if near.numel() > 1:
        words = token_words(sampling.seed, torch.full_like(ids[near], position), ids[near])
        noise = map(gumbel_of_word, words.tolist())
        exact = [
            b + sampling.temperature * g for b, g in zip(below[near].tolist(), noise, strict=True)
        ]
        near = near[exact.index(max(exact))]  # the first of equals: ids ascend
    return int(ids[near])
