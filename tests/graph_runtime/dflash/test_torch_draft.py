"""Drafts in plain torch: packs, what a block's slots see of each other, and bounds of a block."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import graph_runtime.dflash.torch_draft as torch_draft_module
from graph_runtime.dflash.draft import BlockWork, ContextLengths, checked_block_length
from graph_runtime.dflash.load import load_draft, load_fusion_module
from graph_runtime.dflash.torch_draft import BlockAttention, TorchBlockDraft, build_network
from graph_runtime.drafts.source import DraftSource
from splitspec.errors import UserError
from tests.dflash_layouts import DFlashWeights, random_weights, write_draft
from tests.dflash_reference import block_logits
from tests.graph_runtime.dflash.test_network import config_of

CONTEXT = 150
SLOTS = 6
WINDOW = 20
DRAFTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "odd sizes": (
        {"hidden": 84, "n_heads": 6, "intermediate": 151, "vocab_size": 301},
        {"block_size": 5},  # so that blocks begin anywhere in a tile
    ),
    "windows": ({}, {"sliding_windows": (WINDOW, WINDOW)}),
    "causal windows beside full layers": (
        {"n_layers": 3},
        {"sliding_windows": (WINDOW, None, WINDOW), "causal": (True, False, True)},
    ),
    "everything": (
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "head_dim": 32},
        {
            "sliding_windows": (7, 70),
            "sample_from_anchor": True,
            "embedding_scale": 8.0,
            "final_softcap": 3.0,
            "block_size": 7,
        },
    ),
    "real sizes": ({"hidden": 576, "n_heads": 9, "n_kv_heads": 3, "intermediate": 1536}, {}),
}


def weights_of(name: str, **sizes: Any) -> DFlashWeights:
    return random_weights(7, **{**DRAFTS[name][0], **sizes})


def make(
    name: str = "plain",
    *,
    block_length: int | None = None,
    dtype: torch.dtype = torch.float32,
    sizes: dict[str, Any] | None = None,
    **changes: Any,
) -> TorchBlockDraft:
    weights = weights_of(name, **(sizes or {}))
    config = config_of(weights, **{**DRAFTS[name][1], **changes})
    length = checked_block_length(config, block_length)
    network = build_network(
        config,
        block_length=length,
        max_context_length=CONTEXT,
        slot_count=SLOTS,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    network.load_state_dict(weights.tensors)
    lengths = ContextLengths(SLOTS, CONTEXT, config.max_draft_count(length))
    return TorchBlockDraft(
        network, block_length=length, lengths=lengths, model_hash="abc", target_ids=None
    )


def attentions(draft: TorchBlockDraft) -> list[BlockAttention]:
    return [m for m in draft._network.modules() if isinstance(m, BlockAttention)]


def spoil(draft: TorchBlockDraft, value: float = float("nan")) -> None:
    """Fill the caches with `value`: what earlier sessions may have left."""
    for attention in attentions(draft):
        attention.cache.k.fill_(value)
        attention.cache.v.fill_(value)


def most(draft: TorchBlockDraft) -> int:
    """Return the largest K of a block."""
    return draft.config.max_draft_count(draft.block_length)


class Session:
    """What one session feeds a draft with: the tokens and features of all positions."""

    def __init__(self, draft: TorchBlockDraft, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (CONTEXT, draft.config.hidden_size)
        self.tokens = torch.randint(0, 300, (CONTEXT + 1,), generator=generator).tolist()
        self.features = torch.randn(shape, generator=generator)

    def work(self, slot: int, start: int, end: int, draft_count: int = 0) -> BlockWork:
        """Return the work that takes the context from `start` to `end`."""
        return BlockWork(
            slot=slot,
            start=start,
            features=self.features[start:end] if end > start else None,
            pending_token_id=self.tokens[end],
            draft_count=draft_count,
        )


def fresh(draft: TorchBlockDraft, session: Session, end: int, draft_count: int) -> torch.Tensor:
    """Return the logits of a block after a context that comes whole, of a session alone."""
    draft.reset(0)
    (logits,) = draft.run([session.work(0, 0, end, draft_count)])
    return logits


@pytest.fixture(params=DRAFTS)
def draft(request: pytest.FixtureRequest) -> TorchBlockDraft:
    return make(request.param)


def test_k1_k5_a_session_s_bits_depend_on_no_other_work_of_the_pack(draft: TorchBlockDraft) -> None:
    """Packs of one to five sessions of other lengths, in any order, some of them only extending."""
    sessions = [Session(draft, seed) for seed in range(5)]
    alone: dict[tuple[int, int], torch.Tensor] = {}
    rng = random.Random(5)
    spoil(draft)
    done = [0] * 5
    while min(done) < 90:
        pending = [i for i in range(5) if done[i] < 90]
        order = rng.sample(pending, rng.randint(1, len(pending)))
        works = []
        for i in order:
            end = min(90, done[i] + rng.choice((0, 1, 1, 2, 5, 8, 9, 30)))
            works.append(sessions[i].work(1 + i, done[i], end, rng.randint(0, most(draft))))
        for i, work, logits in zip(order, works, draft.run(works), strict=True):
            done[i] = work.length
            key = i, work.length
            if key not in alone:
                alone[key] = fresh(draft, sessions[i], work.length, most(draft))
            assert logits.shape == (work.draft_count, draft.config.draft_vocab_size)
            assert logits.isfinite().all()
            assert torch.equal(logits, alone[key][: work.draft_count]), (work, order)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("name", ["real sizes", "everything"])
def test_k5_packs_and_single_sessions_have_the_same_bits_with_several_threads(
    name: str, threads: int
) -> None:
    draft = make(name, block_length=5)
    sessions = [Session(draft, seed) for seed in range(5)]
    works = [s.work(1 + i, 0, 13 * i, most(draft)) for i, s in enumerate(sessions)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        packed = draft.run(works[::-1])[::-1]
        alone = [fresh(draft, s, 13 * i, most(draft)) for i, s in enumerate(sessions)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(packed, alone, strict=True))


def test_another_session_s_rows_tokens_and_length_change_nothing() -> None:
    """Bit for bit, wherever the others stand in the pack; its own pending token changes all."""
    draft = make("causal windows beside full layers")
    mine = Session(draft, 1)
    expected = fresh(draft, mine, 70, 7)
    for seed, lengths in enumerate(((3,), (70, 0), (64, 1, 150), (21, 20, 19, 18))):
        for place in range(len(lengths) + 1):
            for slot in range(SLOTS):
                draft.reset(slot)
            others = [
                Session(draft, 10 * seed + i + 2).work(i + 1, 0, length, (3 * i + 7) % 8)
                for i, length in enumerate(lengths)
            ]
            works = [*others[:place], mine.work(0, 0, 70, 7), *others[place:]]
            assert torch.equal(draft.run(works)[place], expected), (lengths, place)
    mine.tokens[70] = (mine.tokens[70] + 1) % 300
    changed = fresh(draft, mine, 70, 7)
    assert (changed - expected).abs().amax(dim=1).min() > 0


def test_a_session_of_nan_spoils_no_other_and_leaves_nothing_in_its_slot() -> None:
    draft = make("windows")
    healthy, sick = Session(draft, 1), Session(draft, 2)
    sick.features.fill_(float("nan"))
    expected = {end: fresh(draft, healthy, end, 7) for end in (50, 51, 58, 100)}
    draft.reset(0)
    for start, end in ((0, 50), (50, 51), (51, 58), (58, 100)):
        outputs = draft.run([sick.work(1, start, end, 7), healthy.work(0, start, end, 7)])
        assert outputs[0].isnan().all()
        assert torch.equal(outputs[1], expected[end])
    draft.reset(1)
    for start, end in ((0, 50), (50, 58)):
        assert torch.equal(draft.run([healthy.work(1, start, end, 7)])[0], expected[end])


def with_tokens(
    monkeypatch: pytest.MonkeyPatch,
    draft: TorchBlockDraft,
    session: Session,
    end: int,
    tokens: Sequence[int],
) -> torch.Tensor:
    """Return the logits of a block that holds `tokens`."""
    with monkeypatch.context() as patch:
        patch.setattr(torch_draft_module, "block_tokens", lambda *_: list(tokens))
        return fresh(draft, session, end, most(draft))


@pytest.mark.parametrize(
    ("windows", "causal", "earlier_see"),
    [
        ((None, None), (False, False), True),
        ((WINDOW, WINDOW), (False, False), True),
        ((WINDOW, None), (True, False), True),
        ((WINDOW, WINDOW), (True, True), False),
    ],
)
def test_d7_a_later_slot_s_token_reaches_earlier_slots_unless_every_layer_is_causal(
    monkeypatch: pytest.MonkeyPatch,
    windows: tuple[int | None, ...],
    causal: tuple[bool, ...],
    earlier_see: bool,
) -> None:
    draft = make(sliding_windows=windows, causal=causal, sample_from_anchor=True)
    session = Session(draft, 1)
    block = [session.tokens[70]] + [16] * 7
    expected = fresh(draft, session, 70, 8)
    assert torch.equal(with_tokens(monkeypatch, draft, session, 70, block), expected)
    for j in range(1, 8):
        changed = [*block[:j], 99, *block[j + 1 :]]
        logits = with_tokens(monkeypatch, draft, session, 70, changed)
        moved = (logits != expected).any(dim=1).tolist()
        assert moved == [earlier_see] * j + [True] * (8 - j), j
        reference = reference_of(draft, session, 70, tokens=changed)
        torch.testing.assert_close(logits.double(), reference, atol=2e-5, rtol=0)


def reference_of(
    draft: TorchBlockDraft, session: Session, end: int, name: str = "plain", **changes: Any
) -> torch.Tensor:
    """Return the logits [B, Vd] of every slot, longhand."""
    config = draft.config
    arguments: dict[str, Any] = {
        "features": session.features[:end],
        "pending": session.tokens[end],
        "block_length": draft.block_length,
        "mask_token_id": config.mask_token_id,
        "windows": config.sliding_windows,
        "causal": config.causal,
        "embedding_scale": config.embedding_scale,
        "softcap": config.final_softcap,
    }
    return block_logits(weights_of(name), **(arguments | changes))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 64, 70, 84, 85])
def test_d7_a_window_is_measured_from_the_end_of_context_and_alike_for_every_slot(
    length: int, causal: bool
) -> None:
    """A position is seen by all slots of the block or by none, and w of them are seen.

    In a draft of one layer: further ones pass on what another slot saw.
    """
    draft = make(
        sizes={"n_layers": 1},
        sliding_windows=(WINDOW,),
        causal=(causal,),
        sample_from_anchor=True,
    )
    session = Session(draft, 1)
    expected = in_steps(draft, session, length)
    edge = length - WINDOW
    for position in (0, edge - 1, edge, edge + 1, edge + 7, length - 1):
        if not 0 <= position < length:
            continue
        changed = Session(draft, 1)
        changed.features[position] += 1.0
        moved = (in_steps(draft, changed, length) != expected).any(dim=1)
        assert moved.tolist() == [position >= edge] * 8, position


def in_steps(draft: TorchBlockDraft, session: Session, end: int) -> torch.Tensor:
    """Return a block's logits after a context that came in steps too small to leave rows out."""
    draft.reset(0)
    for start in range(0, end, 5):
        draft.run([session.work(0, start, min(start + 5, end))])
    (logits,) = draft.run([session.work(0, end, end, most(draft))])
    return logits


