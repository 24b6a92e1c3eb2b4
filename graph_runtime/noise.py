"""Counter-based Gumbel noise: the same numbers for one (seed, position, token id) wherever asked.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The key is
the two 32-bit halves of the seed (low, high), the counter (token_id // 4, position, 0, 0), the lane
token_id % 4. A word x gives u = ((x >> 8) + 0.5) * 2^-24 and the noise -ln(-ln u).
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import torch

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10
_LANES = 4
_DEDUPLICATE_FROM = 512  # below, finding shared counters costs more than computing them
_TOKENS_A_PASS = 16_384  # so few that the arrays stay in a core's cache

Words = TypeVar("Words", np.ndarray, torch.Tensor)

GUMBEL_MAX = -math.log(-math.log1p(-(2.0**-25)))
"""Largest noise there is: u = (2^24 - 1 + 0.5) * 2^-24 = 1 - 2^-25. About 17.33."""
GUMBEL_MIN = -math.log(25.0 * math.log(2.0))
"""Smallest noise there is: u = 0.5 * 2^-24 = 2^-25. About -2.85."""
GUMBEL_SPAN = GUMBEL_MAX - GUMBEL_MIN + 1e-9
"""A token whose scaled logit is further below the largest (about 20.18) cannot win. The last term
is more than the rounding of the sums that are compared."""


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[int, int]
) -> tuple[Words, Words, Words, Words]:
    """Return the four output words of Philox4x32-10.

    Args:
        counter: four words, each int64 with values in [0, 2^32), of shapes that broadcast.
        key: two words in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # NOTE: the 64-bit products wrap; an arithmetic shift and a mask still give the high word.
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (((p1 >> 32) ^ c1) & _MASK) ^ k0,
            p1 & _MASK,
            (((p0 >> 32) ^ c3) & _MASK) ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def gumbel_noise(seed: int, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the noise of `token_ids` at `positions`, [N] float64 on their device.

    Args:
        seed: in [0, 2^64).
        positions: [N] int64, absolute positions of the tokens that are being decided.
        token_ids: [N] int64. Ascending ids within a run of equal positions are fastest: four
            neighbouring ids share one counter.
    """
    parts = zip(positions.split(_TOKENS_A_PASS), token_ids.split(_TOKENS_A_PASS), strict=True)
    return torch.cat([_gumbel(token_words(seed, *part)) for part in parts])


def gumbel_of_word(word: int) -> float:
    """Return the noise of one 32-bit word, by scalar logarithms."""
    return -math.log(-math.log(((word >> 8) + 0.5) * 2.0**-24))


def _gumbel(words: torch.Tensor) -> torch.Tensor:
    uniform = (words >> 8).double().add_(0.5).mul_(2.0**-24)
    return uniform.log_().neg_().log_().neg_()


def token_words(seed: int, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the 32-bit word behind each token's noise, [N] int64; arguments as `gumbel_noise`."""
    assert 0 <= seed < 2**64, seed
    counters = (positions << 32) | (token_ids >> 2)
    lanes = token_ids & (_LANES - 1)
    if token_ids.numel() < _DEDUPLICATE_FROM:
        return _blocks(seed, counters).gather(1, lanes[:, None])[:, 0]
    counters, owners = torch.unique_consecutive(counters, return_inverse=True)
    return _blocks(seed, counters).view(-1)[owners.mul_(_LANES).add_(lanes)]


def _blocks(seed: int, counters: torch.Tensor) -> torch.Tensor:
    """Return the four words of each counter, [n, 4] int64.

    numpy on a CPU: a call of it on a few hundred words costs a fifth of torch's.
    """
    key = (seed & _MASK, seed >> 32)
    if counters.device.type == "cpu":
        c = counters.numpy()
        zero = np.zeros(1, np.int64)
        return torch.from_numpy(np.stack(philox4x32((c & _MASK, c >> 32, zero, zero), key), axis=1))
    none = torch.zeros(1, dtype=torch.int64, device=counters.device)
    return torch.stack(philox4x32((counters & _MASK, counters >> 32, none, none), key), dim=1)
