"""Quantised forms of linears and of the embedding, in the patterns that XNNPACK recognises.

Activations are quantised per row, at run time, to asymmetric int8; weights once, here. A row's
scale depends on that row alone, so quantisation keeps rows independent of each other (law L4).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers quantized_decomposed

from splitspec.errors import UserError

GROUP = 32
"""Input channels that share a 4-bit scale: torchao's group, and GGUF's Q4_1 block."""

_ops = torch.ops.quantized_decomposed


def _through_int8(x: torch.Tensor) -> torch.Tensor:
    """Return x [N, in] as its rows' int8 quantisation represents it."""
    scale, zero_point = _ops.choose_qparams_per_token_asymmetric(x, torch.int8)
    quantised = _ops.quantize_per_token(x, scale, zero_point, -128, 127, torch.int8)
    return _ops.dequantize_per_token(
        quantised, scale, zero_point, -128, 127, torch.int8, torch.float32
    )


class Linear8(nn.Module):
    """8da8w: int8 weights, one scale an output channel."""

    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Quantise weight [out, in] float32."""
        super().__init__()
        values, scales = symmetric_int8(weight)
        self.register_buffer("weight", values)
        self.register_buffer("scales", scales)
        self.register_buffer("zero_points", torch.zeros(len(scales), dtype=torch.int64))
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [N, out] of x [N, in]."""
        weight = _ops.dequantize_per_channel(
            self.weight, self.scales, self.zero_points, 0, -127, 127, torch.int8
        )
        return F.linear(_through_int8(x), weight, self.bias)


class Linear4(nn.Module):
    """Int8 activations times symmetric 4-bit weights with one scale a group of inputs."""

    bias: torch.Tensor | None

    def __init__(
        self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Take values [out, in] int8 in [-8, 7] and scales [out, in / GROUP] float32."""
        super().__init__()
        self.register_buffer("weight", values)
        self.register_buffer("scales", scales)
        self.register_buffer("zero_points", torch.zeros_like(scales, dtype=torch.int8))
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [N, out] of x [N, in]."""
        weight = _ops.dequantize_per_channel_group(
            self.weight, self.scales, self.zero_points, -8, 7, torch.int8, GROUP, torch.float32
        )
        return F.linear(_through_int8(x), weight, self.bias)


class LinearQ41(nn.Module):
    """Q4_1 kept as it is: w = d*q + m, so x.w = sum over groups of d*(q-8).x + (8d+m)*sum(x).

    The first term is a `Linear4`, the second a linear over the groups' sums, 1/GROUP its size.
    """

    ones: torch.Tensor
    offsets: torch.Tensor

    def __init__(
        self,
        q: torch.Tensor,
        d: torch.Tensor,
        m: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        """Take q [out, in] int8 in [0, 15], d and m [out, in / GROUP] float32."""
        super().__init__()
        self.symmetric = Linear4(q - 8, d, bias)
        groups = d.shape[1]
        self.register_buffer("offsets", 8 * d + m)
        self.register_buffer("ones", torch.eye(groups).repeat_interleave(GROUP, dim=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [N, out] of x [N, in]."""
        return self.symmetric(x) + F.linear(F.linear(x, self.ones), self.offsets)


class Embedding8(nn.Module):
    """int8 embedding, one scale a token."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Quantise weight [V, H] float32."""
        super().__init__()
        values, scales = symmetric_int8(weight)
        self.register_buffer("weight", values)
        self.register_buffer("scales", scales)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [N, H] float32 of tokens [N] int64."""
        return _ops.embedding_byte(self.weight, self.scales, None, -127, 127, tokens)


def symmetric_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values [R, C] and float32 scales [R] whose product is weight [R, C]."""
    scales = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12)
    return torch.round(weight / scales[:, None]).clamp(-127, 127).to(torch.int8), scales


def symmetric_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values in [-8, 7] and float32 scales [out, in / GROUP], as torchao's 8da4w."""
    groups = weight.reshape(len(weight), -1, GROUP)
    scales = (groups.abs().amax(dim=2) / 7.5).clamp(min=1e-12)
    values = torch.round(groups / scales[:, :, None]).clamp(-8, 7).to(torch.int8)
    return values.reshape(weight.shape), scales


def recover_q4_1(
    weight: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [out, in] int8 in [0, 15] and d, m [out, in / GROUP] of a dequantised Q4_1 weight.

    A Q4_1 block spans its range, so its smallest value is m (q = 0) and its largest 15 d + m; both
    d and m are float16. What that gives is checked against every weight, bit for bit.

    Raises:
        UserError: `weight` is not what dequantising Q4_1 gives; names the tensor.
    """
    groups = weight.reshape(len(weight), -1, GROUP)
    m = groups.amin(dim=2)
    d = ((groups.amax(dim=2) - m) / 15).to(torch.float16).float()
    safe = torch.where(d == 0, torch.ones_like(d), d)
    q = torch.round((groups - m[:, :, None]) / safe[:, :, None]).clamp(0, 15)
    if not torch.equal(d[:, :, None] * q + m[:, :, None], groups):
        raise UserError(
            f"precision q4_1 needs a model whose weights were Q4_1 in a GGUF; {name} is not: "
            "try --precision 8da8w"
        )
    return q.reshape(weight.shape).to(torch.int8), d, m