def test_d7_slot_0_decides_nothing_unless_the_draft_samples_from_the_anchor() -> None:
    draft, anchored = make(), make(sample_from_anchor=True)
    session = Session(draft, 1)
    slots = reference_of(draft, session, 40)
    assert (most(draft), most(anchored)) == (7, 8)
    logits, with_anchor = fresh(draft, session, 40, 7), fresh(anchored, session, 40, 8)
    torch.testing.assert_close(logits.double(), slots[1:], atol=2e-5, rtol=0)
    torch.testing.assert_close(with_anchor.double(), slots, atol=2e-5, rtol=0)
    assert torch.equal(with_anchor[1:], logits)
    with pytest.raises(ValueError, match=r"draft count 8; the block drafts 0\.\.7"):
        draft.run([session.work(1, 0, 40, 8)])
    with pytest.raises(ValueError, match=r"draft count 9; the block drafts 0\.\.8"):
        anchored.run([session.work(1, 0, 40, 9)])


def test_only_the_slots_that_are_asked_for_go_through_the_head() -> None:
    draft = make()
    session = Session(draft, 1)
    rows: list[int] = []
    draft._network.lm_head.register_forward_hook(lambda _m, _i, output: rows.append(len(output)))
    draft.run([session.work(slot, 0, 30, count) for slot, count in enumerate((3, 0, 5, 1, 7))])
    assert rows == [8, 8]  # 16 rows in two tiles, of 32 slots that drafted
    draft.run([session.work(5, 0, 30, 0)])
    assert rows == [8, 8]


