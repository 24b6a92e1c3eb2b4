"""The planted pair by plain loops in float64: full attention, no cache, nothing of the product.

What holds here is a fact about the weights. The system tests then ask it of the services.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.copy_reference import Weights, choice, mlp, norm, read_double, run_target
from tests.copy_target import HEAD_DIM, HIDDEN, ROPE_THETA, VOCAB_SIZE
from tests.dflash_planted import (
    ANCHOR_BLOCK_SIZE,
    BLOCK_SIZE,
    LEAST_WINDOW,
    LOOK_BACK,
    MASK_TOKEN_ID,
    write_anchor_draft,
    write_planted_draft,
    write_planted_target,
    write_random_draft,
)

SHORT = [250]
"""Less than what is looked back at."""
PROMPT = random.Random(0).sample(range(3, VOCAB_SIZE), 12)
TOKENS = 56


@dataclass
class Pair:
    """All models' weights in float64."""

    target: Weights
    planted: Weights
    anchor: Weights
    random: Weights


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    return Pair(
        read_double(write_planted_target(folder / "target")),
        read_double(write_planted_draft(folder / "planted")),
        read_double(write_anchor_draft(folder / "anchor")),
        read_double(write_random_draft(folder / "random")),
    )


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate [N, heads, D] by its positions 0..N-1, half-split."""
    dimensions = x.shape[-1]
    angles = torch.arange(len(x)).double()[:, None] * ROPE_THETA ** (
        -torch.arange(0, dimensions, 2).double() / dimensions
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def run_block(
    weights: Weights, target: Weights, features: torch.Tensor, tokens: list[int], window: int
) -> torch.Tensor:
    """Return logits [B, V] of a block after features [P, H]; of context, `window` rows are seen."""
    x = target["model.embed_tokens.weight"][tokens]
    hidden = torch.arange(len(features) + len(tokens)) < len(features) - window
    for index in range(2):
        layer = f"layers.{index}"
        u = norm(x, weights[f"{layer}.input_layernorm.weight"])
        q, k, v = (
            (torch.cat([features, u]) @ weights[f"{layer}.self_attn.{n}_proj.weight"].T).view(
                len(features) + len(u), -1, weights[f"{layer}.self_attn.q_norm.weight"].shape[0]
            )
            for n in "qkv"
        )
        q, k = (
            rotated(norm(y, weights[f"{layer}.self_attn.{n}_norm.weight"]))
            for n, y in (("q", q), ("k", k))
        )
        groups = q.shape[1] // k.shape[1]
        k, v = (y.repeat_interleave(groups, 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[len(features) :], k) / k.shape[-1] ** 0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        x = x + mixed.flatten(1) @ weights[f"{layer}.self_attn.o_proj.weight"].T
        x = x + mlp(weights, layer, norm(x, weights[f"{layer}.post_attention_layernorm.weight"]))
    return norm(x, weights["norm.weight"]) @ target["lm_head.weight"].T


@dataclass
class Loop:
    """Speculative decoding by full recomputation, with a noise a position and target id."""

    pair: Pair
    draft: Weights
    draft_count: int
    temperature: float = 0.0
    from_anchor: bool = False
    window: int = 10_000
    block_length: int = BLOCK_SIZE
    prompt: list[int] = field(default_factory=lambda: PROMPT)
    lost_rows: int = 0
    """How many of the newest rows of a round are those of the position before."""
    lengths: list[int] = field(default_factory=list)

    def run(self) -> list[int]:
        """Return the prompt and TOKENS more."""
        target, end = self.pair.target, len(self.prompt) + TOKENS
        logits, rows = run_target(target, self.prompt)
        tokens = [*self.prompt, choice(logits[-1], len(self.prompt), self.temperature)]
        features = self._features(rows)
        while len(tokens) < end:
            drafts = self._drafts(tokens, features)
            start = len(tokens)
            logits, rows = run_target(target, [*tokens, *drafts])
            choices = [
                choice(row, start + i, self.temperature)
                for i, row in enumerate(logits[start - 1 :])
            ]
            accepted = next(
                (i for i, draft in enumerate(drafts) if draft != choices[i]), len(drafts)
            )
            tokens += [*drafts[:accepted], choices[accepted]]
            features = torch.cat([features, self._features(rows[start - 1 : start + accepted])])
            if self.lost_rows:
                features[-self.lost_rows :] = features[-1 - self.lost_rows]
            self.lengths.append(accepted + 1)
        return tokens[:end]

    def _features(self, rows: torch.Tensor) -> torch.Tensor:
        return norm(rows @ self.draft["fc.weight"].T, self.draft["hidden_norm.weight"])

    def _drafts(self, tokens: list[int], features: torch.Tensor) -> list[int]:
        block = [tokens[-1]] + [MASK_TOKEN_ID] * (self.block_length - 1)
        logits = run_block(self.draft, self.pair.target, features, block, self.window)
        first = 0 if self.from_anchor else 1
        wanted = logits[first : first + self.draft_count]
        return [choice(row, len(tokens) + i, self.temperature) for i, row in enumerate(wanted)]


def _loops(pair: Pair, draft: Weights, most: int, **fields: Any) -> Iterator[Loop]:
    for temperature in (0.0, 1.0):
        for draft_count in range(1, most + 1):
            yield Loop(pair, draft, draft_count, temperature, **fields)


def _target_only(pair: Pair, temperature: float, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + TOKENS:
        tokens.append(choice(run_target(pair.target, tokens)[0][-1], len(tokens), temperature))
    return tokens


def tau(loop: Loop) -> float:
    loop.run()
    return sum(loop.lengths) / len(loop.lengths)


def test_the_next_token_depends_on_the_token_that_is_looked_back_at_and_on_no_other(
    pair: Pair,
) -> None:
    tokens = [t % VOCAB_SIZE for t in range(40, 340)]
    before = run_target(pair.target, tokens)[0]
    for changed in (3, 250):
        other = list(tokens)
        other[changed] = 5
        after = run_target(pair.target, other)[0]
        moved = (after - before).abs().amax(-1) > 1e-3
        assert moved.nonzero().flatten().tolist() == [changed + LOOK_BACK]


@pytest.mark.parametrize("prompt", [PROMPT, SHORT])
def test_every_draft_of_every_k_is_right_greedy_and_coupled(pair: Pair, prompt: list[int]) -> None:
    alone = {temperature: _target_only(pair, temperature, prompt) for temperature in (0.0, 1.0)}
    assert alone[0.0] != alone[1.0]
    for loop in _loops(pair, pair.planted, BLOCK_SIZE - 1, prompt=prompt):
        assert loop.run() == alone[loop.temperature]
        assert set(loop.lengths) == {loop.draft_count + 1}


def test_every_draft_of_the_one_that_samples_from_the_anchor_is_right(pair: Pair) -> None:
    for loop in _loops(
        pair, pair.anchor, ANCHOR_BLOCK_SIZE, from_anchor=True, block_length=ANCHOR_BLOCK_SIZE
    ):
        loop.run()
        assert set(loop.lengths) == {loop.draft_count + 1}


def test_slots_read_one_off_between_the_two_conventions_spoil_both(pair: Pair) -> None:
    assert tau(Loop(pair, pair.planted, 3, 1.0, from_anchor=True)) < 1.5
    assert tau(Loop(pair, pair.anchor, 3, 1.0)) < 1.5


def test_the_least_window_that_serves_is_the_stated_one(pair: Pair) -> None:
    assert tau(Loop(pair, pair.planted, 7, 1.0, window=LEAST_WINDOW)) == 8
    assert tau(Loop(pair, pair.planted, 7, 1.0, window=LEAST_WINDOW - 1)) < 2.5


def test_newest_rows_that_are_another_positions_spoil_the_drafts_that_look_at_them(
    pair: Pair,
) -> None:
    assert tau(Loop(pair, pair.planted, 7, 1.0, lost_rows=1)) < 7.5
    assert tau(Loop(pair, pair.planted, 7, 1.0, lost_rows=3)) < 6


def test_a_tap_before_or_after_layer_1_spoils_the_drafts(pair: Pair) -> None:
    fc = pair.planted["fc.weight"]
    for shift in (-1, 1):
        draft = {**pair.planted, "fc.weight": fc.roll(shift * HIDDEN, dims=1)}
        assert tau(Loop(pair, draft, 5, 1.0)) < 1.5


def test_no_other_position_within_the_context_has_weight(pair: Pair) -> None:
    """512 positions before the slot and a block after it: what float32 adds up is the one value."""
    query, key = (pair.planted[f"layers.0.self_attn.{n}_norm.weight"] for n in "qk")
    positions = torch.arange(600).double()[:, None]
    angles = positions * ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    q, k = torch.complex(*query.chunk(2)), torch.complex(*key.chunk(2))
    turned = k * torch.polar(torch.ones_like(angles), angles)
    at = 512 + LOOK_BACK + 1
    scores = (turned[at] / k * q).conj() * turned
    weights = (scores.real.sum(-1) / HEAD_DIM**0.5)[: at + BLOCK_SIZE].softmax(-1)
    assert weights[512] > 1 - 1e-9


def test_the_random_draft_is_hardly_ever_right(pair: Pair) -> None:
    loop = Loop(pair, pair.random, 4)
    assert loop.run() == _target_only(pair, 0.0, PROMPT)
    assert sum(loop.lengths) / len(loop.lengths) < 1.2
