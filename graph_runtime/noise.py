"""Counter-based Gumbel noise: the same numbers for one (seed, position, token id) wherever asked.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The key is
the two 32-bit halves of the seed (low, high), the counter (token_id // 4, position, 0, 0), the lane
token_id % 4. A word x gives u = ((x >> 8) + 0.5) * 2^-24 and the noise -ln(-ln u).

This is the form for a CPU, in numpy: a call of it on a few hundred words costs a fifth of torch's.
"""

from __future__ import annotations

import math

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYLS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_MASK64 = np.uint64(_MASK)
_32 = np.uint64(32)
_ROUNDS = 10
_LANES = 4

GUMBEL_MAX = -math.log(-math.log1p(-(2.0**-25)))
"""Largest noise there is: u = (2^24 - 1 + 0.5) * 2^-24 = 1 - 2^-25. About 17.33."""
GUMBEL_MIN = -math.log(25.0 * math.log(2.0))
"""Smallest noise there is: u = 0.5 * 2^-24 = 2^-25. About -2.85."""
GUMBEL_SPAN = GUMBEL_MAX - GUMBEL_MIN + 1e-9
"""A token whose scaled logit is further below the largest (about 20.18) cannot win. The last term
is more than the rounding of the sums that are compared."""


def philox4x32(counters: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Return the output words of Philox4x32-10, [4, n] uint64 below 2^32.

    Args:
        counters: [4, n] uint64, four words a counter, each below 2^32.
        key: two words below 2^32.
    """
    words = counters.copy()
    c0, c1, c2, c3 = words
    p0, p1 = np.empty_like(c0), np.empty_like(c0)
    k0, k1 = key
    for _ in range(_ROUNDS):
        # In place: this is memory-bound. A product of two 32-bit words is exact in uint64.
        np.multiply(c0, _MULTIPLIERS[0], out=p0)
        np.multiply(c2, _MULTIPLIERS[1], out=p1)
        np.right_shift(p1, _32, out=c0)
        np.bitwise_xor(c0, c1, out=c0)
        np.bitwise_xor(c0, np.uint64(k0), out=c0)
        np.bitwise_and(p1, _MASK64, out=c1)
        np.right_shift(p0, _32, out=c2)
        np.bitwise_xor(c2, c3, out=c2)
        np.bitwise_xor(c2, np.uint64(k1), out=c2)
        np.bitwise_and(p0, _MASK64, out=c3)
        k0, k1 = (k0 + _WEYLS[0]) & _MASK, (k1 + _WEYLS[1]) & _MASK
    return words


def token_words(seed: int, positions: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Return the 32-bit word behind each token's noise, [N] uint64.

    Args:
        seed: below 2^64.
        positions: [N] int64 below 2^32, absolute positions of the tokens that are being decided.
        token_ids: [N] int64.
    """
    counters = np.zeros((_LANES, token_ids.size), np.uint64)
    counters[0] = token_ids >> 2
    counters[1] = positions
    words = philox4x32(counters, _key(seed))
    return words[token_ids & 3, np.arange(token_ids.size)]


def position_words(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """Return the words of every token at one position, [4, ceil(V / 4)]: id = 4 * column + row.

    A quarter of the work of `token_words`: four neighbouring ids share one counter.
    """
    counters = np.zeros((_LANES, -(-vocab_size // _LANES)), np.uint64)
    counters[0] = np.arange(counters.shape[1])
    counters[1] = position
    return philox4x32(counters, _key(seed))


def _key(seed: int) -> tuple[int, int]:
    assert 0 <= seed < 2**64, seed
    return seed & _MASK, seed >> 32


def gumbel_of_words(words: np.ndarray) -> np.ndarray:
    """Return the noise of 32-bit `words` (uint64, any shape), float64."""
    uniform = (words >> np.uint64(8)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-24
    for _ in range(2):
        np.log(uniform, out=uniform)
        np.negative(uniform, out=uniform)
    return uniform


def gumbel_of_word(word: int) -> float:
    """Return the noise of one 32-bit word, by scalar logarithms."""
    return -math.log(-math.log(((word >> 8) + 0.5) * 2.0**-24))
