"""EAGLE-3 (arXiv:2503.01840): a draft of one layer, trained on its own features fed back.

Chain i begins where the token at i + 1 is pending: depth d works at slot i + d, is fed the token at
i + d + 1 and drafts that at i + d + 2. Depth 0 takes the target's fused row; each depth after it
takes what the depth before put out, as served. So tensors of all depths line up by chain, and
every depth trains M = S - 1 - depths chains a row.

    e = input_layernorm(embedding[token])          f = fc(features), later h of the depth before
    r = f + o_proj(chain attention of q, k, v of cat(e, hidden_norm(f)))
    h = r + mlp(post_attention_layernorm(r))       logits = lm_head(norm(h))

The loss of depth d is the cross-entropy to the target's softmax over the draft vocabulary, times
0.8^d; positions where the target prefers a token that the draft lacks do not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from drafter_service.training.batches import Batch, Loss
from drafter_service.training.chain_attention import chain_attention
from drafter_service.training.fake_quantised import product
from drafter_service.training.features import FIRST_POSITIONS
from drafter_service.training.head_cross_entropy import HeadCrossEntropy
from drafter_service.training.publish import eagle3_config, fold_tap_rms, publish_eagle3
from drafter_service.training.target import TrainingTarget
from drafter_service.training.walk import DRAFT_COUNT
from graph_runtime.decoder import rotate
from graph_runtime.rope import rope_tables

USER_WEIGHT = 0.2
"""Of a position outside assistant turns, whose own weight is 1."""
DEPTH_DECAY = 0.8
_LAYER = "midlayer."


@dataclass(frozen=True, kw_only=True)
class Eagle3Shape:
    """What is chosen of a draft; all else is the target's."""

    tap_layers: tuple[int, ...]
    """T 0-based layers, ascending."""
    target_ids: torch.Tensor
    """[Vd] int64, strictly increasing: the target id of each row of the head."""
    intermediate_size: int
    unroll: int
    """Depths that are trained."""


