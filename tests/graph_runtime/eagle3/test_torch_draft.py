"""Drafts in plain torch: packs, the rules of the cache (E20), and what never reaches a result."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from graph_runtime.eagle3.checkpoint import Eagle3Source
from graph_runtime.eagle3.draft import DraftLengths, DraftSpan
from graph_runtime.eagle3.load import load_draft
from graph_runtime.eagle3.torch_draft import TorchDraft, build_network
from splitspec.errors import UserError
from tests.eagle3_layouts import random_weights, write_draft
from tests.eagle3_reference import Maths, chain_logits
from tests.graph_runtime.eagle3.test_network import config_of

CONTEXT = 150
SLOTS = 12
DRAFTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "odd sizes": ({"hidden": 84, "n_heads": 6, "intermediate": 150, "vocab_size": 301}, {}),
    "window": ({}, {"sliding_window": 20}),
    "everything": (
        {"qk_norm": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "head_dim": 32},
        {"norm_before_residual": True, "post_norm_feedback": True},
    ),
    "real sizes": ({"hidden": 576, "n_heads": 9, "n_kv_heads": 3, "intermediate": 1536}, {}),
}


def make(name: str = "plain", dtype: torch.dtype = torch.float32, **sizes: Any) -> TorchDraft:
    options, changes = DRAFTS[name]
    weights = random_weights(7, **{**options, **sizes})
    network = build_network(
        config_of(weights, **changes),
        max_context_length=CONTEXT,
        slot_count=SLOTS,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    network.load_state_dict(weights.tensors)
    lengths = DraftLengths(SLOTS, CONTEXT)
    return TorchDraft(network, lengths=lengths, model_hash="abc", target_ids=None)


def spoil(draft: TorchDraft, value: float = float("nan")) -> None:
    """Fill the cache with `value`: what an earlier session may have left."""
    cache = draft._attention.cache
    cache.k.fill_(value)
    cache.v.fill_(value)


class Session:
    """What one session feeds a draft with: tokens and features of all positions."""

    def __init__(self, draft: TorchDraft, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 300, (CONTEXT,), generator=generator).tolist()
        self.features = torch.randn(CONTEXT, draft.config.hidden_size, generator=generator)

    def span(self, slot: int, start: int, end: int) -> DraftSpan:
        return DraftSpan(
            slot=slot,
            start=start,
            token_ids=self.tokens[start:end],
            features=self.features[start:end],
        )


@pytest.fixture(params=DRAFTS)
def draft(request: pytest.FixtureRequest) -> TorchDraft:
    return make(request.param)


def one_by_one(draft: TorchDraft, session: Session, slot: int, end: int) -> torch.Tensor:
    """Run a session alone, a slot a pass; return the features of all slots, [end, H]."""
    draft.reset(slot)
    return torch.cat([draft.run([session.span(slot, i, i + 1)]) for i in range(end)])


def test_a_session_s_bits_depend_on_no_other_span_of_the_pack(draft: TorchDraft) -> None:
    """Random packs of up to twelve sessions, in random order, of random widths."""
    sessions = [Session(draft, seed) for seed in range(SLOTS)]
    alone = [one_by_one(draft, session, 0, 80) for session in sessions]
    assert torch.stack(alone).isfinite().all()
    spoil(draft)
    for slot in range(SLOTS):
        draft.reset(slot)
    rng = random.Random(5)
    done = [0] * SLOTS
    while min(done) < 80:
        open_slots = [slot for slot in range(SLOTS) if done[slot] < 80]
        order = rng.sample(open_slots, rng.randint(1, len(open_slots)))
        ends = [min(80, done[slot] + rng.choice((1, 1, 2, 5, 8, 9, 30))) for slot in order]
        pack = [
            sessions[slot].span(slot, done[slot], end)
            for slot, end in zip(order, ends, strict=True)
        ]
        outputs = draft.run(pack)
        assert outputs.shape == (len(pack), draft.config.hidden_size)
        logits = draft.logits(outputs)
        for i, (slot, end) in enumerate(zip(order, ends, strict=True)):
            assert torch.equal(outputs[i], alone[slot][end - 1]), (slot, done[slot], end)
            assert torch.equal(logits[i], draft.logits(alone[slot][end - 1 : end])[0])
            done[slot] = end


def test_every_cut_of_a_seed_gives_the_same_bits(draft: TorchDraft) -> None:
    session = Session(draft, 1)
    expected = one_by_one(draft, session, 0, 140)[-1]
    for width in (2, 3, 7, 8, 9, 64, 65, 127, 140):
        spoil(draft)
        draft.reset(2)
        for start in range(0, 140, width):
            output = draft.run([session.span(2, start, min(start + width, 140))])
        assert torch.equal(output[0], expected), width


def test_rolled_back_slots_leave_no_trace(draft: TorchDraft) -> None:
    """Seven chain steps after every accepted prefix, overwritten by the true rows."""
    session = Session(draft, 1)
    expected = one_by_one(draft, session, 0, 100)
    draft.reset(0)
    start, accepted = 0, 3
    while start < 90:
        end = start + accepted
        feature = draft.run([session.span(0, start, end)])
        assert torch.equal(feature[0], expected[end - 1])
        for step in range(7):
            chain = DraftSpan(slot=0, start=end + step, token_ids=[step], features=feature)
            feature = draft.run([chain])
        start, accepted = end, 1 + (accepted + 2) % 8


def test_features_of_nan_reach_neither_another_slot_nor_the_same_one_after_a_reset(
    draft: TorchDraft,
) -> None:
    healthy, sick = Session(draft, 1), Session(draft, 2)
    expected = one_by_one(draft, healthy, 0, 100)
    sick.features.fill_(float("nan"))
    spoil(draft)
    draft.reset(0)
    for start, end in ((0, 50), (50, 51), (51, 58), (58, 100)):
        output = draft.run([sick.span(1, start, end), healthy.span(0, start, end)])
        assert output[0].isnan().all()
        assert torch.equal(output[1], expected[end - 1])
    draft.reset(1)
    for start, end in ((0, 3), (3, 70), (70, 71)):
        assert torch.equal(draft.run([healthy.span(1, start, end)])[0], expected[end - 1])
    sick.features[:90] = healthy.features[:90]
    sick.tokens = healthy.tokens
    draft.run([sick.span(1, 71, 95)])  # its last five slots are lost, and rolled back
    assert torch.equal(draft.run([healthy.span(1, 90, 91)])[0], expected[90])


def test_a_window_hides_slots_beyond_it_and_no_others() -> None:
    draft, session = make("window"), Session(make("window"), 1)
    expected = draft.run([session.span(0, 0, 70)])
    for position, hidden in ((0, True), (49, True), (50, False), (69, False)):
        changed = Session(draft, 1)
        changed.features[position] += 1.0
        draft.reset(0)
        output = draft.run([changed.span(0, 0, 70)])
        assert torch.equal(output, expected) == hidden, position


def test_a_packed_chain_is_the_longhand_one() -> None:
    """Nine sessions of other lengths step together: two tiles of last rows."""
    draft, weights = make(logit_scale=0.1), random_weights(7, logit_scale=0.1)
    sessions = [Session(draft, seed) for seed in range(9)]
    lengths = [1, 70, 8, 9, 64, 65, 30, 2, 63]
    pack = [s.span(i, 0, n) for i, (s, n) in enumerate(zip(sessions, lengths, strict=True))]
    steps = []
    for step in range(3):
        features = draft.run(pack)
        steps.append(draft.logits(features))
        pack = [
            DraftSpan(
                slot=i, start=n + step, token_ids=s.tokens[n + step : n + step + 1],
                features=features[i : i + 1],
            )
            for i, (s, n) in enumerate(zip(sessions, lengths, strict=True))
        ]  # fmt: skip
    for i, (session, length) in enumerate(zip(sessions, lengths, strict=True)):
        seed = session.features[:length]
        expected = chain_logits(weights, Maths(), session.tokens, seed, 3)
        logits = torch.stack([step[i] for step in steps]).double()
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def test_e20_a_gap_is_refused_and_nothing_of_the_pack_runs() -> None:
    draft = make()
    session = Session(draft, 1)
    draft.run([session.span(0, 0, 5)])
    before = draft._attention.cache.k.clone()
    with pytest.raises(ValueError, match="a write at 6 leaves a gap: 5 are valid"):
        draft.run([session.span(1, 0, 4), session.span(0, 6, 7)])
    assert torch.equal(draft._attention.cache.k, before)
    with pytest.raises(ValueError, match="a write at 1 leaves a gap: 0 are valid"):
        draft.run([session.span(1, 1, 2)])
    draft.run([session.span(0, 5, 6)])


def test_e20_after_a_rollback_stale_slots_are_no_prefix() -> None:
    draft = make()
    session = Session(draft, 1)
    expected = one_by_one(draft, session, 0, 30)
    draft.run([session.span(0, 10, 12)])  # back from 30 to 12
    for start in (13, 29, 30):
        with pytest.raises(ValueError, match=f"a write at {start} leaves a gap: 12 are valid"):
            draft.run([session.span(0, start, start + 1)])
    assert torch.equal(draft.run([session.span(0, 12, 20)])[0], expected[19])


def test_e20_one_pack_holds_a_slot_once() -> None:
    draft = make()
    session = Session(draft, 1)
    with pytest.raises(ValueError, match="slot 3 appears twice"):
        draft.run([session.span(3, 0, 2), session.span(1, 0, 2), session.span(3, 2, 4)])
    with pytest.raises(ValueError, match="0 tokens"):
        draft.run([session.span(0, 0, 0)])
    short = DraftSpan(slot=0, start=0, token_ids=[1, 2], features=session.features[:1])
    with pytest.raises(ValueError, match="2 tokens with 1 features"):
        draft.run([short])


def test_e20_a_reset_slot_is_empty_and_others_are_not() -> None:
    draft = make()
    session = Session(draft, 1)
    draft.run([session.span(0, 0, 5), session.span(1, 0, 5)])
    draft.reset(0)
    with pytest.raises(ValueError, match="a write at 5 leaves a gap: 0 are valid"):
        draft.run([session.span(0, 5, 6)])
    draft.run([session.span(1, 5, 6)])


def test_a_slot_is_filled_to_its_last_position_and_no_further() -> None:
    draft = make()
    session = Session(draft, 1)
    draft.run([session.span(0, 0, CONTEXT - 1)])
    assert draft.run([session.span(0, CONTEXT - 1, CONTEXT)]).isfinite().all()
    beyond = DraftSpan(slot=0, start=CONTEXT, token_ids=[1], features=session.features[:1])
    with pytest.raises(ValueError, match="a write ends at 151; the cache holds 150"):
        draft.run([beyond])


def test_bfloat16_weights_take_and_give_float32_and_leave_the_fusion_alone() -> None:
    exact, narrow = make(logit_scale=0.1), make(dtype=torch.bfloat16, logit_scale=0.1)
    session = Session(exact, 1)
    rows = torch.randn(3, 192, generator=torch.Generator().manual_seed(1))
    assert torch.equal(narrow.fuse(rows), exact.fuse(rows))
    expected, feature = (d.run([session.span(0, 0, 40)]) for d in (exact, narrow))
    assert feature.dtype == torch.float32
    logits = narrow.logits(feature)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, exact.logits(expected), atol=0.2, rtol=0)
    assert not torch.equal(logits, exact.logits(expected))


def test_a_draft_says_what_it_is(tmp_path: Path) -> None:
    weights = random_weights(7)
    folder = write_draft(tmp_path / "d", layout="specforge", weights=weights, embeddings=True)
    draft, checkpoint = load(Eagle3Source(folder=folder, embeddings="own"), tmp_path)
    assert draft.config == checkpoint.config
    assert draft.model_hash == checkpoint.model_hash
    assert draft.target_ids is not None
    assert draft.target_ids.tolist() == weights.target_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runtime": "onnx"}, "runtime is 'onnx'; expected executorch or torch"),
        ({"precision": "8da4w"}, r"precision is '8da4w'; --runtime torch has \['fp32', 'bf16'\]"),
        ({"device": "tpu"}, "device is 'tpu'; --runtime torch has cpu and cuda"),
        ({"runtime": "executorch", "device": "cuda"}, "--runtime executorch runs on cpu only"),
        ({"slot_count": 2**50}, "do not fit in the memory of cpu"),
    ],
)
def test_an_argument_that_no_runtime_takes_is_an_error(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    weights = random_weights(7)
    folder = write_draft(tmp_path / "d", layout="specforge", weights=weights, embeddings=True)
    with pytest.raises(UserError, match=message):
        load(Eagle3Source(folder=folder, embeddings="own"), tmp_path, **changes)


def load(source: Eagle3Source, cache_dir: Path, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "runtime": "torch",
        "precision": "fp32",
        "cache_dir": cache_dir,
        "max_context_length": 64,
        "slot_count": 1,
        "threads": None,
    }
    return load_draft(source, **(arguments | changes))
