"""The decoder of Llama, Mistral, Qwen2 and Qwen3, straight down the page.

It computes rows: `tokens[N]` at `positions[N]` of some slot. How K/V is stored and attended is
handed in, one module a layer, so that the same decoder runs in torch and is exported to programs:

    attention(q [N, n_heads, D], k [N, n_kv_heads, D], v [N, n_kv_heads, D],
              positions [N] int64, slot) -> [N, n_heads, D]

q and k come rotated and not scaled: the attention module writes k and v, applies 1/sqrt(D), the
causal mask and the layer's sliding window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import skip_init

from graph_runtime.architecture import DecoderConfig
from graph_runtime.rope import rope_tables


class LayerShape(Protocol):
    """What shapes attention and MLP of one layer: a decoder's, or a draft's. Sizes are elements."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def o_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...


class Decoder(nn.Module):
    """The whole network. Parameter names are those of an HF checkpoint without `model.`."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        attentions: Sequence[nn.Module],
        tap_layers: tuple[int, ...],
        max_context_length: int,
    ) -> None:
        """Build the network with unset weights.

        Args:
            config: the shape.
            attentions: one a layer; see the module's docstring.
            tap_layers: 0-based layers whose outputs form a row, ascending.
            max_context_length: positions that the RoPE tables cover.
        """
        super().__init__()
        assert len(attentions) == config.n_layers, (len(attentions), config.n_layers)
        assert list(tap_layers) == sorted(set(tap_layers)), tap_layers
        self.tap_layers = tap_layers
        self.tied = config.tied
        self.embed_tokens = skip_init(nn.Embedding, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, core) for core in attentions)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = skip_init(nn.Linear, config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight
        cos, sin = rope_tables(config.rope, config.head_dim, max_context_length)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, slot: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [N, V] and rows [N, len(tap_layers) * H] of `tokens` [N] int64."""
        hidden, rows = self.hidden(tokens, positions, slot)
        return self.head(hidden), rows

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, slot: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last layer's output [N, H] and rows [N, len(tap_layers) * H]."""
        cos = self.get_buffer("cos")[positions][:, None, :]
        sin = self.get_buffer("sin")[positions][:, None, :]
        x = self.embed_tokens(tokens)
        taps = []
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, positions, slot)
            if i in self.tap_layers:
                taps.append(x)
        return x, torch.cat(taps, dim=-1)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] of the last layer's output [N, H]."""
        return self.lm_head(self.norm(hidden))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, attention: nn.Module) -> None:
        """Build one layer around the attention module it is given."""
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, attention)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slot: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the layer's output [N, H]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, positions, slot)
        return x + self.mlp(self.post_attention_layernorm(x))


class SelfAttention(nn.Module):
    """Projections, q/k norm and RoPE around the attention module that is handed in."""

    def __init__(
        self, config: LayerShape, attention: nn.Module, *, input_width: int | None = None
    ) -> None:
        """Build the projections.

        Args:
            config: the shape.
            attention: see the module's docstring.
            input_width: elements of a row that enters; None: the hidden size.
        """
        super().__init__()
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_kv_heads
        self.head_dim = config.head_dim
        entering = input_width or config.hidden_size
        q_width, kv_width = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        self.q_proj = skip_init(nn.Linear, entering, q_width, bias=config.qkv_bias)
        self.k_proj = skip_init(nn.Linear, entering, kv_width, bias=config.qkv_bias)
        self.v_proj = skip_init(nn.Linear, entering, kv_width, bias=config.qkv_bias)
        self.o_proj = skip_init(nn.Linear, q_width, config.hidden_size, bias=config.o_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = rotate
        """Exported programs put an equal form here that lowers better."""
        self.attention = attention

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slot: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return what attention adds to the residual stream, [N, H], of x [N, input_width]."""
        q = self.queries(x, cos, sin)
        k, v = self.keys_values(x, cos, sin)
        return self.output(self.attention(q, k, v, positions, slot))

    def queries(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return q [N, n_heads, D], rotated and not scaled."""
        q = self.q_proj(x).view(-1, self.n_heads, self.head_dim)
        return self.rotate(self.q_norm(q) if self.qk_norm else q, cos, sin)

    def keys_values(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k, rotated, and v, both [N, n_kv_heads, D]."""
        k = self.k_proj(x).view(-1, self.n_kv_heads, self.head_dim)
        v = self.v_proj(x).view(-1, self.n_kv_heads, self.head_dim)
        return self.rotate(self.k_norm(k) if self.qk_norm else k, cos, sin), v

    def output(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return what attention adds, [N, H], of the mixed values [N, n_heads, D]."""
        return self.o_proj(mixed.reshape(-1, self.n_heads * self.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LayerShape) -> None:
        """Build the projections."""
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = skip_init(nn.Linear, hidden, inner, bias=bias)
        self.up_proj = skip_init(nn.Linear, hidden, inner, bias=bias)
        self.down_proj = skip_init(nn.Linear, inner, hidden, bias=bias)
        self.silu: Callable[[torch.Tensor], torch.Tensor] = F.silu
        """The torch runtime puts a form here whose bits do not depend on a row's place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the MLP adds to the residual stream, [N, H]."""
        return self.down_proj(self.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 (arXiv:1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        """Build the norm over the last `width` elements."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x of any leading shape, normed, in its own dtype."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to x [N, heads, D] with tables [N, 1, D]; halves turn together."""
    left, right = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-right, left), dim=-1) * sin.to(x.dtype)
