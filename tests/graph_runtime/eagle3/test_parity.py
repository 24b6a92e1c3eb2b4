"""Drafts in plain torch against a longhand recomputation: every layout, every variant."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from graph_runtime.eagle3.checkpoint import Eagle3Source
from graph_runtime.eagle3.draft import Draft, DraftSpan
from graph_runtime.eagle3.load import load_draft, load_fusion_module
from graph_runtime.load import load_torch_target
from graph_runtime.target import Span
from tests.eagle3_layouts import LAYOUTS, DraftWeights, default_taps, weights_for, write_draft
from tests.eagle3_reference import Maths, chain_logits, fused
from tests.tiny import write_tiny_model

STEPS = 7
LENGTHS = (1, 2, 9, 64, 130)
"""Slots of a seed: below, at and beyond the blocks of 8 rows and 64 positions."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 20}


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: str
    sizes: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    maths: Maths = field(default_factory=Maths)

    def weights(self) -> DraftWeights:
        """Return the weights that `written` writes."""
        return tempered(weights_for(self.layout, 11, **{"logit_scale": 0.1, **self.sizes}))


def tempered(weights: DraftWeights) -> DraftWeights:
    """Make the layer add less to its residual: float32's rounding stays small over 7 steps."""
    for name in ("layer.self_attn.o_proj.weight", "layer.mlp.down_proj.weight"):
        weights.tensors[name] *= 0.3
    return weights


BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
NORMED_RESIDUAL: dict[str, Any] = {
    "written": {"norm_before_residual": True},
    "maths": Maths(norm_before_residual=True),
}
POST_NORM: dict[str, Any] = {
    "written": {"post_norm_feedback": True},
    "maths": Maths(post_norm_feedback=True),
}
BOTH: dict[str, Any] = {
    "written": {"norm_before_residual": True, "post_norm_feedback": True},
    "maths": Maths(norm_before_residual=True, post_norm_feedback=True),
}
CASES = {
    **{layout: Case(layout=layout) for layout in LAYOUTS if layout != "eagle-3.1"},
    "eagle-3.1": Case(layout="eagle-3.1", **POST_NORM),
    "eagle-3.1, normed residual": Case(layout="eagle-3.1", **BOTH),
    "safeailab, as wide as its taps": Case(
        layout="safeailab", sizes={"hidden": 96, "target_hidden": 32}
    ),
    "safeailab, wider target": Case(layout="safeailab", sizes={"target_hidden": 96}),
    "safeailab, full vocabulary": Case(layout="safeailab", sizes={"draft_vocab_size": None}),
    "specforge, biases": Case(layout="specforge", sizes=BIASES),
    "specforge, q/k/v biases": Case(layout="specforge", sizes={"qkv_bias": True}),
    "specforge, wide heads": Case(layout="specforge", sizes={"head_dim": 32}),
    "specforge, heads without groups": Case(layout="specforge", sizes={"n_kv_heads": 4}),
    "specforge, one group of heads": Case(layout="specforge", sizes={"n_kv_heads": 1}),
    "specforge, llama3": Case(
        layout="specforge", written={"config": {"rope_scaling": LLAMA3}}, maths=Maths(rope=LLAMA3)
    ),
    "specforge, yarn": Case(
        layout="specforge", written={"config": {"rope_scaling": YARN}}, maths=Maths(rope=YARN)
    ),
    "speculators, llama type": Case(layout="speculators", sizes={"qk_norm": False}),
    "speculators, normed residual": Case(layout="speculators", **NORMED_RESIDUAL),
    "speculators, norm before fc": Case(layout="speculators", sizes={"norm_before_fc": True}),
    "speculators, fc norms, post-norm": Case(
        layout="speculators", sizes={"fc_norm": True}, **POST_NORM
    ),
    "speculators, window": Case(
        layout="speculators", written={"nested": WINDOW}, maths=Maths(sliding_window=20)
    ),
    "modelopt, norm before fc": Case(layout="modelopt", sizes={"norm_before_fc": True}),
    "modelopt, no taps": Case(layout="modelopt", sizes={"n_taps": 0, "hidden_norm": False}),
    "modelopt, no taps, hidden norm": Case(
        layout="modelopt", sizes={"n_taps": 0}, **NORMED_RESIDUAL
    ),
    "deepspec, window": Case(
        layout="deepspec", written={"config": WINDOW}, maths=Maths(sliding_window=20)
    ),
}


def written(tmp_path: Path, case: Case) -> Eagle3Source:
    """Write the draft in its layout, with its embedding, and a target of eight layers."""
    weights = case.weights()
    folder = write_draft(
        tmp_path / "draft", layout=case.layout, weights=weights, embeddings=True, **case.written
    )
    target = write_tiny_model(tmp_path / "target", seed=2, n_layers=8, hidden=weights.target_hidden)
    return Eagle3Source(folder=folder, target=target, embeddings="own")


