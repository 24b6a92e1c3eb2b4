"""DFlash (arXiv:2602.06036): a draft of a few layers that fills a block of masks in one pass.

    c = hidden_norm(fc(features))                  of the positions before the pending token's
    x = embedding([pending, MASK, ..., MASK])      at the positions P .. P + B - 1
    per layer: keys and values of c and of the block itself; every slot sees both
    logits = head(norm(x)) of the slots 1 .. B - 1

Training draws pending tokens ("anchors") among the assistant's positions and holds slot j to the
target's own distribution at P + j, given the text before it: soft cross-entropy, weighted
exp(-(j - 1) / 4), since a slot counts only where those before it stood. Layers start as the
target's last ones; embedding and head are the target's and stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from drafter_service.training.batches import Batch, Loss
from drafter_service.training.block_attention import BlockAttention
from drafter_service.training.dflash_settings import (
    DFlashOptions,
    DFlashSettings,
    choose_mask_token,
    settings_for,
)
from drafter_service.training.dflash_start import starting_parameters
from drafter_service.training.fake_quantised import product
from drafter_service.training.features import FIRST_POSITIONS
from drafter_service.training.publish import dflash_config, fold_tap_rms, publish_dflash
from drafter_service.training.run_config import RunConfig
from drafter_service.training.soft_cross_entropy import SoftCrossEntropy
from drafter_service.training.store import Rollouts
from drafter_service.training.target import TrainingTarget
from drafter_service.training.walk import DRAFT_COUNT
from graph_runtime.decoder import rotate
from graph_runtime.rope import rope_tables
from splitspec.commands import check_range
from splitspec.folders import model_folder

DECAY_SLOTS = 4.0
TILE_ANCHORS = 64
"""Blocks a row that `accepted` drafts at once."""
_SAMPLE_ROWS = 4
"""Rows that the q/k norms are measured on."""


class DFlashRecipe:
    """See `batches.Recipe`."""

    method = "dflash"

    def __init__(
        self, target: TrainingTarget, settings: DFlashSettings, *, tokens: torch.Tensor, seed: int
    ) -> None:
        """Start a draft from the target's last layers.

        Args:
            target: its device and dtype are the training's.
            settings: see `dflash_settings.settings_for`.
            tokens: [R, S] int64, a few rows of text that the q/k norms are measured on.
            seed: of what is drawn: `fc.weight`.
        """
        self.settings = settings
        self.tap_layers = settings.tap_layers
        self.config = target.config
        self.parameters = starting_parameters(
            target,
            n_layers=settings.n_layers,
            tap_count=len(settings.tap_layers),
            tokens=tokens,
            seed=seed,
        )
        self._embedding, self._head = target.embed_weight, target.head_weight
        end = target.max_row_length + settings.block_size
        tables = rope_tables(self.config.rope, self.config.head_dim, end)
        self._cos, self._sin = (t.to(target.device)[:, None] for t in tables)
        slots = torch.arange(settings.block_size - 1, device=target.device)
        self._slot_weight = torch.exp(-slots / DECAY_SLOTS)
        compiled = target.device.type == "cuda"
        self._attention = BlockAttention(compiled=compiled)
        self._cross_entropy = SoftCrossEntropy(compiled=compiled)
        # Rows and tiles of other sizes than a step's would each be compiled anew.
        self._eager_attention = BlockAttention(compiled=False)
        self.facts: dict[str, Any] = {
            "layers": settings.n_layers,
            "tap_layers": list(settings.tap_layers),
            "block_length": settings.block_size,
            "mask_token_id": settings.mask_token_id,
            "anchors": settings.anchor_count,
        }

    def loss(self, batch: Batch) -> Loss:
        """Return the loss of blocks at random anchors; D = B - 1."""
        anchors, drawn = self._draw_anchors(batch.roles)
        rows, count = anchors.shape
        weights = {name: p.to(batch.final.dtype) for name, p in self.parameters.items()}
        hidden = self.hidden(weights, batch, anchors, self._attention)[:, :, 1:]
        # Slot j drafts the token at P + j, which the target decides at P + j - 1.
        slots = torch.arange(hidden.shape[2], device=anchors.device)
        decided = (anchors[..., None] + slots).flatten(1)
        final = _rows_at(batch.final, decided)
        likeliest = batch.likeliest.gather(1, decided)
        chosen = batch.roles.gather(1, decided + 1).view(rows, count, -1) == 1
        inside = chosen.cumprod(-1) * drawn[:, None, None]
        weight = inside * self._slot_weight
        share = (weight / weight.sum().clamp(min=1e-6)).view(-1)
        total, entropy, hit = self._cross_entropy(
            hidden.flatten(0, 2), final.flatten(0, 1), self._head, likeliest.flatten(), share
        )
        counted = inside.float().flatten(0, 1)
        return Loss(
            total=total,
            correct=(hit.view_as(counted) * counted).sum(0),
            cross_entropy=(entropy.view_as(counted) * counted).sum(0),
            weight=counted.sum(0),
        )

    @torch.no_grad()
    def accepted(self, parameters: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return [R, S] int64: see `batches.Recipe`. A block is drafted greedily at each position.

        Its slots see each other, so all of them are drafted however few are counted.
        """
        rows, length = batch.tokens.shape
        weights = {name: p.to(batch.final.dtype) for name, p in parameters.items()}
        drafts = min(self.settings.block_size - 1, DRAFT_COUNT)
        # Past the end of the row stands what no draft equals.
        text = F.pad(batch.tokens, (0, drafts), value=-1)
        every = torch.arange(length, device=text.device)
        counts = []
        for tile in every.split(TILE_ANCHORS):
            hidden = self.hidden(weights, batch, tile.expand(rows, -1), self._eager_attention)
            drafted = product(hidden[:, :, 1 : drafts + 1], self._head).argmax(-1)
            following = tile[:, None] + torch.arange(1, drafts + 1, device=text.device)
            stands = drafted == text[:, following]
            counts.append(stands.cumprod(-1).sum(-1))
        return torch.cat(counts, dim=1)

    def publish(
        self,
        folder: Path,
        parameters: Mapping[str, torch.Tensor],
        *,
        tap_rms: torch.Tensor,
        model_card: str,
    ) -> None:
        """Write a checkpoint in z-lab's layout: see `batches.Recipe`."""
        folded = fold_tap_rms(parameters["fc.weight"].detach(), tap_rms)
        config = dflash_config(
            self.config,
            tap_layers=self.tap_layers,
            n_layers=self.settings.n_layers,
            block_size=self.settings.block_size,
            mask_token_id=self.settings.mask_token_id,
        )
        tensors = {**parameters, "fc.weight": folded}
        publish_dflash(folder, tensors, config=config, model_card=model_card)

    def hidden(
        self,
        weights: Mapping[str, torch.Tensor],
        batch: Batch,
        anchors: torch.Tensor,
        attention: BlockAttention,
    ) -> torch.Tensor:
        """Return what the head takes of blocks, [R, A, B, H] in the compute dtype.

        Args:
            weights: `parameters` in the compute dtype.
            batch: its tokens at the anchors are the blocks' pending tokens, its features before
                them their context.
            anchors: [R, A] int64, positions of pending tokens.
            attention: of blocks of that many anchors.
        """
        block, length = self.settings.block_size, batch.tokens.shape[1]
        place = torch.arange(max(block, length), device=anchors.device)
        context = batch.features.flatten(2) @ weights["fc.weight"].t()
        context = self._norm(context, weights["hidden_norm.weight"])
        context_turns = self._cos[:length], self._sin[:length]
        unseen = place[:length] >= anchors[..., None]
        tokens = torch.full_like(anchors, self.settings.mask_token_id)[..., None].repeat(
            1, 1, block
        )
        tokens[..., 0] = batch.tokens.gather(1, anchors)
        x = self._embedding[tokens].flatten(1, 2)
        positions = (anchors[..., None] + place[:block]).flatten(1)
        block_turns = self._cos[positions], self._sin[positions]
        for i in range(self.settings.n_layers):
            own = _layer(weights, i)
            u = self._norm(x, own["input_layernorm.weight"])
            q = self._heads(u, own, "q", block_turns)
            block_k, block_v = self._heads(u, own, "k", block_turns), self._heads(u, own, "v")
            k, v = self._heads(context, own, "k", context_turns), self._heads(context, own, "v")
            mixed = attention(q, (k, v), (block_k, block_v), unseen)
            x = x + mixed @ own["self_attn.o_proj.weight"].t()
            u = self._norm(x, own["post_attention_layernorm.weight"])
            gate, up = (u @ own[f"mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ own["mlp.down_proj.weight"].t()
        return self._norm(x, weights["norm.weight"]).view(*anchors.shape, block, -1)

    def _heads(
        self,
        x: torch.Tensor,
        weights: Mapping[str, torch.Tensor],
        part: str,
        turns: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return q, k or v [R, N, heads, D] of x [R, N, H]; q and k normed and rotated."""
        y = x @ weights[f"self_attn.{part}_proj.weight"].t()
        y = y.view(*y.shape[:2], -1, self.config.head_dim)
        if turns is None:
            return y
        return rotate(self._norm(y, weights[f"self_attn.{part}_norm.weight"]), *turns)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _draw_anchors(self, roles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return anchors [R, A] int64, and whether a row has any, [R] bool.

        Without replacement where a row has as many positions, else all of them in turn.
        """
        length, count = roles.shape[1], self.settings.anchor_count
        last = length - self.settings.block_size
        assert last >= FIRST_POSITIONS, f"rows of {length} tokens have no room for a block"
        place = torch.arange(length, device=roles.device)
        fits = (roles == 1) & (place >= FIRST_POSITIONS) & (place <= last)
        drawn = torch.rand(roles.shape, device=roles.device).masked_fill(~fits, -1.0)
        order = drawn.topk(min(count, length), dim=1).indices
        found = fits.sum(1, keepdim=True)
        turn = torch.arange(count, device=roles.device) % found.clamp(1, order.shape[1])
        return order.gather(1, turn).clamp(max=last), found[:, 0] > 0


def _layer(weights: Mapping[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
    """Return the weights of layer i by their names in it."""
    prefix = f"layers.{i}."
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def _rows_at(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return [R, N, H] of rows [R, S, H] at positions [R, N]."""
    return rows.gather(1, positions[..., None].expand(-1, -1, rows.shape[-1]))


def build_dflash(
    config: RunConfig, options: DFlashOptions, target: TrainingTarget, rollouts: Rollouts
) -> DFlashRecipe:
    """Return a new draft for `target`.

    Raises:
        UserError: names the flag, its value and the range.
    """
    longest = rollouts.tokens.shape[1] - FIRST_POSITIONS
    check_range("--block-length", options.block_length, 2, longest)
    mask_token_id = options.mask_token_id
    if mask_token_id is None:
        held = set(rollouts.tokens.unique().tolist())
        mask_token_id = choose_mask_token(model_folder(config.target, config.cache_dir), held)
    settings = settings_for(
        target.config, options, tap_layers=config.tap_layers, mask_token_id=mask_token_id
    )
    sample = rollouts.tokens[rollouts.training_rows[:_SAMPLE_ROWS]]
    tokens = sample.to(target.device, torch.int64)
    return DFlashRecipe(target, settings, tokens=tokens, seed=config.seed)
