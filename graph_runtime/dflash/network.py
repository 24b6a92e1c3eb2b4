"""The draft's network, straight down the page, for every variant that `DFlashConfig` tells of.

    c = hidden_norm(fc(taps))                      once a committed position: its feature
    x = embed_tokens([pending, MASK, ..., MASK])   at the positions from the committed length on
    per layer:  u = input_layernorm(x)
                q = q_norm(q_proj(u)); k = k_norm(k_proj(.)), v = v_proj(.) of c and of u
                x = x + o_proj(attention(q, k, v))
                x = x + mlp(post_attention_layernorm(x))
    logits = lm_head(norm(x))

The phases are apart, because what runs them differs: linears take the rows of many sessions at
once, while attention is a session's own. It is handed in, one module a layer, as in
graph_runtime/decoder.py; it writes and reads keys and values as whoever runs the network keeps
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.utils import skip_init

from graph_runtime.decoder import MLP, RMSNorm, SelfAttention
from graph_runtime.dflash.config import DFlashConfig
from graph_runtime.drafts.tensors import fusion_weights
from graph_runtime.rope import rope_tables
from graph_runtime.tiles import by_tiles


class ContextFusion(nn.Module):
    """What turns a raw row, the target's taps side by side, into the feature of its position.

    It stays in float32, so that the verifier's features are the drafter's.
    """

    def __init__(self, config: DFlashConfig) -> None:
        """Build the linear and its norm, with unset weights."""
        super().__init__()
        self.fc = skip_init(nn.Linear, config.raw_row_width, config.hidden_size, bias=False)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return features [N, H] float32 of raw rows [N, raw_row_width] of any floating dtype.

        In tiles of a fixed height, so that a row's bits do not depend on N or on its place.
        """
        (features,) = by_tiles(lambda tile: [self.norm(self.fc(tile))], rows.float())
        return features


def build_fusion(config: DFlashConfig, tensors: Mapping[str, torch.Tensor]) -> ContextFusion:
    """Return the fusion with its weights, those of a checkpoint's `tensors` named `fusion.*`."""
    fusion = ContextFusion(config)
    fusion.load_state_dict(fusion_weights(tensors))
    return fusion.eval().requires_grad_(False)


class DFlashLayer(nn.Module):
    """The parts of one layer."""

    def __init__(self, config: DFlashConfig, attention: nn.Module) -> None:
        """Build the layer around the attention module it is given."""
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, attention)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the layer's output [N, H] of block slots x [N, H]; `cos` and `sin` [N, 1, D]."""
        q, k, v = self.enter(x, cos, sin)
        return self.leave(x, self.self_attn.attention(q, k, v, positions, None))

    def enter(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what attention takes: q [N, n_heads, D], k and v [N, n_kv_heads, D]."""
        u = self.input_layernorm(x)
        k, v = self.self_attn.keys_values(u, cos, sin)
        return self.self_attn.queries(u, cos, sin), k, v

    def leave(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [N, H] of x and what attention mixed [N, n_heads, D]."""
        x = x + self.self_attn.output(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashNetwork(nn.Module):
    """The whole network. Parameter names are those of graph_runtime/dflash/layouts.py."""

    def __init__(
        self,
        config: DFlashConfig,
        *,
        attentions: Sequence[nn.Module],
        max_position: int,
    ) -> None:
        """Build the network with unset weights.

        Args:
            config: the shape.
            attentions: one a layer; see the module's docstring.
            max_position: positions that the RoPE tables cover: the longest context and a block.
                NOTE: the draft's own max_position_embeddings is often too small and never used.
        """
        super().__init__()
        assert len(attentions) == config.n_layers, (len(attentions), config.n_layers)
        self.config = config
        self.embed_tokens = skip_init(nn.Embedding, config.vocab_size, config.hidden_size)
        self.fusion = ContextFusion(config)
        self.layers = nn.ModuleList(DFlashLayer(config, core) for core in attentions)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = skip_init(nn.Linear, config.hidden_size, config.draft_vocab_size, bias=False)
        cos, sin = rope_tables(config.rope, config.head_dim, max_position)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def context(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's k, rotated, and v [N, n_kv_heads, D] of context rows.

        Args:
            features: [N, H] in the network's dtype.
            positions: [N] int64, their own.
        """
        cos, sin = self.turns(positions)
        layers: list[DFlashLayer] = list(self.layers)  # type: ignore[arg-type]
        return [layer.self_attn.keys_values(features, cos, sin) for layer in layers]

    def block(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output [N, H] of block slots: tokens and positions [N] int64."""
        cos, sin = self.turns(positions)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, positions)
        return x

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embedding [N, H] of tokens [N] int64, scaled as the target's is."""
        x = self.embed_tokens(tokens)
        return x if self.config.embedding_scale == 1.0 else x * self.config.embedding_scale

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [N, Vd] of the last layer's output [N, H]; see `softcapped`."""
        return self.lm_head(self.norm(hidden))

    def turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [N, 1, D] of positions [N] int64."""
        cos, sin = self.get_buffer("cos"), self.get_buffer("sin")
        return cos[positions][:, None, :], sin[positions][:, None, :]


def softcapped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return float32 logits as the target caps its own: cap * tanh(logits / cap)."""
    return logits.float() if cap is None else cap * torch.tanh(logits.float() / cap)


def block_tokens(config: DFlashConfig, pending_token_id: int, block_length: int) -> list[int]:
    """Return the tokens of a block: the pending token, then masks."""
    return [pending_token_id] + [config.mask_token_id] * (block_length - 1)
