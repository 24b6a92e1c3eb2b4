"""The EAGLE-3 recipe against the draft as it is served (graph_runtime/eagle3)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from drafter_service.training.batches import Batch
from drafter_service.training.eagle3 import Eagle3Recipe, Eagle3Shape
from drafter_service.training.features import Features
from drafter_service.training.store import Rollouts
from drafter_service.training.target import TrainingTarget
from graph_runtime.eagle3.checkpoint import Eagle3Source
from graph_runtime.eagle3.draft import DraftSpan
from graph_runtime.eagle3.load import load_torch_draft
from graph_runtime.eagle3.torch_draft import TorchDraft
from tests.drafter_service.training.tiny_text import ROW_LENGTH, greedy_text, tiny_target

RMS = torch.tensor([0.5, 2.0])
"""Powers of two: folding them into fc rounds nothing."""
TAPS = (0, 2)
IDS = torch.arange(0, 300, 2)
"""Half of the target's vocabulary: the other half cannot be drafted."""
LAST = ROW_LENGTH - 8
"""The last position that 7 draft tokens fit behind."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A recipe with its parameters, and the draft that serves them."""

    recipe: Eagle3Recipe
    parameters: dict[str, torch.Tensor]
    draft: TorchDraft
    batch: Batch
    raw_rows: torch.Tensor
    """[R, S, T * H]: the target's taps as a verifier sends them."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TrainingTarget:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def text(target: TrainingTarget) -> Rollouts:
    return greedy_text(target)


@pytest.fixture(scope="module")
def pair(target: TrainingTarget, text: Rollouts, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return a recipe after some steps of plain SGD-like training, published and loaded."""
    recipe = make_recipe(target)
    features = Features(target, text, tap_layers=TAPS, gib=1.0, least_rows=8)
    features.tap_rms.copy_(RMS)
    features.load(text.training_rows)
    optimizer = torch.optim.AdamW(list(recipe.parameters.values()), lr=5e-3)
    for step in range(60):
        optimizer.zero_grad()
        places = (torch.arange(8) + 8 * step) % len(text.training_rows)
        recipe.loss(features.batch(places)).total.backward()
        optimizer.step()
    rounded = {n: p.detach().to(torch.bfloat16).float() for n, p in recipe.parameters.items()}
    folder = tmp_path_factory.mktemp("draft") / "draft"
    recipe.publish(folder, rounded, tap_rms=RMS, model_card="# A draft\n")
    source = Eagle3Source(folder=folder, target=target_folder(target, tmp_path_factory))
    draft, _ = load_torch_draft(
        source,
        precision="fp32",
        cache_dir=folder.parent,
        max_context_length=64,
        slot_count=1,
        threads=None,
    )
    (batch,) = features.batches(text.held_out_rows[:4])
    taps, _ = target.forward(batch.tokens, TAPS)
    return Pair(
        recipe=recipe,
        parameters=rounded,
        draft=draft,
        batch=batch,
        raw_rows=taps.flatten(2),
    )


