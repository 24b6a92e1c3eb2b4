"""The draft's network in parts: names, phases, and the fusion that two processes must agree on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from graph_runtime.dflash.config import DFlashConfig
from graph_runtime.dflash.network import (
    ContextFusion,
    DFlashNetwork,
    block_tokens,
    build_fusion,
    softcapped,
)
from graph_runtime.rope_config import RopeScaling
from tests.dflash_layouts import DFlashWeights, random_weights
from tests.dflash_reference import fused

FUSIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one tap": {"n_taps": 1},
    "five taps": {"n_taps": 5},
    "odd sizes": {"target_hidden": 37, "hidden": 76},
    "as wide as its taps": {"hidden": 96, "target_hidden": 32},
    "real sizes": {"hidden": 576, "n_heads": 9, "n_kv_heads": 3},
}


def config_of(weights: DFlashWeights, **changes: Any) -> DFlashConfig:
    """Return the shape of weights as a z-lab file has it, without windows."""
    config = DFlashConfig(
        layout="z-lab",
        hidden_size=weights.hidden,
        target_hidden_size=weights.target_hidden,
        intermediate_size=weights.intermediate,
        n_layers=weights.n_layers,
        n_heads=weights.n_heads,
        n_kv_heads=weights.n_kv_heads,
        head_dim=weights.head_dim,
        rms_norm_eps=1e-5,
        vocab_size=weights.vocab_size,
        draft_vocab_size=weights.draft_vocab_size,
        tap_layers=tuple(range(weights.n_taps)),
        rope=RopeScaling(kind="default", theta=10000.0),
        qkv_bias=weights.qkv_bias,
        o_bias=weights.o_bias,
        mlp_bias=weights.mlp_bias,
        qk_norm=True,
        block_size=8,
        mask_token_id=16,
        sample_from_anchor=False,
        sliding_windows=(None,) * weights.n_layers,
        causal=(False,) * weights.n_layers,
        embedding_scale=1.0,
        final_softcap=None,
    )
    return replace(config, **changes)


def fusion_of(weights: DFlashWeights) -> ContextFusion:
    return build_fusion(config_of(weights), weights.tensors)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FUSIONS)
def test_l4_a_feature_s_bits_depend_on_neither_the_count_of_rows_nor_its_place(name: str) -> None:
    """The verifier fuses windows and prefill chunks, the drafter whatever it was sent."""
    weights = random_weights(3, **FUSIONS[name])
    fusion = fusion_of(weights)
    rows = random(43, weights.n_taps * weights.target_hidden)
    whole = fusion(rows)
    expected = fused(weights, rows)
    torch.testing.assert_close(whole.double(), expected, atol=1e-5, rtol=0)
    for count in (1, 2, 3, 5, 7, 8, 9, 16, 23):
        for first in range(0, len(rows) - count, 5):
            part = slice(first, first + count)
            assert torch.equal(fusion(rows[part]), whole[part]), (count, first)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    assert torch.equal(fusion(rows[order]), whole[order])
    assert fusion(rows[:0]).shape == (0, weights.hidden)


def test_a_row_of_nan_stays_alone_in_the_fusion() -> None:
    fusion = fusion_of(random_weights(3))
    rows = random(9, 192)
    clean = fusion(rows)
    rows[4] = float("nan")
    spoiled = fusion(rows)
    kept = [i for i in range(9) if i != 4]
    assert torch.equal(spoiled[kept], clean[kept])
    assert spoiled[4].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_a_narrower_dtype_are_fused_in_float32(dtype: torch.dtype) -> None:
    fusion = fusion_of(random_weights(3))
    rows = random(9, 192).to(dtype)
    assert fusion(rows).dtype == torch.float32
    assert torch.equal(fusion(rows), fusion(rows.float()))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 32, "target_hidden": 48, "n_taps": 5, "n_layers": 3},
    "reduced vocabulary": {"draft_vocab_size": 100},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_parameters_are_named_as_checkpoints_are_read(name: str) -> None:
    weights = random_weights(3, **OPTIONS[name])
    network = build(weights)
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in weights.tensors.items()}


class Own(nn.Module):
    """Attention of every row to itself alone: its values, once a head."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,  # noqa: ARG002
        v: torch.Tensor,
        positions: torch.Tensor,  # noqa: ARG002
        slot: torch.Tensor | None,  # noqa: ARG002
    ) -> torch.Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def build(weights: DFlashWeights, **changes: Any) -> DFlashNetwork:
    config = config_of(weights, **changes)
    attentions = [Own() for _ in range(config.n_layers)]
    return DFlashNetwork(config, attentions=attentions, max_position=64)


