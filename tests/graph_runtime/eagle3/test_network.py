"""The draft's network in parts: names, phases, and the fusion that two processes must agree on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from graph_runtime.eagle3.config import Eagle3Config
from graph_runtime.eagle3.network import Eagle3Network, Fusion
from graph_runtime.rope_config import RopeScaling
from tests.eagle3_layouts import DraftWeights, random_weights
from tests.eagle3_reference import fused

FUSIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm before fc": {"norm_before_fc": True},
    "fc norms": {"fc_norm": True},
    "five taps": {"n_taps": 5},
    "no taps": {"n_taps": 0},
    "odd sizes": {"target_hidden": 37, "hidden": 76},
    "as wide as its taps": {"hidden": 96, "target_hidden": 32},
    "real sizes": {"hidden": 576, "n_heads": 9, "n_kv_heads": 3},
}


def config_of(weights: DraftWeights, **changes: Any) -> Eagle3Config:
    """Return the shape of some weights."""
    names = weights.tensors
    config = Eagle3Config(
        layout="specforge",
        hidden_size=weights.hidden,
        target_hidden_size=weights.target_hidden,
        intermediate_size=weights.intermediate,
        n_heads=weights.n_heads,
        n_kv_heads=weights.n_kv_heads,
        head_dim=weights.head_dim,
        rms_norm_eps=1e-5,
        vocab_size=weights.vocab_size,
        draft_vocab_size=weights.draft_vocab_size,
        tap_layers=tuple(range(1, 1 + max(weights.n_taps, 1))),
        rope=RopeScaling(kind="default", theta=10000.0),
        qkv_bias=weights.qkv_bias,
        o_bias=weights.o_bias,
        mlp_bias=weights.mlp_bias,
        qk_norm="layer.self_attn.q_norm.weight" in names,
        sliding_window=None,
        use_aux_hidden_state=weights.n_taps > 0,
        target_norm_eps=1e-5,
        hidden_norm="layer.hidden_norm.weight" in names,
        norm_before_residual=False,
        norm_before_fc="fusion.input_norm.weight" in names,
        fc_norm="fusion.fc_norm.0.weight" in names,
        post_norm_feedback=False,
    )
    return replace(config, **changes)


def fusion_of(weights: DraftWeights) -> Fusion:
    fusion = Fusion(config_of(weights))
    prefix = "fusion."
    tensors = {n.removeprefix(prefix): t for n, t in weights.tensors.items() if prefix in n}
    if weights.n_taps == 0:
        tensors = {"target_norm.weight": target_norm(weights)}
    fusion.load_state_dict(tensors)
    return fusion.eval().requires_grad_(False)


def target_norm(weights: DraftWeights) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, weights.target_hidden)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FUSIONS)
def test_a_fused_row_s_bits_depend_on_neither_the_count_of_rows_nor_its_place(name: str) -> None:
    """Law L4: the verifier fuses windows, the drafter whatever it was sent."""
    weights = random_weights(3, **FUSIONS[name])
    fusion = fusion_of(weights)
    rows = random(43, fusion.row_width)
    whole = fusion(rows)
    expected = fused(weights, rows, target_norm(weights))
    torch.testing.assert_close(whole.double(), expected, atol=1e-5, rtol=0)
    for count in (1, 2, 3, 5, 7, 8, 9, 16, 23):
        for first in range(0, len(rows) - count, 5):
            part = slice(first, first + count)
            assert torch.equal(fusion(rows[part]), whole[part]), (count, first)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    assert torch.equal(fusion(rows[order]), whole[order])
    assert fusion(rows[:0]).shape == (0, weights.hidden)


def test_the_targets_final_norm_keeps_its_own_epsilon() -> None:
    weights = random_weights(3, n_taps=0)
    config = config_of(weights, rms_norm_eps=1e-5, target_norm_eps=1e-2)
    fusion = Fusion(config)
    weight = target_norm(weights)
    fusion.load_state_dict({"target_norm.weight": weight})
    rows = 0.1 * random(11, weights.target_hidden)  # mean squares about 1e-2: epsilon matters
    x = rows.double()
    by_own, by_drafts = (
        weight.double() * x / ((x**2).mean(dim=1, keepdim=True) + eps).sqrt()
        for eps in (1e-2, 1e-5)
    )
    assert (by_own - by_drafts).abs().max() > 0.1
    with torch.no_grad():
        torch.testing.assert_close(fusion(rows).double(), by_own, atol=1e-5, rtol=0)


def test_a_row_of_nan_stays_alone_in_the_fusion() -> None:
    fusion = fusion_of(random_weights(3, fc_norm=True))
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
    "everything": {
        "qk_norm": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "fc_norm": True,
        "head_dim": 32, "target_hidden": 48, "n_taps": 5,
    },
    "norm before fc": {"norm_before_fc": True},
    "no hidden norm": {"hidden_norm": False},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_parameters_are_named_as_checkpoints_are_read(name: str) -> None:
    weights = random_weights(3, **OPTIONS[name])
    network = Eagle3Network(config_of(weights), attention=Own(), max_context_length=8)
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


def network_of(weights: DraftWeights, **changes: Any) -> Eagle3Network:
    network = Eagle3Network(config_of(weights, **changes), attention=Own(), max_context_length=64)
    network.load_state_dict(weights.tensors)
    return network.eval().requires_grad_(False)


@pytest.mark.parametrize("post_norm", [False, True])
def test_the_phases_are_the_whole_network_in_parts(post_norm: bool) -> None:
    network = network_of(random_weights(3, qk_norm=True), post_norm_feedback=post_norm)
    tokens, positions, features = torch.arange(5), torch.arange(20, 25), random(5, 64)
    q, k, v, residual = network.enter(tokens, features, positions)
    assert (q.shape, k.shape, v.shape) == ((5, 4, 16), (5, 2, 16), (5, 2, 16))
    mixed = Own()(q, k, v, positions, None)
    feature = network.leave(mixed, residual)
    assert torch.equal(feature, network(tokens, features, positions))
    assert torch.equal(feature, network.leave(mixed.flatten(1), residual))
    assert network.head(feature).shape == (5, 100)


def test_the_recurrent_feature_is_normed_once_whichever_is_fed_back() -> None:
    """EAGLE-3.1 feeds norm(h) back and puts its head on the same; logits of a step are equal."""
    weights = random_weights(3)
    tokens, positions, features = torch.arange(5), torch.arange(5), random(5, 64)
    pre, post = network_of(weights), network_of(weights, post_norm_feedback=True)
    hidden, normed = (network(tokens, features, positions) for network in (pre, post))
    assert torch.equal(pre.norm(hidden), normed)
    assert not torch.equal(hidden, normed)
    assert torch.equal(pre.head(hidden), post.head(normed))


def test_q_and_k_turn_with_the_position_and_v_does_not() -> None:
    network = network_of(random_weights(3))
    tokens, features = torch.zeros(2, dtype=torch.int64), random(1, 64).expand(2, 64)
    q, k, v, _ = network.enter(tokens, features, torch.tensor([3, 63]))
    assert not torch.allclose(q[0], q[1])
    assert not torch.allclose(k[0], k[1])
    assert torch.equal(v[0], v[1])