def loaded(source: Eagle3Source, cache_dir: Path, **changes: Any) -> Draft:
    arguments: dict[str, Any] = {
        "runtime": "torch",
        "precision": "fp32",
        "cache_dir": cache_dir,
        "max_context_length": 150,
        "slot_count": 3,
        "threads": None,
    }
    return load_draft(source, **(arguments | changes))[0]


def target_norm(source: Eagle3Source) -> torch.Tensor:
    assert source.target is not None
    return load_file(source.target / "model.safetensors")["model.norm.weight"]


def random_tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 300, (length,), generator=generator).tolist()


def random_rows(length: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(length, width, generator=torch.Generator().manual_seed(seed))


def product_logits(
    draft: Draft, tokens: list[int], features: torch.Tensor, *, chunk: int, steps: int = STEPS
) -> torch.Tensor:
    """Seed slot 1 in chunks, then step; return logits [steps, Vd] as `chain_logits` does."""
    seed = len(features)
    draft.reset(1)
    for start in range(0, seed, chunk):
        end = min(start + chunk, seed)
        feature = draft.run([span(1, start, tokens[start:end], features[start:end])])
    logits = [draft.logits(feature)]
    for i in range(seed, seed + steps - 1):
        feature = draft.run([span(1, i, tokens[i : i + 1], feature)])
        logits.append(draft.logits(feature))
    return torch.cat(logits)


def span(slot: int, start: int, tokens: list[int], features: torch.Tensor) -> DraftSpan:
    return DraftSpan(slot=slot, start=start, token_ids=tokens, features=features)


@pytest.mark.parametrize("name", CASES)
def test_logits_of_seeds_and_chains_are_those_of_the_longhand_draft(
    name: str, tmp_path: Path
) -> None:
    """Raw rows and fused rows, seeds in odd chunks, chain steps 1..7, all within 1e-5."""
    case = CASES[name]
    source = written(tmp_path, case)
    draft, weights = loaded(source, tmp_path), case.weights()
    _, fusion_hash, fusion = load_fusion_module(source, tmp_path)
    assert fusion_hash == draft.model_hash
    assert draft.target_ids is None or draft.target_ids.tolist() == weights.target_ids
    for i, length in enumerate(LENGTHS):
        tokens = random_tokens(length + STEPS, seed=i)
        rows = random_rows(length, draft.config.raw_row_width, seed=i)
        features = draft.fuse(rows)
        assert torch.equal(features, fusion(rows))
        expected_features = fused(weights, rows, target_norm(source))
        torch.testing.assert_close(features.double(), expected_features, atol=1e-5, rtol=0)
        expected = chain_logits(weights, case.maths, tokens, expected_features, STEPS)
        for chunk in (length, 7):
            logits = product_logits(draft, tokens, features, chunk=chunk)
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=0)


