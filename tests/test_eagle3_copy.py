"""The synthetic pair by plain loops in float64: full attention, no cache, nothing of the product.

What holds here is a fact about the weights. The system tests then ask it of the services.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from tests.copy_reference import Weights, attention, choice, mlp, norm, read_double, run_target
from tests.copy_target import HIDDEN, VOCAB_SIZE
from tests.eagle3_copy import LOOK_BACK, write_copy_head, write_copy_target, write_random_head

PROMPT = [250]
"""Shorter than what is looked back at."""
TOKENS = 56


@dataclass
class Pair:
    """Both models' weights in float64."""

    target: Weights
    copy: Weights
    random: Weights


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    return Pair(
        read_double(write_copy_target(folder / "target")),
        read_double(write_copy_head(folder / "copy")),
        read_double(write_random_head(folder / "random")),
    )


def run_draft(
    weights: Weights, embedding: torch.Tensor, tokens: list[int], features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last slot's logits [Vd] and recurrent feature [H]; `features` are [N, H]."""
    e = norm(embedding[tokens], weights["midlayer.input_layernorm.weight"])
    f = norm(features, weights["midlayer.hidden_norm.weight"])
    r = features + attention(weights, "midlayer", torch.cat([e, f], dim=-1))
    h = r + mlp(weights, "midlayer", norm(r, weights["midlayer.post_attention_layernorm.weight"]))
    return norm(h[-1], weights["norm.weight"]) @ weights["lm_head.weight"].T, h[-1]


@dataclass
class Loop:
    """Speculative decoding by full recomputation, with a noise a position and target id."""

    pair: Pair
    head: Weights
    draft_count: int
    temperature: float = 0.0
    keeps_own_features: bool = False
    """Accepted tokens keep the draft's recurrent features: what E16 forbids."""
    lengths: list[int] = field(default_factory=list)

    def run(self) -> list[int]:
        """Return PROMPT and TOKENS more."""
        target = self.pair.target
        logits, rows = run_target(target, PROMPT)
        tokens = [*PROMPT, choice(logits[-1], len(PROMPT), self.temperature)]
        features = rows @ self.head["fc.weight"].T
        while len(tokens) < len(PROMPT) + TOKENS:
            drafts, own = self._drafts(tokens, features)
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
            fused = rows[start - 1 : start + accepted] @ self.head["fc.weight"].T
            if self.keeps_own_features:
                kept = min(accepted, len(own))
                fused[:kept] = own[:kept]
            features = torch.cat([features, fused])
            self.lengths.append(accepted + 1)
        return tokens[: len(PROMPT) + TOKENS]

    def _drafts(self, tokens: list[int], features: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """Return d1..dK and the recurrent features that the chain ran on, [K - 1, H]."""
        embedding = self.pair.target["model.embed_tokens.weight"]
        drafts: list[int] = []
        own = features[:0]
        for _ in range(self.draft_count):
            chain = torch.cat([features, own])
            logits, feature = run_draft(self.head, embedding, [*tokens, *drafts][1:], chain)
            ids = torch.arange(len(logits)) + self.head["d2t"]
            full = torch.full((VOCAB_SIZE,), -torch.inf).double()
            full[ids] = logits
            drafts.append(choice(full, len(tokens) + len(drafts), self.temperature))
            own = torch.cat([own, feature[None]])
        return drafts, own[:-1]


def _loops(pair: Pair, **fields: bool) -> Iterator[Loop]:
    for temperature in (0.0, 1.0):
        for draft_count in range(1, 8):
            yield Loop(pair, pair.copy, draft_count, temperature, **fields)


def _target_only(pair: Pair, temperature: float) -> list[int]:
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + TOKENS:
        tokens.append(choice(run_target(pair.target, tokens)[0][-1], len(tokens), temperature))
    return tokens


def test_the_next_token_depends_on_the_token_that_is_looked_back_at_and_on_no_other(
    pair: Pair,
) -> None:
    tokens = list(range(40, 40 + 300))
    before = run_target(pair.target, [t % VOCAB_SIZE for t in tokens])[0]
    for changed in (0, 3, 250):
        other = [t % VOCAB_SIZE for t in tokens]
        other[changed] = 5
        after = run_target(pair.target, other)[0]
        moved = (after - before).abs().amax(-1) > 1e-6
        expected = {changed, changed + LOOK_BACK}
        if changed == 0:  # position 0 stands in for what lies before it
            expected |= set(range(LOOK_BACK))
        assert set(moved.nonzero().flatten().tolist()) == expected


def test_no_id_outside_the_draft_vocabulary_can_be_chosen(pair: Pair) -> None:
    covered = torch.arange(len(pair.copy["d2t"])) + pair.copy["d2t"]
    outside = torch.ones(VOCAB_SIZE).bool()
    outside[covered] = False
    logits, _ = run_target(pair.target, [t % VOCAB_SIZE for t in range(300)])
    # 21 covers the noise of this system at temperature 1.
    assert (logits[:, covered].amax(-1) - logits[:, outside].amax(-1)).min() > 21


def test_the_copying_head_is_right_at_every_step_of_the_chain_greedy_and_coupled(
    pair: Pair,
) -> None:
    alone = {temperature: _target_only(pair, temperature) for temperature in (0.0, 1.0)}
    assert alone[0.0] != alone[1.0]
    for loop in _loops(pair):
        assert loop.run() == alone[loop.temperature]
        assert set(loop.lengths) == {loop.draft_count + 1}


def test_own_features_for_accepted_tokens_spoil_the_copying_head(pair: Pair) -> None:
    for loop in _loops(pair, keeps_own_features=True):
        loop.run()
        tau = sum(loop.lengths) / len(loop.lengths)
        if loop.draft_count == 1:  # a chain of one has no recurrent feature
            assert tau == 2
        else:
            assert tau < 0.9 * (loop.draft_count + 1), (loop.draft_count, loop.temperature)


def test_a_tap_before_or_after_layer_1_spoils_the_copying_head(pair: Pair) -> None:
    fc = pair.copy["fc.weight"]
    for shift in (-1, 1):
        head = {**pair.copy, "fc.weight": fc.roll(shift * HIDDEN, dims=1)}
        loop = Loop(pair, head, 3)
        loop.run()
        assert sum(loop.lengths) / len(loop.lengths) < 2.5


def test_the_random_head_is_hardly_ever_right(pair: Pair) -> None:
    loop = Loop(pair, pair.random, 4)
    assert loop.run() == _target_only(pair, 0.0)
    assert sum(loop.lengths) / len(loop.lengths) < 1.1