def target_folder(target: TrainingTarget, factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the same model: same arguments and seed, same bytes."""
    folder = factory.mktemp("again")
    assert tiny_target(folder).model_hash == target.model_hash
    return folder


def make_recipe(target: TrainingTarget, *, unroll: int = 3) -> Eagle3Recipe:
    shape = Eagle3Shape(tap_layers=TAPS, target_ids=IDS, intermediate_size=40, unroll=unroll)
    return Eagle3Recipe(target, shape, seed=3, facts={})


def chain_logits(
    pair: Pair, row: int, pending: int, fed: list[int] | None, count: int
) -> list[torch.Tensor]:
    """Return the served draft's logits [Vd] of `count` chain steps behind a pending position.

    Args:
        pair: see there.
        row: of the batch.
        pending: position of the pending token.
        fed: tokens to feed instead of the draft's own; None: its own.
        count: steps.
    """
    tokens = pair.batch.tokens[row].tolist()
    pair.draft.reset(0)
    span = DraftSpan(
        slot=0,
        start=0,
        token_ids=tokens[1 : pending + 1],
        features=pair.draft.fuse(pair.raw_rows[row, :pending]),
    )
    found = []
    feature = pair.draft.run([span])
    for depth in range(count):
        found.append(pair.draft.logits(feature)[0])
        if depth + 1 < count:
            token = int(IDS[found[-1].argmax()]) if fed is None else fed[depth]
            span = DraftSpan(slot=0, start=pending + depth, token_ids=[token], features=feature)
            feature = pair.draft.run([span])
    return found


def test_accepted_is_what_a_sequential_chain_of_the_served_draft_accepts(pair: Pair) -> None:
    accepted = pair.recipe.accepted(pair.parameters, pair.batch)
    counts = []
    for row in range(len(pair.batch.tokens)):
        tokens = pair.batch.tokens[row].tolist()
        for pending in range(1, LAST + 1):
            drafted = [
                int(IDS[logits.argmax()]) for logits in chain_logits(pair, row, pending, None, 7)
            ]
            stood = 0
            while stood < 7 and drafted[stood] == tokens[pending + 1 + stood]:
                stood += 1
            counts.append(stood)
            assert int(accepted[row, pending]) == stood, (row, pending)
    assert {0, 7} <= set(counts), "trained weights draft some rounds right and some wrong"
    assert len(set(counts)) > 3, counts
    assert int(accepted[:, LAST + 1 :].sum()) == 0
    assert int(accepted[:, 0].sum()) == 0


def test_loss_is_the_longhand_cross_entropy_of_the_served_draft(
    pair: Pair, target: TrainingTarget
) -> None:
    recipe = make_recipe(target)
    for name, parameter in recipe.parameters.items():
        parameter.data.copy_(pair.parameters[name])
    batch = pair.batch
    loss = recipe.loss(batch)
    rows, length = batch.tokens.shape
    depths = 3
    sums = torch.zeros(depths, 3, dtype=torch.float64)  # correct, cross-entropy, weight
    teacher = target.logits(batch.final).double()
    for row in range(rows):
        tokens = batch.tokens[row].tolist()
        for chain in range(length - 1 - depths):
            fed = tokens[chain + 2 : chain + 2 + depths]
            steps = chain_logits(pair, row, chain + 1, fed, depths)
            for depth, logits in enumerate(steps):
                slot = chain + depth
                if slot < 20 or int(teacher[row, slot + 1].argmax()) % 2:
                    continue
                weight = 1.0 if batch.roles[row, slot + 2] == 1 else 0.2
                wanted = teacher[row, slot + 1, IDS]
                entropy = -(wanted.softmax(0) * logits.double().log_softmax(0)).sum()
                hit = weight * float(logits.argmax() == wanted.argmax())
                sums[depth] += torch.tensor([hit, weight * float(entropy), weight])
    expected = sum(0.8**d * sums[d, 1] / sums[d, 2] for d in range(depths))
    torch.testing.assert_close(loss.correct.double(), sums[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss.cross_entropy.double(), sums[:, 1], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(loss.weight.double(), sums[:, 2], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss.total.double(), expected, rtol=1e-5, atol=1e-5)


def test_every_parameter_gets_the_gradient_that_finite_differences_give(
    pair: Pair, target: TrainingTarget
) -> None:
    recipe = make_recipe(target)
    for name, parameter in recipe.parameters.items():
        parameter.data.copy_(pair.parameters[name])
    recipe.loss(pair.batch).total.backward()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in recipe.parameters.items():
        assert parameter.grad is not None, name
        direction = torch.randn(parameter.shape, generator=generator)
        direction *= parameter.grad.norm() / direction.norm()
        direction += parameter.grad  # so that the slope is well above the noise of float32
        slope = float((parameter.grad * direction).sum())
        step = 2e-3 / float(direction.norm())
        ends = []
        for sign in (1, -1):
            parameter.data.add_(direction, alpha=sign * step)
            ends.append(recipe.loss(pair.batch).total.item())
            parameter.data.add_(direction, alpha=-sign * step)
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=0.03), name


def test_what_the_draft_cannot_draft_or_the_user_wrote_weighs_less(
    pair: Pair, target: TrainingTarget
) -> None:
    recipe = make_recipe(target)
    whole = recipe.loss(pair.batch).weight
    user = pair.batch.roles.clone()
    user[:, 30:] = 0
    parts = {name: getattr(pair.batch, name) for name in ("tokens", "features", "final")}
    mixed = recipe.loss(Batch(roles=user, likeliest=pair.batch.likeliest, **parts)).weight
    odd = torch.full_like(pair.batch.likeliest, 5)
    none = recipe.loss(Batch(roles=pair.batch.roles, likeliest=odd, **parts))
    assert bool((mixed < whole).all())
    assert none.weight.tolist() == [0.0, 0.0, 0.0]
    assert none.total.item() == 0.0
