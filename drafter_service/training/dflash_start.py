"""What a DFlash draft starts as: shape and layers taken from the target."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from drafter_service.training.target import TrainingTarget

_COPIED = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


def starting_parameters(
    target: TrainingTarget, *, n_layers: int, tap_count: int, tokens: torch.Tensor, seed: int
) -> dict[str, torch.Tensor]:
    """Return float32 leaves on the target's device, by z-lab's names.

    The layers are the target's last ones, less their biases, which the layout has not; `fc.weight`
    is drawn from N(0, 1 / fan-in). Where the target does not norm q and k, the draft's norms start
    at their median RMS in the target, so that scores start with the sizes they had.

    Args:
        target: with at least `n_layers` layers.
        n_layers: of the draft.
        tap_count: T.
        tokens: [R, S] int64, text that the RMS is measured on.
        seed: of `fc.weight`, drawn on the CPU: the same on every device.
    """
    width, fan_in = target.config.hidden_size, tap_count * target.config.hidden_size
    drawn = torch.randn(width, fan_in, generator=torch.Generator().manual_seed(seed))
    parameters = {
        "fc.weight": drawn / math.sqrt(fan_in),
        "hidden_norm.weight": torch.ones(width),
        "norm.weight": target.weight("norm.weight"),
    }
    for i in range(n_layers):
        source = target.config.n_layers - n_layers + i
        for part in _COPIED:
            parameters[f"layers.{i}.{part}.weight"] = target.weight(
                f"layers.{source}.{part}.weight"
            )
        norms = _qk_norms(target, source, tokens)
        for part, norm in zip("qk", norms, strict=True):
            parameters[f"layers.{i}.self_attn.{part}_norm.weight"] = norm
    return {
        name: tensor.to(device=target.device, dtype=torch.float32, copy=True).requires_grad_()
        for name, tensor in parameters.items()
    }


def _qk_norms(
    target: TrainingTarget, layer: int, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first weights [D] of a layer's q and k norms."""
    name = f"layers.{layer}.self_attn"
    if target.config.qk_norm:
        return target.weight(f"{name}.q_norm.weight"), target.weight(f"{name}.k_norm.weight")
    if layer == 0:
        x = target.embed_weight[tokens]
    else:
        x = target.forward(tokens, (layer - 1,))[0][:, :, 0]
    weight = target.weight(f"layers.{layer}.input_layernorm.weight")
    u = F.rms_norm(x, weight.shape, weight, target.config.rms_norm_eps)
    sizes = []
    for part in "qk":
        y = u @ target.weight(f"{name}.{part}_proj.weight").t()
        heads = y.view(-1, target.config.head_dim).float()
        rms = heads.pow(2).mean(-1).sqrt().median()
        sizes.append(rms.repeat(target.config.head_dim))
    return sizes[0], sizes[1]
