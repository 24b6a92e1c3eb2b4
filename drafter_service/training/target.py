"""The target as training runs it: whole rows of text at once, at the precision that is served."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from drafter_service.training.fake_quantised import QuantisedLinear, product, quantise
from drafter_service.training.rollouts_config import PRECISIONS
from graph_runtime.architecture import DecoderConfig, read_config
from graph_runtime.checkpoint import load_weights
from graph_runtime.decoder import Decoder, DecoderLayer
from graph_runtime.load import torch_device
from graph_runtime.model_files import model_hash, tokenizer_hash
from splitspec.errors import UserError

MAX_ROW_LENGTH = 8192
"""Positions of the RoPE tables, where the model has as many."""


class RowShape:
    """What a pass's rows are; the attention modules of all layers read it."""

    def __init__(self) -> None:
        self.length = 0


class TrainingTarget:
    """A frozen target on one device."""

    def __init__(
        self,
        decoder: Decoder,
        shape: RowShape,
        config: DecoderConfig,
        *,
        precision: str,
        model_id: str,
        model_hash: str,
        tokenizer_hash: str,
    ) -> None:
        """Wrap a loaded decoder; use `load_training_target` instead."""
        self.decoder = decoder
        self._shape = shape
        self.config = config
        self.precision = precision
        self.model_id = model_id
        self.model_hash = model_hash
        self.tokenizer_hash = tokenizer_hash
        self.device = decoder.norm.weight.device
        self.dtype = decoder.norm.weight.dtype
        """What activations are computed in: float32, or bfloat16."""

    @property
    def max_row_length(self) -> int:
        """Return the most tokens of a row."""
        return min(self.config.max_position_embeddings, MAX_ROW_LENGTH)

    @torch.no_grad()
    def forward(
        self, tokens: torch.Tensor, tap_layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows that begin at position 0 and have no padding.

        Args:
            tokens: [B, S] int64 on the target's device.
            tap_layers: T 0-based layers, ascending.

        Returns:
            taps: [B, S, T, H], the layers' outputs.
            final: [B, S, H], what the head takes: the last layer's output after the last norm.
        """
        rows, length = tokens.shape
        assert 1 <= length <= self.max_row_length, length
        assert tap_layers, "at least one layer is tapped"
        assert list(tap_layers) == sorted(set(tap_layers)), tap_layers
        self.decoder.tap_layers = tuple(tap_layers)
        self._shape.length = length
        positions = torch.arange(length, device=tokens.device).repeat(rows)
        hidden, taps = self.decoder.hidden(tokens.reshape(-1), positions)
        final = self.decoder.norm(hidden).view(rows, length, -1)
        return taps.view(rows, length, len(tap_layers), -1), final

    @torch.no_grad()
    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] float32 of `final` [..., H], as the head at this precision does.

        NOTE: not rounded to bfloat16 on the way, whose step near 20 is 0.125: tokens would tie.
        """
        head = self.decoder.lm_head
        if isinstance(head, QuantisedLinear):
            return head.exact(final)
        return product(final, head.weight)

    @property
    def head_weight(self) -> torch.Tensor:
        """Return the head [V, H] in the dtype of activations; 8da8w: dequantised."""
        return self.weight("lm_head.weight")

    @property
    def embed_weight(self) -> torch.Tensor:
        """Return the embedding [V, H] in the dtype of activations; 8da8w: dequantised."""
        return self.weight("embed_tokens.weight")

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight in the dtype of activations; 8da8w: dequantised.

        Args:
            name: as in an HF checkpoint, less `model.`: `layers.29.mlp.up_proj.weight`.
        """
        path, _, attribute = name.rpartition(".")
        module = self.decoder.get_submodule(path)
        if isinstance(module, QuantisedLinear) and attribute == "weight":
            return module.dequantised().to(self.dtype)
        return cast(torch.Tensor, getattr(module, attribute)).detach()

    def decoder_with(self, attentions: Sequence[nn.Module]) -> Decoder:
        """Return a decoder of the same weights, not copies, around other attention modules."""
        shared = [*self.decoder.parameters(), *self.decoder.buffers()]
        twin = copy.deepcopy(self.decoder, {id(tensor): tensor for tensor in shared})
        for layer, attention in zip(twin.layers, attentions, strict=True):
            cast(DecoderLayer, layer).self_attn.attention = attention
        return twin


class RowsAttention(nn.Module):
    """Causal attention of one layer inside rows of equal length."""

    def __init__(self, shape: RowShape, sliding_window: int | None) -> None:
        """Attend to the last `sliding_window` positions, or to all for None."""
        super().__init__()
        self.shape = shape
        self.sliding_window = sliding_window

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,  # noqa: ARG002 - rows begin at 0
        slot: torch.Tensor | None,  # noqa: ARG002
    ) -> torch.Tensor:
        """Return [B * S, n_heads, D] of q like it, k and v [B * S, n_kv_heads, D]."""
        shape, length = q.shape, self.shape.length
        q, k, v = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        share = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(share, dim=1) for x in (k, v))
        window = self.sliding_window
        if window is None or window >= length:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            place = torch.arange(length, device=q.device)
            distance = place[:, None] - place
            mask = (distance >= 0) & (distance < window)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return mixed.transpose(1, 2).reshape(shape)


def load_training_target(
    folder: Path, *, device: str, precision: str, cache_dir: Path
) -> TrainingTarget:
    """Load the model in `folder`.

    Args:
        folder: HF layout.
        device: "cpu", "cuda" or "cuda:1".
        precision: "fp32"; "bf16"; or "8da8w": linears, head and embedding as the program of that
            name computes them, the rest in bfloat16 on CUDA and in float32 on a CPU.
        cache_dir: where the model's hash is kept.

    Raises:
        UserError: what is wrong with the folder or an argument, in one line.
    """
    if precision not in PRECISIONS:
        raise UserError(f"--precision {precision!r} is not one of {', '.join(PRECISIONS)}")
    place = torch_device(device)
    config = read_config(folder)
    shape = RowShape()
    halved = precision == "bf16" or (precision == "8da8w" and place.type == "cuda")
    dtype = torch.bfloat16 if halved else torch.float32
    try:
        decoder = Decoder(
            config,
            attentions=[RowsAttention(shape, window) for window in config.sliding_windows],
            tap_layers=(),
            max_context_length=min(config.max_position_embeddings, MAX_ROW_LENGTH),
        ).requires_grad_(False)
        load_dtype = torch.float32 if precision == "8da8w" else dtype
        decoder = decoder.to(device=place, dtype=load_dtype)
    except (RuntimeError, MemoryError) as error:  # torch has no class of its own for it on a CPU
        raise UserError(
            f"a model of config.json's shape does not fit in the memory of {device}"
        ) from error
    load_weights(decoder, folder, tied=config.tied)
    if precision == "8da8w":
        quantise(decoder, dtype)
    return TrainingTarget(
        decoder.eval(),
        shape,
        config,
        precision=precision,
        model_id=folder.name,
        model_hash=model_hash(folder, cache_dir),
        tokenizer_hash=tokenizer_hash(folder),
    )
