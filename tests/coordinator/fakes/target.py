"""A deterministic target: the next token is a hash of all tokens before it, and of the seed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

VOCAB_SIZE = 300
FIRST_TOKEN = 3
"""Ids below are special tokens of the tiny tokenizer; the target never says them."""
WIDTH = 2
"""Elements of one fake row: position and token id as float32."""


def next_token(prefix: Sequence[int], seed: int | None) -> int:
    """Return the token after `prefix`; `seed` is None when greedy."""
    state = zlib.crc32(struct.pack(f"<{len(prefix)}I", *prefix), (seed or 0) & 0xFFFFFFFF)
    return FIRST_TOKEN + state % (VOCAB_SIZE - FIRST_TOKEN)


def continuation(prompt: Sequence[int], seed: int | None, count: int) -> list[int]:
    """Return what the target alone writes after `prompt`, one token at a time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def row_bytes(tokens: Sequence[int], start: int) -> bytes:
    """Return fake rows of `tokens` at positions `start`, `start` + 1, ..."""
    values = [float(v) for i, token in enumerate(tokens) for v in (start + i, token)]
    return struct.pack(f"<{len(values)}f", *values)
