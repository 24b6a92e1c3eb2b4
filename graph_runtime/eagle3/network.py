"""The draft's network, straight down the page, for every variant that `Eagle3Config` tells of.

It computes draft slots: the token at position p + 1, the feature of position p, RoPE position p.

    e = input_layernorm(embed_tokens[token])       g = the feature
    x = cat(e, hidden_norm(g))                     the embedding first
    r = g + o_proj(attention(q, k, v of x))        or hidden_norm(g) + ..., norm_before_residual
    h = r + mlp(post_attention_layernorm(r))       fed back as the next slot's feature
    logits = lm_head(norm(h))                      EAGLE-3.1 feeds norm(h) back instead

The phases are apart, because what runs them differs: attention is a session's own, while linears
take the slots of many sessions at once. `attention` is handed in as in graph_runtime/decoder.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.utils import skip_init

from graph_runtime.decoder import MLP, RMSNorm, SelfAttention
from graph_runtime.drafts.tensors import fusion_weights
from graph_runtime.eagle3.config import Eagle3Config
from graph_runtime.rope import rope_tables
from graph_runtime.tiles import by_tiles


class Fusion(nn.Module):
    """What turns a raw row, the target's taps side by side, into the feature of its position.

    It stays in float32, so that the verifier's features are the drafter's.
    """

    def __init__(self, config: Eagle3Config) -> None:
        """Build the norms and the linear that `config` asks for, with unset weights."""
        super().__init__()
        self.row_width = config.raw_row_width
        self.target_hidden_size = config.target_hidden_size
        self.target_norm = self.input_norm = self.fc_norm = self.fc = None
        eps = config.rms_norm_eps
        if not config.use_aux_hidden_state:
            assert config.raw_row_width == config.hidden_size, config
            self.target_norm = RMSNorm(config.target_hidden_size, config.target_norm_eps)
            return
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.raw_row_width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, eps) for _ in config.tap_layers
            )
        self.fc = skip_init(nn.Linear, config.raw_row_width, config.hidden_size, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return features [N, H] float32 of raw rows [N, row_width] of any floating dtype.

        In tiles of a fixed height, so that a row's bits do not depend on N or on its place.
        """
        (features,) = by_tiles(lambda tile: [self.fuse(tile)], rows.float())
        return features

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        """Return features [N, H] of raw rows [N, row_width] float32, in one piece."""
        if self.target_norm is not None:
            return self.target_norm(rows)
        if self.input_norm is not None:
            rows = self.input_norm(rows)
        if self.fc_norm is not None:
            width = self.target_hidden_size
            # Slices, because programs have no split.
            taps = [rows[:, i * width : (i + 1) * width] for i in range(len(self.fc_norm))]
            rows = torch.cat([n(tap) for n, tap in zip(self.fc_norm, taps, strict=True)], dim=-1)
        assert self.fc is not None
        return self.fc(rows)


def build_fusion(config: Eagle3Config, tensors: Mapping[str, torch.Tensor]) -> Fusion:
    """Return the fusion with its weights, those of a checkpoint's `tensors` named `fusion.*`."""
    fusion = Fusion(config)
    fusion.load_state_dict(fusion_weights(tensors))
    return fusion.eval().requires_grad_(False)


class Eagle3Layer(nn.Module):
    """The one layer's parts: attention reads embedding and feature side by side."""

    def __init__(self, config: Eagle3Config, attention: nn.Module) -> None:
        """Build the layer around the attention module it is given."""
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps) if config.hidden_norm else None
        self.self_attn = SelfAttention(config, attention, input_width=2 * hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(config)


class Eagle3Network(nn.Module):
    """The whole network. Parameter names are those of graph_runtime/eagle3/layouts.py."""

    def __init__(
        self, config: Eagle3Config, *, attention: nn.Module, max_context_length: int
    ) -> None:
        """Build the network with unset weights.

        Args:
            config: the shape.
            attention: see the module's docstring.
            max_context_length: positions that the RoPE tables cover: those served. NOTE: the
                draft's own max_position_embeddings is often too small and never used.
        """
        super().__init__()
        self.config = config
        self.embed_tokens = skip_init(nn.Embedding, config.vocab_size, config.hidden_size)
        self.fusion = Fusion(config)
        self.layer = Eagle3Layer(config, attention)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = skip_init(nn.Linear, config.hidden_size, config.draft_vocab_size, bias=False)
        cos, sin = rope_tables(config.rope, config.head_dim, max_context_length)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        slot: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the recurrent feature [N, H] of draft slots; arguments as in `enter`."""
        q, k, v, residual = self.enter(tokens, features, positions)
        return self.leave(self.layer.self_attn.attention(q, k, v, positions, slot), residual)

    def enter(
        self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q [N, n_heads, D], k and v [N, n_kv_heads, D] and the residual [N, H].

        Args:
            tokens: [N] int64 target ids, those of `positions` + 1.
            features: [N, H] in the network's dtype: fused rows or recurrent features.
            positions: [N] int64.
        """
        x, residual = self.join(tokens, features)
        return (self.queries(x, positions), *self.keys_values(x, positions), residual)

    def join(
        self, tokens: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what attention reads, [N, 2H], and the residual [N, H]."""
        layer = self.layer
        normed = features if layer.hidden_norm is None else layer.hidden_norm(features)
        embedded = layer.input_layernorm(self.embed_tokens(tokens))
        residual = normed if self.config.norm_before_residual else features
        return torch.cat((embedded, normed), dim=-1), residual

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return q [N, n_heads, D] of joined rows x [N, 2H], rotated and not scaled."""
        return self.layer.self_attn.queries(x, *self._turns(positions))

    def keys_values(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k, rotated, and v [N, n_kv_heads, D] of joined rows x [N, 2H]."""
        return self.layer.self_attn.keys_values(x, *self._turns(positions))

    def leave(self, mixed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the recurrent feature [N, H] of the mixed values [N, n_heads, D]."""
        hidden = residual + self.layer.self_attn.output(mixed)
        hidden = hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))
        return self.norm(hidden) if self.config.post_norm_feedback else hidden

    def head(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits [N, Vd] of recurrent features [N, H]."""
        normed = features if self.config.post_norm_feedback else self.norm(features)
        return self.lm_head(normed)

    def _turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.get_buffer("cos"), self.get_buffer("sin")
        return cos[positions][:, None, :], sin[positions][:, None, :]
