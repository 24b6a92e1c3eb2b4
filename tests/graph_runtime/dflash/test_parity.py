"""Drafts in plain torch against a longhand recomputation: from files, every layout and variant."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from graph_runtime.dflash.draft import BlockDraft, BlockWork
from graph_runtime.dflash.load import load_draft, load_fusion_module
from graph_runtime.drafts.source import DraftSource
from splitspec.errors import UserError
from tests.dflash_layouts import (
    FULL,
    LAYOUTS,
    SLIDING,
    DFlashWeights,
    random_weights,
    write_draft,
)
from tests.dflash_reference import block_logits, fused
from tests.graph_runtime.eagle3.test_parity import reference_rows, target_rows
from tests.tiny import write_tiny_model

WINDOW = 20
LENGTHS = (0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 63, 64, 65, 64 + WINDOW, 65 + WINDOW, 140)
"""Of contexts: where windows start to hide and blocks of 64 positions end."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "final_logit_softcapping": 1.5,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is written, and what the published architecture computes of it."""

    layout: str = "z-lab"
    sizes: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    """Keys of the target's config.json."""
    maths: dict[str, Any] = field(default_factory=dict)
    """Arguments of the longhand draft."""
    block_length: int | None = None
    """As asked for; None: the trained one."""
    trained: int = 8
    anchored: bool = False
    """Slot 0 drafts too."""

    def weights(self) -> DFlashWeights:
        """Return the weights that `written` writes; float32's rounding stays small in them."""
        weights = random_weights(11, **{"logit_scale": 0.1, **self.sizes})
        for name in weights.tensors:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weights.tensors[name] *= 0.3
        return weights


def windows(*sizes: int | None, causal: tuple[bool, ...]) -> dict[str, Any]:
    return {"windows": sizes, "causal": causal}


SLIDE: dict[str, Any] = {"sliding_window": WINDOW}
MIXED: dict[str, Any] = {**SLIDE, "layer_types": [SLIDING, FULL, SLIDING]}
CAUSAL_SLIDE = windows(WINDOW, WINDOW, causal=(True, True))
FREE_SLIDE = windows(WINDOW, WINDOW, causal=(False, False))
MIXED_CAUSAL = windows(WINDOW, None, WINDOW, causal=(True, False, True))
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
REDUCED = {"draft_vocab_size": 100}
ANCHORED: dict[str, Any] = {"written": {"sample_from_anchor": True}, "anchored": True}
CASES = {
    "z-lab": Case(),
    "z-lab, nested block size": Case(written={"block_size_in": "dflash_config"}),
    "z-lab, own embeddings": Case(written={"own_embeddings": True}),
    "z-lab, one layer and one tap": Case(
        sizes={"n_layers": 1, "n_taps": 1}, written={"tap_layers": (2,)}
    ),
    "z-lab, wide heads": Case(sizes={"head_dim": 32}),
    "z-lab, heads without groups": Case(sizes={"n_kv_heads": 4}),
    "z-lab, one group of heads": Case(sizes={"n_kv_heads": 1, "n_layers": 3}),
    "z-lab, wider target": Case(sizes={"target_hidden": 96}, written={"own_embeddings": True}),
    "z-lab, biases": Case(sizes=BIASES),
    "z-lab, q/k/v biases": Case(sizes={"qkv_bias": True}),
    "z-lab, reduced vocabulary": Case(sizes=REDUCED),
    "z-lab, untied target": Case(target={"tied": False}),
    "z-lab, llama3": Case(written={"config": {"rope_scaling": LLAMA3}}, maths={"rope": LLAMA3}),
    "z-lab, yarn": Case(written={"config": {"rope_scaling": YARN}}, maths={"rope": YARN}),
    "z-lab, theta": Case(written={"config": {"rope_theta": 1e6}}, maths={"rope_theta": 1e6}),
    "z-lab, epsilon": Case(written={"config": {"rms_norm_eps": 1e-2}}, maths={"eps": 1e-2}),
    "z-lab, sliding": Case(written=SLIDE, maths=CAUSAL_SLIDE),
    "z-lab, sliding, stated not to be causal": Case(
        written={**SLIDE, "causal": False}, maths=FREE_SLIDE
    ),
    "z-lab, mixed layers": Case(sizes={"n_layers": 3}, written=MIXED, maths=MIXED_CAUSAL),
    "z-lab, mixed layers, all causal": Case(
        sizes={"n_layers": 3},
        written={**MIXED, "config": {"is_causal": True}},
        maths=windows(WINDOW, None, WINDOW, causal=(True, True, True)),
    ),
    "z-lab, full layers, stated to be causal": Case(
        written={"causal": True}, maths={"causal": (True, True)}
    ),
    "z-lab, sample from anchor": Case(**ANCHORED),
    "z-lab, Gemma's scale and cap": Case(
        target={"config": GEMMA}, maths={"embedding_scale": 8.0, "softcap": 1.5}
    ),
    "z-lab, trained at 16, run at 8": Case(block_length=8, trained=16),
    "z-lab, trained at 16": Case(trained=16),
    "z-lab, a block of 2": Case(block_length=2),
    "z-lab, a window of a block of 5": Case(
        block_length=5, written={"sliding_window": 3}, maths=windows(3, 3, causal=(True, True))
    ),
    "modelopt": Case(layout="modelopt"),
    "modelopt, use_swa": Case(
        layout="modelopt", written={**SLIDE, "causal": False}, maths=FREE_SLIDE
    ),
    "modelopt, use_swa, causality not stated": Case(
        layout="modelopt", written=SLIDE, maths=FREE_SLIDE
    ),
    "speculators": Case(layout="speculators", written={"own_embeddings": True}),
    "speculators, reduced vocabulary": Case(
        layout="speculators", sizes=REDUCED, written={"own_embeddings": True}
    ),
    "speculators, sliding": Case(layout="speculators", written=SLIDE, maths=CAUSAL_SLIDE),
    "speculators, sliding, not causal": Case(
        layout="speculators", written={**SLIDE, "non_causal": True}, maths=FREE_SLIDE
    ),
    "speculators, mixed layers": Case(
        layout="speculators", sizes={"n_layers": 3}, written=MIXED, maths=MIXED_CAUSAL
    ),
    "speculators, sample from anchor": Case(layout="speculators", **ANCHORED),
    "deepspec": Case(layout="deepspec", written={"own_embeddings": True}, trained=7, anchored=True),
    "deepspec, shorter block": Case(
        layout="deepspec",
        written={"own_embeddings": True},
        trained=7,
        block_length=4,
        anchored=True,
    ),
}


