"""Philox4x32-10 against the published known answers and a plain Python reference; the bounds."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from graph_runtime.noise import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    GUMBEL_SPAN,
    gumbel_of_word,
    gumbel_of_words,
    philox4x32,
    position_words,
    token_words,
)

FULL = 0xFFFFFFFF
KNOWN_ANSWERS = [  # Random123, kat_vectors, "philox4x32 10"
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL,) * 4, (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def reference_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Compute Philox4x32-10 with unbounded Python integers."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b = (right // 2**32) ^ b ^ low, right % 2**32
        c, d = (left // 2**32) ^ d ^ high, left % 2**32
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return a, b, c, d


def reference_noise(seed: int, position: int, token_id: int) -> float:
    """Compute one token's noise from the generator's words, in scalar Python."""
    words = reference_philox((token_id // 4, position, 0, 0), (seed % 2**32, seed // 2**32))
    return -math.log(-math.log((words[token_id % 4] // 256 + 0.5) / 2**24))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_the_generator_gives_the_published_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    counters = np.array([counter, (0, 0, 0, 0), counter], np.uint64).T
    words = philox4x32(counters, key)
    assert words[:, 0].tolist() == list(expected)
    assert words[:, 2].tolist() == list(expected)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_the_reference_gives_the_published_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert reference_philox(counter, key) == expected


@pytest.mark.parametrize("count", [1, 7, 511, 512, 40_000])
def test_noise_equals_the_reference_for_any_index_tensor(count: int) -> None:
    generator = random.Random(count)
    seed = generator.getrandbits(64)
    positions = torch.tensor(sorted(generator.randrange(2**20) for _ in range(count)))
    token_ids = torch.tensor([generator.randrange(200_000) for _ in range(count)])
    noise = gumbel_of_words(token_words(seed, positions.numpy(), token_ids.numpy()))
    assert noise.dtype == np.float64
    for index in generator.sample(range(count), min(count, 400)):
        expected = reference_noise(seed, int(positions[index]), int(token_ids[index]))
        assert float(noise[index]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_every_bit_of_the_seed_counts_and_extremes_are_taken(seed: int) -> None:
    token_ids = np.arange(8)
    words = token_words(seed, np.full(8, 2**31 - 1), token_ids).tolist()
    key = (seed % 2**32, seed // 2**32)
    expected = [reference_philox((i // 4, 2**31 - 1, 0, 0), key)[i % 4] for i in range(8)]
    assert words == expected


@pytest.mark.parametrize("vocab_size", [1, 4, 5, 5000])
def test_V8_words_of_a_token_do_not_depend_on_which_tokens_are_asked_for_with_it(
    vocab_size: int,
) -> None:
    every = position_words(9, 5, vocab_size)
    assert every.shape == (4, (vocab_size + 3) // 4)
    some = np.array([token for token in (0, 3, 4, 9, 4321) if token < vocab_size])
    words = token_words(9, np.full(some.size, 5), some)
    assert words.tolist() == every[some % 4, some // 4].tolist()


def test_the_bounds_are_the_noise_of_the_smallest_and_the_largest_word() -> None:
    assert gumbel_of_word(FULL) == pytest.approx(GUMBEL_MAX, rel=1e-9)
    assert gumbel_of_word(0) == pytest.approx(GUMBEL_MIN, rel=1e-9)
    assert gumbel_of_word(FULL) - gumbel_of_word(0) <= GUMBEL_SPAN
    assert 20.18 < GUMBEL_SPAN < 20.19


def test_noise_has_the_mean_and_variance_of_the_gumbel_law() -> None:
    token_ids = np.arange(200_000)
    noise = gumbel_of_words(token_words(123, np.full(200_000, 3), token_ids))
    assert float(noise.mean()) == pytest.approx(0.5772156649, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
