"""Write a synthetic target and an EAGLE-3 head that knows exactly what it will say.

Nothing of the product is imported here. The target is that of tests/copy_target.py:

    logits(p) = A e[t_p] + C e[t_(p - LOOK_BACK)]      e[v]: a random unit vector a token

The head has the token t_(p+1) in slot p, and finds t_(p+1-LOOK_BACK) in the *feature* of the slot
LOOK_BACK - 1 before it. `LOOK_BACK` is more than any K, so a chain looks back at true rows only and
every draft stands: acceptance length K + 1, greedy and sampled. The draft's own recurrent feature
is zero in the dimensions that are looked for. Where one is kept for an accepted token instead of
the target's row, the chain that looks back at it goes wrong.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from tests.copy_target import (
    CONSTANT,
    COPY,
    DRAFT_VOCAB_SIZE,
    FAR,
    HEAD_DIM,
    HIDDEN,
    N_HEADS,
    OUTPUT_NORM,
    TAP_LAYERS,
    TOKEN,
    TOKEN_NORM,
    VOCAB_SIZE,
    WIDTH,
    draft_ids,
    head,
    idle_layers,
    norm_scale,
    query_and_key,
    shape,
    write_folder,
    write_target,
)

LOOK_BACK = 9
"""More than any K. With 8, a chain of two would look at true rows whatever became of the others."""
_TOKEN_SPREAD = 1.0
"""The far token matters more."""


def write_copy_target(folder: Path, seed: int = 0) -> Path:
    """Write the target, fp32 in the HF layout of a Llama; return its folder."""
    return write_target(folder, look_back=LOOK_BACK, token_spread=_TOKEN_SPREAD, seed=seed)


def write_copy_head(folder: Path, seed: int = 0) -> Path:
    """Write the head of `write_copy_target(seed)`, SpecForge layout; return its folder."""
    ids = draft_ids()
    tensors = idle_layers("midlayer", 1, 2 * HIDDEN)
    tensors["midlayer.hidden_norm.weight"] = torch.ones(HIDDEN)
    tensors["norm.weight"] = torch.ones(HIDDEN)
    tensors["lm_head.weight"] = head(seed, _TOKEN_SPREAD)[ids]
    fc = torch.zeros(HIDDEN, len(TAP_LAYERS) * HIDDEN)
    tap = HIDDEN * TAP_LAYERS.index(1)
    # A feature is as long as what the layer makes of it: its norm then scales both alike.
    fc[COPY, tap + COPY.start : tap + COPY.stop] = math.sqrt(2.0) * torch.eye(WIDTH)
    fc[CONSTANT, tap + CONSTANT] = 1.0
    tensors["fc.weight"] = fc

    own, far, forget_copy, forget_far = range(N_HEADS)
    for index in range(N_HEADS):
        _place(tensors, index, LOOK_BACK - 1 if index == far else 0)
    _value(tensors, own, TOKEN, 1.0, TOKEN_NORM)
    _value(tensors, own, _shifted(TOKEN), -1.0, OUTPUT_NORM)
    _value(tensors, far, _shifted(COPY), math.sqrt(0.5), OUTPUT_NORM)
    _value(tensors, forget_copy, _shifted(COPY), -1.0, OUTPUT_NORM)
    _value(tensors, forget_far, _shifted(FAR), -1.0, OUTPUT_NORM)
    for index, to in ((own, TOKEN), (far, FAR), (forget_copy, COPY), (forget_far, FAR)):
        output = tensors["midlayer.self_attn.o_proj.weight"]
        output[to, index * HEAD_DIM : index * HEAD_DIM + WIDTH] = torch.eye(WIDTH)
    return _write_head(folder, tensors, ids)


def write_random_head(folder: Path, seed: int = 0) -> Path:
    """Write a head of the same shape with random weights; return its folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors = idle_layers("midlayer", 1, 2 * HIDDEN)
    tensors["midlayer.hidden_norm.weight"] = torch.ones(HIDDEN)
    tensors["norm.weight"] = torch.ones(HIDDEN)
    tensors["lm_head.weight"] = torch.zeros(DRAFT_VOCAB_SIZE, HIDDEN)
    tensors["fc.weight"] = torch.zeros(HIDDEN, len(TAP_LAYERS) * HIDDEN)
    for name, tensor in tensors.items():
        scale = 0.1 if tensor.dim() == 1 else 1.3 / math.sqrt(tensor.shape[-1])
        tensors[name] = tensor + scale * torch.randn(tensor.shape, generator=generator)
    return _write_head(folder, tensors, draft_ids())


def _place(tensors: dict[str, torch.Tensor], index: int, distance: int) -> None:
    """Let a head attend to what lies `distance` positions back, whatever is there."""
    rows = slice(index * HEAD_DIM, (index + 1) * HEAD_DIM)
    query, key = query_and_key(distance, reach=LOOK_BACK)
    scale = norm_scale(TOKEN_NORM)
    tensors["midlayer.self_attn.q_proj.weight"][rows, CONSTANT] = (query / scale).float()
    tensors["midlayer.self_attn.k_proj.weight"][rows, CONSTANT] = (key / scale).float()


def _value(
    tensors: dict[str, torch.Tensor], index: int, source: slice, factor: float, length: float
) -> None:
    """Let a head of the draft carry `factor` times what `source` held before its norm."""
    rows = slice(index * HEAD_DIM, index * HEAD_DIM + WIDTH)
    matrix = factor * torch.eye(WIDTH) / norm_scale(length)
    tensors["midlayer.self_attn.v_proj.weight"][rows, source] += matrix


def _shifted(part: slice) -> slice:
    """Return where the layer's input has a part of the feature: behind the embedding."""
    return slice(HIDDEN + part.start, HIDDEN + part.stop)


def _write_head(folder: Path, tensors: dict[str, torch.Tensor], ids: torch.Tensor) -> Path:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "num_hidden_layers": 1,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAP_LAYERS)},
        **shape(),
    }
    covered = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    covered[ids] = True
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = covered
    write_folder(folder, config, tensors)
    return folder