class Eagle3Recipe:
    """See `batches.Recipe`."""

    method = "eagle3"

    def __init__(
        self, target: TrainingTarget, shape: Eagle3Shape, *, seed: int, facts: dict[str, Any]
    ) -> None:
        """Start a draft: a random body, the head's rows from the target.

        Args:
            target: its device and dtype are the training's.
            shape: see there.
            seed: of the body's weights.
            facts: see `batches.Recipe`.
        """
        self.shape, self.facts = shape, facts
        self.tap_layers = shape.tap_layers
        self.config = target.config
        self._embedding = target.embed_weight
        self._ids = shape.target_ids.to(target.device)
        self._teacher_head = target.head_weight[self._ids].contiguous()
        self._place = torch.full((target.config.vocab_size,), -1, device=target.device)
        self._place[self._ids] = torch.arange(len(self._ids), device=target.device)
        tables = rope_tables(
            self.config.rope, self.config.head_dim, target.max_row_length + DRAFT_COUNT
        )
        self._cos, self._sin = (table.to(target.device)[:, None] for table in tables)
        self._cross_entropy = HeadCrossEntropy(compiled=target.device.type == "cuda")
        start = starting_parameters(target, shape, seed=seed)
        self.parameters = {
            name: tensor.to(target.device).contiguous().requires_grad_(True)
            for name, tensor in start.items()
        }

    def loss(self, batch: Batch) -> Loss:
        """Return the loss of `batch` under `parameters`."""
        weights = self._cast(self.parameters, batch.features.dtype)
        hidden = self._unroll(weights, batch, self.shape.unroll)
        chains = hidden[0].shape[1]
        with torch.no_grad():
            teacher = self._cross_entropy.teacher(
                product(batch.final, self._teacher_head), batch.final.dtype
            )
        total = torch.zeros((), device=batch.tokens.device)
        sums: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for depth, rows in enumerate(hidden):
            taught = slice(depth + 1, depth + 1 + chains)
            entropy, argmax = self._cross_entropy(
                rows, weights["lm_head.weight"], teacher[:, taught]
            )
            with torch.no_grad():
                best = self._place[batch.likeliest[:, taught]]
                weight = self._weight(batch, depth, chains) * (best >= 0)
                count = weight.sum()
                hit = ((argmax == best) * weight).sum()
            summed = (entropy * weight).sum()
            total = total + DEPTH_DECAY**depth * summed / count.clamp(min=1.0)
            sums.append((hit, summed.detach(), count))
        correct, cross_entropy, weight = (torch.stack(column) for column in zip(*sums, strict=True))
        return Loss(total=total, correct=correct, cross_entropy=cross_entropy, weight=weight)

    @torch.no_grad()
    def accepted(self, parameters: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return [R, S] int64: see `batches.Recipe`; 0 where 7 drafts would pass the row's end.

        Where a draft token differs from the text its chain ends, so until then the text's tokens
        are the draft's own.
        """
        weights = self._cast(parameters, batch.features.dtype)
        hidden = self._unroll(weights, batch, DRAFT_COUNT)
        chains = hidden[0].shape[1]
        accepted = torch.zeros_like(batch.tokens)
        alive = torch.ones_like(batch.tokens[:, :chains], dtype=torch.bool)
        for depth, rows in enumerate(hidden):
            logits = product(rows, weights["lm_head.weight"])  # bf16 logits would tie
            drafted = self._ids[logits.argmax(-1)]
            alive = alive & (drafted == batch.tokens[:, depth + 2 : depth + 2 + chains])
            accepted[:, 1 : 1 + chains] += alive
        return accepted

    def publish(
        self,
        folder: Path,
        parameters: Mapping[str, torch.Tensor],
        *,
        tap_rms: torch.Tensor,
        model_card: str,
    ) -> None:
        """Write a checkpoint that SafeAILab's and SpecForge's readers take."""
        fc = fold_tap_rms(parameters["fc.weight"], tap_rms)
        publish_eagle3(
            folder,
            {**parameters, "fc.weight": fc},
            target_ids=self.shape.target_ids,
            config=eagle3_config(
                self.config,
                tap_layers=self.tap_layers,
                intermediate_size=self.shape.intermediate_size,
                draft_vocab_size=len(self.shape.target_ids),
            ),
            model_card=model_card,
        )

    def _cast(
        self, parameters: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        return {name.removeprefix(_LAYER): p.to(dtype) for name, p in parameters.items()}

    def _weight(self, batch: Batch, depth: int, chains: int) -> torch.Tensor:
        """Return the weights [R, M] of what the chains' slots of a depth draft."""
        drafted = batch.roles[:, depth + 2 : depth + 2 + chains] == 1
        slots = torch.arange(depth, depth + chains, device=drafted.device)
        weight = torch.where(drafted, 1.0, USER_WEIGHT)
        return weight * (slots >= FIRST_POSITIONS)

    def _unroll(
        self, weights: Mapping[str, torch.Tensor], batch: Batch, depths: int
    ) -> list[torch.Tensor]:
        """Return what the head takes, [R, M, H], at each depth."""
        chains = batch.tokens.shape[1] - 1 - depths
        assert chains >= 1, (batch.tokens.shape, depths)
        embedded = F.embedding(batch.tokens[:, 1:-1], self._embedding)
        embedded = self._norm(embedded, weights["input_layernorm.weight"])
        feature = F.linear(batch.features[:, :chains].flatten(2), weights["fc.weight"])
        hidden: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for depth in range(depths):
            token = embedded[:, depth : depth + chains]
            joined = torch.cat((token, self._norm(feature, weights["hidden_norm.weight"])), -1)
            mixed = self._attend(weights, joined, depth, keys, values)
            feature = feature + F.linear(mixed, weights["self_attn.o_proj.weight"])
            feature = feature + self._mlp(weights, feature)
            hidden.append(self._norm(feature, weights["norm.weight"]))
        return hidden

    def _attend(
        self,
        weights: Mapping[str, torch.Tensor],
        joined: torch.Tensor,
        depth: int,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """Return mixed values [R, M, heads * D] of joined rows [R, M, 2H]; append this depth's."""
        config, chains = self.config, joined.shape[1]
        turns = [table[depth : depth + chains] for table in (self._cos, self._sin)]
        q, k, v = (
            F.linear(joined, weights[f"self_attn.{name}_proj.weight"]).unflatten(-1, (heads, -1))
            for name, heads in (
                ("q", config.n_heads), ("k", config.n_kv_heads), ("v", config.n_kv_heads),
            )
        )  # fmt: skip
        share = config.n_heads // config.n_kv_heads
        keys.append(rotate(k, *turns).repeat_interleave(share, dim=2).transpose(1, 2))
        values.append(v.repeat_interleave(share, dim=2).transpose(1, 2))
        mixed = chain_attention(rotate(q, *turns).transpose(1, 2), keys, values)
        return mixed.transpose(1, 2).flatten(2)

    def _mlp(self, weights: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        x = self._norm(x, weights["post_attention_layernorm.weight"])
        gate, up = (F.linear(x, weights[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return F.linear(F.silu(gate) * up, weights["mlp.down_proj.weight"])

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def starting_parameters(
    target: TrainingTarget, shape: Eagle3Shape, *, seed: int
) -> dict[str, torch.Tensor]:
    """Return float32 weights by their published names: the head's rows are the target's."""
    config, taps = target.config, len(shape.tap_layers)
    hidden, inner = config.hidden_size, shape.intermediate_size
    q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    linears: Sequence[tuple[str, int, int]] = (
        ("self_attn.q_proj", q_width, 2 * hidden),
        ("self_attn.k_proj", kv_width, 2 * hidden),
        ("self_attn.v_proj", kv_width, 2 * hidden),
        ("self_attn.o_proj", hidden, q_width),
        ("mlp.gate_proj", inner, hidden),
        ("mlp.up_proj", inner, hidden),
        ("mlp.down_proj", hidden, inner),
    )
    generator = torch.Generator().manual_seed(seed)

    def normal(fan_out: int, fan_in: int, deviation: float) -> torch.Tensor:
        return torch.randn(fan_out, fan_in, generator=generator) * deviation

    started = {"fc.weight": normal(hidden, taps * hidden, 1.0 / math.sqrt(taps * hidden))}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        started[f"{_LAYER}{name}.weight"] = torch.ones(hidden)
    for name, fan_out, fan_in in linears:
        started[f"{_LAYER}{name}.weight"] = normal(fan_out, fan_in, 0.02)
    started["norm.weight"] = target.weight("norm.weight").float().clone()
    ids = shape.target_ids.to(target.device)
    started["lm_head.weight"] = target.head_weight[ids].float()
    return started