def network_of(weights: DFlashWeights, **changes: Any) -> DFlashNetwork:
    network = build(weights, **changes)
    network.load_state_dict(weights.tensors)
    return network.eval().requires_grad_(False)


def test_the_phases_of_a_layer_are_the_whole_of_it_in_parts() -> None:
    network = network_of(random_weights(3))
    tokens, positions = torch.arange(5), torch.arange(20, 25)
    cos, sin = network.turns(positions)
    x = network.embed(tokens)
    for layer in network.layers:
        q, k, v = layer.enter(x, cos, sin)
        assert (q.shape, k.shape, v.shape) == ((5, 4, 16), (5, 2, 16), (5, 2, 16))
        mixed = Own()(q, k, v, positions, None)
        whole = layer(x, cos, sin, positions)
        assert torch.equal(layer.leave(x, mixed.flatten(1)), whole)
        x = layer.leave(x, mixed)
        assert torch.equal(x, whole)
    assert torch.equal(network.block(tokens, positions), x)
    assert network.head(x).shape == (5, 300)


def test_a_context_row_is_projected_as_it_is_and_turned_to_its_own_position() -> None:
    """No norm of the layer comes between a feature and its keys and values."""
    weights = random_weights(3)
    network = network_of(weights)
    feature = random(1, 64)
    layers = network.context(feature.expand(2, 64), torch.tensor([3, 63]))
    assert len(layers) == 2
    for i, (k, v) in enumerate(layers):
        assert not torch.allclose(k[0], k[1])
        assert torch.equal(v[0], v[1])
        v_proj = weights.tensors[f"layers.{i}.self_attn.v_proj.weight"]
        torch.testing.assert_close(v[0].flatten(), (feature @ v_proj.T)[0], atol=1e-5, rtol=0)


def test_embedded_tokens_are_scaled_as_a_gemma_target_s_are() -> None:
    weights = random_weights(3)
    scale = math.sqrt(64)
    tokens = torch.tensor([7, 16, 299])
    plain, scaled = network_of(weights), network_of(weights, embedding_scale=scale)
    rows = weights.tensors["embed_tokens.weight"][tokens]
    assert torch.equal(plain.embed(tokens), rows)
    torch.testing.assert_close(scaled.embed(tokens), rows * scale)


def test_a_cap_bounds_logits_and_keeps_their_order() -> None:
    logits = torch.tensor([-200.0, -3.0, 0.0, 3.0, 30.0, 200.0])
    capped = softcapped(logits.to(torch.bfloat16), 30.0)
    assert capped.dtype == torch.float32
    expected = [30.0 * math.tanh(x / 30.0) for x in logits.tolist()]
    torch.testing.assert_close(capped, torch.tensor(expected))
    assert capped.abs().max() <= 30.0
    assert torch.equal(softcapped(logits, None), logits)


def test_d7_a_block_is_the_pending_token_and_masks() -> None:
    config = config_of(random_weights(3), mask_token_id=16)
    assert block_tokens(config, 5, 4) == [5, 16, 16, 16]
    assert block_tokens(config, 16, 3) == [16, 16, 16]
    assert block_tokens(config, 5, 1) == [5]


@pytest.mark.parametrize(
    ("windows", "reach"),
    [((None, None), None), ((None, 20), None), ((20, 20), 20), ((20, 7), 20), ((5, 9), 9)],
)
def test_d16_context_reaches_as_far_back_as_the_widest_window(
    windows: tuple[int | None, ...], reach: int | None
) -> None:
    assert config_of(random_weights(3), sliding_windows=windows).reach == reach