def test_a_pack_runs_each_linear_over_the_rows_of_all_its_blocks() -> None:
    """Three blocks of five slots are two tiles, not three."""
    draft = make(block_length=5)
    session = Session(draft, 1)
    tiles: list[int] = []
    q_proj = draft._network.layers[0].self_attn.q_proj
    q_proj.register_forward_hook(lambda _m, _i, output: tiles.append(len(output)))
    draft.run([session.work(slot, 0, 30, 4) for slot in range(3)])
    assert tiles == [8, 8]


@pytest.mark.parametrize("count", range(1, 8))
def test_d2_each_layer_runs_once_a_step_whatever_the_draft_count(count: int) -> None:
    draft = make()
    runs: list[int] = []
    for layer in draft._network.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda _m, _i, out: runs.append(len(out)))
    draft.run([Session(draft, 1).work(0, 0, 30, count)])
    assert runs == [8] * draft.config.n_layers


def test_a_block_trained_at_16_runs_at_8_as_a_block_of_8_and_not_as_half_of_16() -> None:
    """Slots see fewer masks, so that even the first ones differ from the longer block's."""
    long, short = make(block_size=16), make(block_size=16, block_length=8)
    session = Session(long, 1)
    assert (most(long), most(short)) == (15, 7)
    for length in (0, 1, 57, 63, 64, 130):
        logits = fresh(short, session, length, 7)
        expected = reference_of(short, session, length)
        torch.testing.assert_close(logits.double(), expected[1:], atol=2e-5, rtol=0)
        whole = fresh(long, session, length, 15)
        expected = reference_of(long, session, length)
        torch.testing.assert_close(whole.double(), expected[1:], atol=2e-5, rtol=0)
        assert (whole[:7] - logits).abs().amax(dim=1).min() > 1e-3