VARIANTS: dict[str, tuple[Maths, set[str]]] = {
    "normed residual": (Maths(norm_before_residual=True), set()),
    "window": (Maths(sliding_window=20), set()),
    "llama3": (Maths(rope=LLAMA3), set()),
    "yarn": (Maths(rope=YARN), set()),
    "no hidden norm": (Maths(), {"layer.hidden_norm.weight"}),
    "no q/k norms": (Maths(), {"layer.self_attn.q_norm.weight", "layer.self_attn.k_norm.weight"}),
    "no biases": (Maths(), {"layer.self_attn.q_proj.bias", "layer.self_attn.o_proj.bias"}),
    "no input norm": (Maths(), {"fusion.input_norm.weight"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_left_out_shows_in_the_longhand_draft(name: str) -> None:
    """Guards the cases above: what they vary is not without effect."""
    maths, missing = VARIANTS[name]
    weights = tempered(
        weights_for("speculators", 5, norm_before_fc=True, logit_scale=0.1, **BIASES)
    )
    tokens, rows = random_tokens(100, seed=1), random_rows(100, 192, seed=1)
    plain = chain_logits(weights, Maths(), tokens, fused(weights, rows), 1)
    assert missing <= set(weights.tensors)
    without = weights.without(*missing)
    other = chain_logits(without, maths, tokens, fused(without, rows), 1)
    assert (other - plain).abs().max() > 1e-3


def test_post_norm_feedback_shows_from_the_second_step_on() -> None:
    weights = weights_for("eagle-3.1", 5)
    tokens, features = random_tokens(12, seed=1), random_rows(10, 64, seed=1)
    pre = chain_logits(weights, Maths(), tokens, features, 3)
    post = chain_logits(weights, Maths(post_norm_feedback=True), tokens, features, 3)
    assert torch.equal(pre[0], post[0])
    assert (pre[1] - post[1]).abs().max() > 1e-2


def test_e15_the_unshifted_pairing_gives_other_logits(tmp_path: Path) -> None:
    """Slot p takes feature p and token p + 1; with token p it is another draft."""
    case = CASES["specforge"]
    draft = loaded(written(tmp_path, case), tmp_path)
    text = random_tokens(21 + STEPS, seed=3)
    features = draft.fuse(random_rows(20, 192, seed=3))
    shifted = product_logits(draft, text[1:], features, chunk=20)
    unshifted = product_logits(draft, text, features, chunk=20)
    expected = chain_logits(case.weights(), case.maths, text[1:], features, STEPS)
    torch.testing.assert_close(shifted.double(), expected, atol=1e-5, rtol=0)
    assert (unshifted.double() - expected).abs().amax(dim=1).min() > 1e-2


def test_a_draft_config_of_2048_positions_is_exact_in_a_longer_context(tmp_path: Path) -> None:
    """RoPE tables are as long as the served context, whatever the draft's config says."""
    case = replace(CASES["specforge"], written={"config": {"max_position_embeddings": 2048}})
    draft = loaded(written(tmp_path, case), tmp_path, max_context_length=2100, slot_count=2)
    length, steps = 2090, 2
    tokens = random_tokens(length + steps, seed=4)
    features = draft.fuse(random_rows(length, 192, seed=4))
    expected = chain_logits(case.weights(), case.maths, tokens, features, steps)
    logits = product_logits(draft, tokens, features, chunk=512, steps=steps)
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=0)
    clamped = chain_logits(case.weights(), case.maths, tokens[42:], features[42:], steps)
    assert (clamped - expected).abs().max() > 1e-4  # a context cut to 2048 would be seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_e19_a_draft_s_taps_are_the_outputs_of_the_layers_it_was_trained_on(
    layout: str, tmp_path: Path
) -> None:
    """From text to logits: rows of our target against `transformers`' layer outputs."""
    written_keys = POST_NORM if layout == "eagle-3.1" else {}
    case = Case(layout=layout, **written_keys)
    weights = case.weights()
    source = written(tmp_path, case)
    draft = loaded(source, tmp_path)
    text = random_tokens(31, seed=6)
    rows = target_rows(source, tmp_path, draft.config.tap_layers, text)
    logits = product_logits(draft, text[1:], draft.fuse(rows), chunk=30, steps=1)
    taps = default_taps(weights.n_taps)
    right = reference_rows(source, taps, text)
    expected = chain_logits(weights, case.maths, text[1:], fused(weights, right), 1)
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=0)
    for off in (-1, 1):
        wrong = reference_rows(source, tuple(tap + off for tap in taps), text)
        other = chain_logits(weights, case.maths, text[1:], fused(weights, wrong), 1)
        assert (other - expected).abs().max() > 1e-2, off


def test_e19_a_draft_without_taps_reads_the_last_layer_after_the_final_norm(
    tmp_path: Path,
) -> None:
    case = CASES["modelopt, no taps"]
    source = written(tmp_path, case)
    draft = loaded(source, tmp_path)
    text = random_tokens(31, seed=6)
    rows = target_rows(source, tmp_path, draft.config.tap_layers, text)
    model = AutoModelForCausalLM.from_pretrained(source.target, dtype=torch.float32)
    with torch.no_grad():
        last = model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
    torch.testing.assert_close(draft.fuse(rows), last, atol=1e-4, rtol=0)


def target_rows(
    source: Eagle3Source, cache_dir: Path, tap_layers: tuple[int, ...], text: list[int]
) -> torch.Tensor:
    """Return the raw rows of all positions but the last one from our own target."""
    assert source.target is not None
    target = load_torch_target(
        folder=source.target,
        model_id="tiny",
        precision="fp32",
        cache_dir=cache_dir,
        tap_layers=tap_layers,
        max_context_length=64,
        slot_count=1,
        max_prefill_chunk=64,
        threads=None,
    )
    (output,) = target.step(
        [Span(slot=0, start=0, token_ids=text[:-1], logits_count=0, wants_rows=True)]
    )
    assert output.rows is not None
    return output.rows


def reference_rows(
    source: Eagle3Source, tap_layers: tuple[int, ...], text: list[int]
) -> torch.Tensor:
    """Return the outputs of some layers side by side, [S - 1, taps * Ht], by transformers."""
    model = AutoModelForCausalLM.from_pretrained(
        source.target, dtype=torch.float32, attn_implementation="eager"
    )
    outputs: list[torch.Tensor] = []
    for i in tap_layers:
        model.model.layers[i].register_forward_hook(
            lambda _module, _inputs, output: outputs.append(
                output[0] if isinstance(output, tuple) else output
            )
        )
    with torch.no_grad():
        model(torch.tensor([text[:-1]]))
    return torch.cat([output.reshape(len(text) - 1, -1) for output in outputs], dim=-1)
