"""8da8w without its kernels: what a program of that precision computes, in any torch.

Weights are int8 with one scale an output channel, activations int8 with a scale and a zero point a
row, found at run time (graph_runtime/programs/quantised.py, which needs executorch beside it).
Both fit bfloat16 exactly, an activation less its zero point too: it is a whole number in
[-255, 255]. So one product of whole numbers, scaled after it, is the integer kernel's result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from graph_runtime.decoder import Decoder


class QuantisedLinear(nn.Module):
    """A linear of int8 weights and int8 activations."""

    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """Quantise weight [out, in] float32; whole numbers are kept in `dtype`."""
        super().__init__()
        values, scales = quantise_weight(weight)
        self.register_buffer("values", values.to(dtype))
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out] of x [..., in], in x's dtype."""
        return self._run(x, x.dtype)

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out] float32 of x [..., in]."""
        return self._run(x, torch.float32)

    def _run(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        quantise, scale = _passes(compiled=x.is_cuda)
        whole, row_scales = quantise(x, self.values.dtype)
        return scale(product(whole, self.values), row_scales, self.scales, self.bias, dtype)

    def dequantised(self) -> torch.Tensor:
        """Return the weight [out, in] float32 that the whole numbers stand for."""
        return self.values.float() * self.scales[:, None]


def quantise(decoder: Decoder, dtype: torch.dtype) -> None:
    """Turn a float32 decoder, in place, into what a program of 8da8w computes.

    Args:
        decoder: loaded, in float32.
        dtype: what norms, attention and the residual stream are computed in.
    """
    linears = {
        name: QuantisedLinear(module.weight, module.bias, dtype)
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear)
    }
    values, scales = quantise_weight(decoder.embed_tokens.weight)
    # A parameter of its own: the head may be tied to the embedding until here.
    embedding = nn.Parameter(values * scales[:, None], requires_grad=False)
    for name, linear in linears.items():
        decoder.set_submodule(name, linear)
    decoder.embed_tokens.weight = embedding
    for module in decoder.modules():
        if not isinstance(module, QuantisedLinear) and not list(module.children()):
            module.to(dtype)
    decoder.cos, decoder.sin = (decoder.get_buffer(name).to(dtype) for name in ("cos", "sin"))


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers in [-127, 127], float32, and scales [out] of weight [out, in]."""
    scales = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12)
    return torch.round(weight / scales[:, None]).clamp(-127, 127), scales


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers less their zero point, like x [..., in], and scales [..., 1], float32.

    The rule is `choose_qparams_per_token_asymmetric` of torch's quantized_decomposed: the range
    includes 0, and the zero point comes from the end of the range that it represents better.
    """
    x = x.float()
    least, most = (end.unsqueeze(-1) for end in torch.aminmax(x, dim=-1))
    least, most = least.clamp(max=0.0), most.clamp(min=0.0)
    scale = ((most - least) / 255).clamp(min=torch.finfo(torch.float32).eps)
    low, high = least / scale, most / scale
    zero_point = torch.where((low - 128) + (high + 127) > 0, -128 - low, 127 - high)
    zero_point = zero_point.clamp(-128, 127).round()
    whole = torch.round(x * (1.0 / scale) + zero_point).clamp(-128, 127)
    return whole - zero_point, scale


@cache
def _passes(*, compiled: bool) -> tuple[Callable[..., Any], Callable[..., torch.Tensor]]:
    """Return what runs before and after a product; compiled, each is one kernel, not a dozen."""
    if not compiled:
        return _whole_rows, _scaled
    return torch.compile(_whole_rows, dynamic=True), torch.compile(_scaled, dynamic=True)


def _whole_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    whole, scales = quantise_rows(x)
    return whole.to(dtype), scales


def _scaled(
    result: torch.Tensor,
    row_scales: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    result = result * row_scales * scales
    return (result if bias is None else result + bias).to(dtype)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x [..., in] times weight [out, in], [..., out] float32, summed in float32."""
    if x.dtype == torch.float32:
        return F.linear(x, weight)
    flat = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        result = torch.mm(flat, weight.t(), out_dtype=torch.float32)
    else:
        result = flat.float() @ weight.float().t()
    return result.view(*x.shape[:-1], -1)