def test_d19_a_block_longer_than_the_trained_one_is_refused_and_both_are_named() -> None:
    config = config_of(random_weights(3), block_size=8)
    assert [checked_block_length(config, length) for length in (None, 2, 7, 8)] == [8, 2, 7, 8]
    for length in (16, 9, 1, 0, -1):
        with pytest.raises(UserError, match=rf"--block-length is {length}; expected 2 to 8"):
            checked_block_length(config, length)


@pytest.mark.parametrize("name", ["windows", "causal windows beside full layers"])
def test_sliding_layers_run_as_full_attention_would_be_another_draft(name: str) -> None:
    draft = make(name)
    session = Session(draft, 1)
    for length in (WINDOW, WINDOW + 1, 70):
        logits = fresh(draft, session, length, 7).double()
        right = reference_of(draft, session, length, name)[1:]
        full = reference_of(draft, session, length, name, windows=None)[1:]
        torch.testing.assert_close(logits, right, atol=2e-5, rtol=0)
        hidden = length > WINDOW
        assert ((logits - full).abs().max() > 1e-3) == hidden, length


def test_a_pending_token_that_is_the_mask_id_is_a_token_like_any_other() -> None:
    """The block is then masks only; it stands where it stands, and drafts."""
    draft = make()
    session = Session(draft, 1)
    session.tokens = [16] * (CONTEXT + 1)
    for length in (0, 1, 30, 64, 100):
        logits = fresh(draft, session, length, 7)
        expected = reference_of(draft, session, length)
        torch.testing.assert_close(logits.double(), expected[1:], atol=2e-5, rtol=0)
        (slot_2,) = draft.run([session.work(0, length, length, 2)])
        assert torch.equal(slot_2, logits[:2])


