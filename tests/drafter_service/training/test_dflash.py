"""DFlash's recipe: the maths that is served, a loss that stops at the turn's end, and learning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from drafter_service.training.batches import Batch
from drafter_service.training.dflash import DFlashRecipe
from drafter_service.training.dflash_settings import DFlashSettings
from drafter_service.training.target import TrainingTarget, load_training_target
from drafter_service.training.walk import acceptance, taus
from graph_runtime.dflash.draft import BlockWork
from graph_runtime.dflash.load import load_torch_draft
from graph_runtime.dflash.torch_draft import TorchBlockDraft
from graph_runtime.drafts.source import DraftSource
from tests.dflash_layouts import DFlashWeights
from tests.dflash_reference import block_logits
from tests.tiny import write_tiny_model

ROWS, LENGTH, TAPS, BLOCK, MASK = 24, 64, (0, 1, 3), 8, 7
TAP_RMS = torch.tensor([0.5, 2.0, 4.0])
"""Powers of two: dividing by them, and rounding to bf16 after it, loses nothing."""
SETTINGS = DFlashSettings(
    tap_layers=TAPS, n_layers=2, block_size=BLOCK, mask_token_id=MASK, anchor_count=12
)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A tiny target, its own text, and a draft before and after training on it."""

    folder: Path
    target: TrainingTarget
    batch: Batch
    recipe: DFlashRecipe
    untrained: Mapping[str, torch.Tensor]
    losses: list[float]

    @property
    def rounded(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters as a checkpoint keeps them."""
        return {name: p.detach().bfloat16().float() for name, p in self.recipe.parameters.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """Train for a few seconds on one thread, so that the result is the same on every machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = write_tiny_model(tmp_path_factory.mktemp("target"), logit_scale=0.2)
    target = load_training_target(folder, device="cpu", precision="fp32", cache_dir=folder)
    batch = own_text(target)
    torch.manual_seed(0)
    recipe = DFlashRecipe(target, SETTINGS, tokens=batch.tokens[:2], seed=1)
    untrained = {name: p.detach().clone() for name, p in recipe.parameters.items()}
    optimizer = torch.optim.AdamW(recipe.parameters.values(), lr=3e-3, weight_decay=0.0)
    losses = []
    for _ in range(90):
        loss = recipe.loss(batch).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    yield Trained(
        folder=folder,
        target=target,
        batch=batch,
        recipe=recipe,
        untrained=untrained,
        losses=losses,
    )
    torch.set_num_threads(threads)


def own_text(target: TrainingTarget) -> Batch:
    """Return rows that the target continued greedily: two turns each, of several lengths."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(target.config.vocab_size, (ROWS, 6), generator=generator)
    roles = torch.zeros(ROWS, LENGTH, dtype=torch.uint8)
    for row in range(ROWS):
        end = 30 + row % 9
        roles[row, 6:end] = 1
        roles[row, end + 4 :] = 1
    for place in range(6, LENGTH):
        _, final = target.forward(tokens, (0,))
        chosen = target.logits(final[:, -1]).argmax(-1)
        given = torch.randint(target.config.vocab_size, (ROWS,), generator=generator)
        chosen = torch.where(roles[:, place] == 1, chosen, given)
        tokens = torch.cat((tokens, chosen[:, None]), dim=1)
    taps, final = target.forward(tokens, TAPS)
    return Batch(
        tokens=tokens,
        roles=roles,
        features=taps / TAP_RMS[:, None],
        final=final,
        likeliest=target.logits(final).argmax(-1),
    )


def test_training_lowers_the_loss_and_raises_tau(trained: Trained) -> None:
    assert sum(trained.losses[-10:]) < 0.85 * sum(trained.losses[:10])
    before, after = (
        taus(acceptance(trained.recipe.accepted(parameters, trained.batch), trained.batch.roles))
        for parameters in (trained.untrained, trained.rounded)
    )
    assert after["7"] > before["7"] + 0.3
    assert after["3"] <= after["5"] <= after["7"]


def test_every_parameter_is_trained(trained: Trained) -> None:
    for name, parameter in trained.recipe.parameters.items():
        assert not torch.equal(parameter, trained.untrained[name]), name


def test_a_block_is_what_a_longhand_float64_draft_computes(trained: Trained) -> None:
    recipe, batch = trained.recipe, trained.batch
    weights = longhand(trained)
    row, anchor = 3, 41
    anchors = torch.full((ROWS, 1), anchor)
    hidden = recipe.hidden(recipe.parameters, batch, anchors, recipe._eager_attention)
    given = hidden[row, 0] @ trained.target.head_weight.t()
    raw = batch.features[row, :anchor].flatten(1).double()
    projected = raw @ weights.tensors["fusion.fc.weight"].double().T
    size = ((projected * projected).mean(1, keepdim=True) + 1e-5).sqrt()
    wanted = block_logits(
        weights,
        features=projected / size * weights.tensors["fusion.norm.weight"].double(),
        pending=int(batch.tokens[row, anchor]),
        block_length=BLOCK,
        mask_token_id=MASK,
    )
    torch.testing.assert_close(given.double(), wanted, rtol=0, atol=1e-4)


def longhand(trained: Trained) -> DFlashWeights:
    """Return the trained draft under the names of the longhand reference."""
    config = trained.target.config
    tensors = {name: p.detach() for name, p in trained.recipe.parameters.items()}
    tensors["fusion.fc.weight"] = tensors.pop("fc.weight")
    tensors["fusion.norm.weight"] = tensors.pop("hidden_norm.weight")
    tensors["embed_tokens.weight"] = trained.target.embed_weight
    tensors["lm_head.weight"] = trained.target.head_weight
    return DFlashWeights(
        tensors=tensors,
        target_ids=None,
        vocab_size=config.vocab_size,
        hidden=config.hidden_size,
        target_hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        n_layers=SETTINGS.n_layers,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        n_taps=len(TAPS),
    )


def served(trained: Trained, folder: Path) -> TorchBlockDraft:
    """Return the published draft as the drafter loads it."""
    recipe = trained.recipe
    recipe.publish(folder / "draft", trained.rounded, tap_rms=TAP_RMS, model_card="card\n")
    draft, _ = load_torch_draft(
        DraftSource(folder=folder / "draft", target=trained.folder),
        block_length=None,
        precision="fp32",
        cache_dir=folder,
        max_context_length=LENGTH + BLOCK,
        slot_count=1,
        threads=None,
    )
    return draft


def raw_rows(batch: Batch, row: int) -> torch.Tensor:
    """Return what the verifier sends of a row: [S, T * H] taps side by side."""
    return (batch.features[row] * TAP_RMS[:, None]).flatten(1)


def test_the_published_draft_gives_the_recipes_logits(trained: Trained, tmp_path: Path) -> None:
    draft, recipe, batch = served(trained, tmp_path), trained.recipe, trained.batch
    anchors = torch.tensor([[20, 33, 56]]).expand(ROWS, -1)
    hidden = recipe.hidden(trained.rounded, batch, anchors, recipe._eager_attention)
    wanted = hidden[2, :, 1:] @ trained.target.head_weight.t()
    features = draft.fuse(raw_rows(batch, 2))
    for i, anchor in enumerate(anchors[2].tolist()):
        draft.reset(0)
        (logits,) = draft.run([
            BlockWork(
                slot=0,
                start=0,
                features=features[:anchor],
                pending_token_id=int(batch.tokens[2, anchor]),
                draft_count=BLOCK - 1,
            )
        ])  # fmt: skip
        torch.testing.assert_close(logits, wanted[i], rtol=0, atol=1e-5)


def test_accepted_is_what_sequential_decoding_with_the_served_draft_accepts(
    trained: Trained, tmp_path: Path
) -> None:
    draft, batch = served(trained, tmp_path), trained.batch
    accepted = trained.recipe.accepted(trained.rounded, batch)
    seen = set()
    tokens = rounds = 0
    for row in range(ROWS):
        draft.reset(0)
        features = draft.fuse(raw_rows(batch, row))
        committed, text = 0, batch.tokens[row].tolist()
        pending = 30 + row % 9 + 4  # the second turn's first token: its prefill bonus
        while pending + BLOCK - 1 < LENGTH:
            (logits,) = draft.run([
                BlockWork(
                    slot=0,
                    start=committed,
                    features=features[committed:pending],
                    pending_token_id=text[pending],
                    draft_count=BLOCK - 1,
                )
            ])  # fmt: skip
            drafted = logits.argmax(-1).tolist()
            stands = 0
            while stands < len(drafted) and drafted[stands] == text[pending + stands + 1]:
                stands += 1
            assert int(accepted[row, pending]) == stands, (row, pending)
            seen.add(stands)
            committed = pending
            emitted = min(stands + 1, LENGTH - 1 - pending)
            tokens, rounds, pending = tokens + emitted, rounds + 1, pending + emitted
    assert len(seen) >= 4, "a draft that is always or never right would show nothing"
    second = batch.roles.clone()
    for row in range(ROWS):
        second[row, : 30 + row % 9 + 4] = 0
    assert acceptance(accepted, second)[7] == (tokens, rounds)


def test_no_draft_stands_beyond_the_rows_end(trained: Trained) -> None:
    accepted = trained.recipe.accepted(trained.rounded, trained.batch)
    assert accepted.shape == (ROWS, LENGTH)
    for left in range(BLOCK):
        assert int(accepted[:, LENGTH - 1 - left].max()) <= left


def test_anchors_are_positions_of_the_assistant_with_room_for_a_block(trained: Trained) -> None:
    torch.manual_seed(3)
    roles = trained.batch.roles.clone()
    roles[0] = 0
    roles[1] = 0
    roles[1, [3, 25, 30, LENGTH - 1]] = 1
    seen: set[int] = set()
    for _ in range(20):
        anchors, drawn = trained.recipe._draw_anchors(roles)
        assert anchors.shape == (ROWS, SETTINGS.anchor_count)
        assert drawn.tolist() == [False] + [True] * (ROWS - 1)
        assert set(anchors[1].tolist()) == {25, 30}
        assert int(anchors.max()) <= LENGTH - BLOCK
        for row in range(2, ROWS):
            chosen = anchors[row].tolist()
            assert len(set(chosen)) == SETTINGS.anchor_count
            assert all(place >= 20 and roles[row, place] == 1 for place in chosen)
        seen.update(anchors[5].tolist())
    assert seen == {p for p in range(20, LENGTH - BLOCK + 1) if roles[5, p] == 1}


def test_the_loss_does_not_look_past_the_end_of_a_turn(trained: Trained) -> None:
    batch = trained.batch
    roles = batch.roles.clone()
    for row in range(ROWS):
        roles[row, 30 + row % 9 :] = 0  # one turn
    final, likeliest = batch.final.clone(), batch.likeliest.clone()
    for row in range(ROWS):
        # What the position of the turn's last token decides comes after the turn, too.
        final[row, 30 + row % 9 - 1 :] = 9.0
        likeliest[row, 30 + row % 9 - 1 :] = 0
    losses = []
    for changed in (batch, replace(batch, final=final, likeliest=likeliest)):
        torch.manual_seed(11)
        losses.append(trained.recipe.loss(replace(changed, roles=roles)))
    for field in ("total", "correct", "cross_entropy", "weight"):
        assert torch.equal(getattr(losses[0], field), getattr(losses[1], field)), field
    assert losses[0].weight[0] > losses[0].weight[-1] > 0


def test_the_loss_is_the_weighted_mean_of_its_slots(trained: Trained) -> None:
    torch.manual_seed(2)
    loss = trained.recipe.loss(trained.batch)
    weights = [2.718281828 ** (-slot / 4) for slot in range(BLOCK - 1)]
    entropy = sum(w * float(c) for w, c in zip(weights, loss.cross_entropy, strict=True))
    total = sum(w * float(c) for w, c in zip(weights, loss.weight, strict=True))
    assert loss.total.item() == pytest.approx(entropy / total, rel=1e-5)
    assert bool((loss.correct <= loss.weight).all())
    assert float(loss.correct[0]) > 0


def test_rows_without_an_anchor_weigh_nothing(trained: Trained) -> None:
    nobody = replace(trained.batch, roles=torch.zeros_like(trained.batch.roles))
    loss = trained.recipe.loss(nobody)
    assert loss.total.item() == 0.0
    assert float(loss.weight.sum()) == 0.0