def written(tmp_path: Path, case: Case) -> DraftSource:
    """Write the draft in its layout, and a target of four layers."""
    weights = case.weights()
    folder = write_draft(
        tmp_path / "draft", weights, layout=case.layout, block_size=case.trained, **case.written
    )
    sizes = {"hidden": weights.target_hidden, "logit_scale": 0.1, **case.target}
    config = sizes.pop("config", {})
    target = write_tiny_model(tmp_path / "target", seed=2, **sizes)
    path = target / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **config}), encoding="utf-8")
    own = case.written.get("own_embeddings", False)
    return DraftSource(folder=folder, target=target, embeddings="own" if own else "auto")


def loaded(source: DraftSource, cache_dir: Path, **changes: Any) -> BlockDraft:
    arguments: dict[str, Any] = {
        "block_length": None,
        "runtime": "torch",
        "precision": "fp32",
        "cache_dir": cache_dir,
        "max_context_length": 150,
        "slot_count": 3,
        "threads": None,
    }
    return load_draft(source, **(arguments | changes))[0]


def expected_logits(
    case: Case, source: DraftSource, features: torch.Tensor, pending: int, block_length: int
) -> torch.Tensor:
    """Return the logits [K, Vd] of the slots that draft, shared tensors being the target's."""
    assert source.target is not None
    shared = load_file(source.target / "model.safetensors")
    embedding = head = None
    if not case.written.get("own_embeddings"):
        embedding = shared["model.embed_tokens.weight"]
        if "draft_vocab_size" not in case.sizes:
            head = shared.get("lm_head.weight", embedding)
    slots = block_logits(
        case.weights(),
        features=features,
        pending=pending,
        block_length=block_length,
        mask_token_id=16,
        embedding=embedding,
        head=head,
        **case.maths,
    )
    return slots if case.anchored else slots[1:]