def test_features_of_a_narrower_weight_are_rounded_and_logits_stay_float32() -> None:
    exact = make(sizes={"logit_scale": 0.1})
    narrow = make(sizes={"logit_scale": 0.1}, dtype=torch.bfloat16)
    session = Session(exact, 1)
    rows = torch.randn(3, 192, generator=torch.Generator().manual_seed(1))
    assert torch.equal(narrow.fuse(rows), exact.fuse(rows))
    expected, logits = (fresh(draft, session, 70, 7) for draft in (exact, narrow))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=0.2, rtol=0)
    assert not torch.equal(logits, expected)
    others = [Session(narrow, seed).work(seed, 0, 20 * seed, 5) for seed in (2, 3)]
    narrow.reset(0)
    packed = narrow.run([others[0], session.work(0, 0, 70, 7), others[1]])
    assert torch.equal(packed[1], logits)


def test_a_draft_says_what_it_is(tmp_path: Path) -> None:
    weights = random_weights(7, draft_vocab_size=100)
    folder = write_draft(tmp_path / "d", weights, layout="speculators", own_embeddings=True)
    draft, checkpoint = load(DraftSource(folder=folder, embeddings="own"), tmp_path)
    assert draft.config == checkpoint.config
    assert draft.block_length == draft.config.block_size == 8
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
        ({"block_length": 9}, "--block-length is 9; expected 2 to 8, the block_size that the"),
        ({"block_length": 1}, "--block-length is 1; expected 2 to 8, the block_size that the"),
    ],
)
def test_an_argument_that_no_runtime_takes_is_an_error(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_draft(tmp_path / "d", random_weights(7), own_embeddings=True)
    with pytest.raises(UserError, match=message):
        load(DraftSource(folder=folder, embeddings="own"), tmp_path, **changes)


def test_bfloat16_weights_load_from_files_and_leave_the_fusion_in_float32(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "d", random_weights(7), own_embeddings=True)
    source = DraftSource(folder=folder, embeddings="own")
    narrow, _ = load(source, tmp_path, precision="bf16")
    exact, _ = load(source, tmp_path)
    assert {p.dtype for p in narrow._network.parameters()} == {torch.bfloat16, torch.float32}
    rows = torch.randn(11, 192, generator=torch.Generator().manual_seed(1))
    assert torch.equal(narrow.fuse(rows), exact.fuse(rows))
    _, _, fusion = load_fusion_module(source, tmp_path)
    assert torch.equal(fusion(rows), exact.fuse(rows))


def load(source: DraftSource, cache_dir: Path, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "block_length": None,
        "runtime": "torch",
        "precision": "fp32",
        "cache_dir": cache_dir,
        "max_context_length": 64,
        "slot_count": 1,
        "threads": None,
    }
    return load_draft(source, **(arguments | changes))