def random_rows(length: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(length, width, generator=torch.Generator().manual_seed(seed))


def logits_in_pieces(
    draft: BlockDraft, features: torch.Tensor, pending: int, rng: random.Random
) -> torch.Tensor:
    """Extend slot 1 in random pieces, some of which draft; return the logits of the whole."""
    k = draft.config.max_draft_count(draft.block_length)
    draft.reset(1)
    start, length = 0, len(features)
    while True:
        end = min(length, start + rng.choice((1, 2, 7, 8, 9, 40, 140)))
        work = BlockWork(
            slot=1,
            start=start,
            features=features[start:end],
            pending_token_id=pending if end == length else rng.randrange(300),
            draft_count=k if end == length else rng.choice((0, k)),
        )
        (logits,) = draft.run([work])
        if end == length:
            return logits
        start = end


@pytest.mark.parametrize("name", CASES)
def test_logits_of_blocks_are_those_of_the_longhand_draft(name: str, tmp_path: Path) -> None:
    """From raw rows in random pieces, fresh ones a length, all within 1e-5."""
    case = CASES[name]
    source = written(tmp_path, case)
    draft, weights = loaded(source, tmp_path, block_length=case.block_length), case.weights()
    _, fusion_hash, fusion = load_fusion_module(source, tmp_path)
    assert fusion_hash == draft.model_hash
    assert draft.block_length == (case.block_length or case.trained)
    assert (None if draft.target_ids is None else draft.target_ids.tolist()) == weights.target_ids
    rng = random.Random(name)
    for length in LENGTHS:
        rows = random_rows(length, draft.config.raw_row_width, seed=rng.randrange(10**6))
        pending = rng.randrange(300)
        features = draft.fuse(rows)
        assert torch.equal(features, fusion(rows))
        exact = fused(weights, rows, eps=case.maths.get("eps", 1e-5))
        torch.testing.assert_close(features.double(), exact, atol=1e-5, rtol=0)
        expected = expected_logits(case, source, exact, pending, draft.block_length)
        logits = logits_in_pieces(draft, features, pending, rng)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=0)


VARIANTS: dict[str, dict[str, Any]] = {
    "windows": windows(WINDOW, WINDOW, causal=(False, False)),
    "one window": windows(WINDOW, None, causal=(False, False)),
    "a window that is one wider": windows(WINDOW + 1, WINDOW + 1, causal=(False, False)),
    "causal": {"causal": (True, True)},
    "one causal layer": {"causal": (True, False)},
    "llama3": {"rope": LLAMA3},
    "yarn": {"rope": YARN},
    "theta": {"rope_theta": 1e6},
    "epsilon": {"eps": 1e-2},
    "scale": {"embedding_scale": 8.0},
    "cap": {"softcap": 1.5},
    "another mask": {"mask_token_id": 17},
    "a shorter block": {"block_length": 7},
    "another pending token": {"pending": 6},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_left_out_shows_in_the_longhand_draft(name: str) -> None:
    """Guards the cases above: what they vary is not without effect."""
    weights = Case().weights()
    plain: dict[str, Any] = {"pending": 5, "block_length": 8, "mask_token_id": 16}
    if name == "a window that is one wider":
        plain |= VARIANTS["windows"]
    features = fused(weights, random_rows(100, 192, seed=1))
    one = block_logits(weights, features=features, **plain)
    other = block_logits(weights, features=features, **{**plain, **VARIANTS[name]})
    assert (one[: len(other)] - other).abs().max() > 1e-3


@pytest.mark.parametrize("linear", ["q", "k", "v", "o", "gate", "up", "down"])
def test_a_bias_left_out_shows_in_the_longhand_draft(linear: str) -> None:
    missing = f".{linear}_proj.bias"
    weights = Case(sizes=BIASES).weights()
    without = weights.without(*(name for name in weights.tensors if name.endswith(missing)))
    assert len(weights.tensors) == len(without.tensors) + 2
    features = fused(weights, random_rows(30, 192, seed=1))
    one, other = (
        block_logits(w, features=features, pending=5, block_length=8, mask_token_id=16)
        for w in (weights, without)
    )
    assert (one - other).abs().max() > 1e-3


def test_a_draft_that_samples_from_the_anchor_read_as_z_lab_is_off_by_one(tmp_path: Path) -> None:
    """Its slot k holds what z-lab would look for in slot k + 1."""
    case = CASES["deepspec"]
    source = written(tmp_path, case)
    draft = loaded(source, tmp_path)
    features = draft.fuse(random_rows(30, 192, seed=1))
    slots = expected_logits(case, source, features, 5, 7)
    work = BlockWork(slot=0, start=0, features=features, pending_token_id=5, draft_count=7)
    (logits,) = draft.run([work])
    torch.testing.assert_close(logits.double(), slots, atol=1e-5, rtol=0)
    assert (logits[:-1].double() - slots[1:]).abs().amax(dim=1).min() > 1e-2


def test_d19_a_block_trained_at_8_cannot_run_at_16_and_one_trained_at_16_runs_at_8(
    tmp_path: Path,
) -> None:
    short = written(tmp_path / "8", Case(trained=8))
    with pytest.raises(UserError, match="--block-length is 16; expected 2 to 8, the block_size"):
        loaded(short, tmp_path, block_length=16)
    long = written(tmp_path / "16", Case(trained=16))
    drafts = [loaded(long, tmp_path, block_length=length) for length in (None, 16, 8)]
    assert [draft.block_length for draft in drafts] == [16, 16, 8]
    assert [d.config.max_draft_count(d.block_length) for d in drafts] == [15, 15, 7]
    features = drafts[0].fuse(random_rows(30, 192, seed=1))
    work = BlockWork(slot=0, start=0, features=features, pending_token_id=5, draft_count=7)
    whole, _, half = (draft.run([work])[0] for draft in drafts)
    assert (whole - half).abs().amax(dim=1).min() > 1e-4


def test_a_draft_config_of_2048_positions_is_exact_in_a_longer_context(tmp_path: Path) -> None:
    """RoPE tables are as long as the served context and a block, whatever the config says."""
    case = Case(written={"config": {"max_position_embeddings": 2048}})
    source = written(tmp_path, case)
    draft = loaded(source, tmp_path, max_context_length=2100, slot_count=2)
    features = draft.fuse(random_rows(2100, 192, seed=4))
    logits = logits_in_pieces(draft, features, 5, random.Random(1))
    expected = expected_logits(case, source, features, 5, 8)
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=0)
    clamped = expected_logits(case, source, features[52:], 5, 8)
    assert (clamped - expected).abs().max() > 1e-4  # a context cut to 2048 would be seen


def test_gemma_s_scale_and_cap_come_from_the_target_s_config(tmp_path: Path) -> None:
    source = written(tmp_path, CASES["z-lab, Gemma's scale and cap"])
    config = loaded(source, tmp_path).config
    assert (config.embedding_scale, config.final_softcap) == (math.sqrt(64), 1.5)
    assert max(abs(logit) for logit in drafted(source, tmp_path, length=30)) < 1.5


def drafted(source: DraftSource, cache_dir: Path, *, length: int) -> list[float]:
    draft = loaded(source, cache_dir)
    features = draft.fuse(random_rows(length, 192, seed=1))
    work = BlockWork(slot=0, start=0, features=features, pending_token_id=5, draft_count=7)
    return draft.run([work])[0].flatten().tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_draft_s_taps_are_the_outputs_of_the_layers_it_was_trained_on(
    layout: str, tmp_path: Path
) -> None:
    """From text to logits, against `transformers`' layer outputs; one layer off is another draft.

    speculators number a layer's output one higher than the others do.
    """
    anchored = layout == "deepspec"
    case = Case(
        layout=layout,
        written={"own_embeddings": True, "tap_layers": (1, 2), "n_target_layers": 4},
        sizes={"n_taps": 2},
        anchored=anchored,
    )
    source = written(tmp_path, case)
    draft = loaded(source, tmp_path)
    assert draft.config.tap_layers == (1, 2)
    generator = torch.Generator().manual_seed(6)
    text = torch.randint(0, 300, (41,), generator=generator).tolist()
    rows = target_rows(source, tmp_path, draft.config.tap_layers, text)
    logits = logits_in_pieces(draft, draft.fuse(rows), text[-1], random.Random(1)).double()
    for off in (0, -1, 1):
        taps = fused(case.weights(), reference_rows(source, (1 + off, 2 + off), text))
        expected = expected_logits(case, source, taps, text[-1], 8)
        if off == 0:
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        else:
            assert (logits - expected).abs().max() > 1e-2, off


def test_a_text_full_of_mask_ids_is_a_text_like_any_other(tmp_path: Path) -> None:
    """Real tokens equal to the mask id: their rows are rows, and the pending one stands too."""
    case = Case(written={"tap_layers": (1, 2, 3)})
    source = written(tmp_path, case)
    draft = loaded(source, tmp_path)
    for text in ([16] * 41, [16, 5, 16] * 13 + [16, 16], [*range(40), 16]):
        rows = target_rows(source, tmp_path, (1, 2, 3), text)
        logits = logits_in_pieces(draft, draft.fuse(rows), text[-1], random.Random(1))
        taps = fused(case.weights(), reference_rows(source, (1, 2, 3), text))
        expected = expected_logits(case, source, taps, text[-1], 8)
        torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=0)
