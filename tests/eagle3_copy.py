"""Write a synthetic target and an EAGLE-3 head that knows exactly what it will say.

Nothing of the product is imported here. The target's next token depends on the current token and
on the one `LOOK_BACK` positions before it:

    logits(p) = A e[t_p] + C e[t_(p - LOOK_BACK)]      e[v]: a random unit vector a token

One attention head finds the far token: its queries and keys read a dimension that is the same for
every token, so that RoPE alone decides, and sum_i cos(theta_i (distance - LOOK_BACK)) has one peak.
Below LOOK_BACK positions, position 0 is the nearest there is.

The head has the token t_(p+1) in slot p, and finds t_(p+1-LOOK_BACK) in the *feature* of the slot
LOOK_BACK - 1 before it. `LOOK_BACK` is more than any K, so a chain looks back at true rows only and
every draft stands: acceptance length K + 1, greedy and sampled. The draft's own recurrent feature
is zero in the dimensions that are looked for. Where one is kept for an accepted token instead of
the target's row, the chain that looks back at it goes wrong.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.tiny import EOS_TOKEN_ID, write_tiny_tokenizer

LOOK_BACK = 9
"""More than any K. With 8, a chain of two would look at true rows whatever became of the others."""
TAP_LAYERS = (0, 1, 2)
VOCAB_SIZE = 300
DRAFT_VOCAB_SIZE = 200
HIDDEN = 128
N_LAYERS = 4
N_HEADS = 4
HEAD_DIM = 32
INTERMEDIATE = 32
ROPE_THETA = 30.0
EPS = 1e-6

_WIDTH = 24
"""Dimensions of a token's vector."""
_TOKEN = slice(0, _WIDTH)
_FAR = slice(_WIDTH, 2 * _WIDTH)
_COPY = slice(2 * _WIDTH, 3 * _WIDTH)
"""Where the target keeps a second copy of the token's vector: in the output of layer 1 only, so
that another tap does not see it. The head's feature has the token's vector there too."""
_CONSTANT = 3 * _WIDTH
_NORM = math.sqrt(3.0)
"""Of the target's last layer output and of every feature: two unit vectors and the constant 1."""
_LEAST_GAP = 30.0
"""Between the best score and the next one: the others' weights are below 1e-10 in sum."""
_SPREADS = {"token": 1.0, "far": 3.0}
"""Standard deviations of A's and C's part of the logits: the far token matters more."""
_NEVER = -100.0
"""What the logits of ids outside the draft vocabulary are lowered by."""


def write_copy_target(folder: Path, seed: int = 0) -> Path:
    """Write the target, fp32 in the HF layout of a Llama; return its folder."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": N_LAYERS,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        **_shape(),
    }
    tensors = _zeros("model.layers.{}", N_LAYERS, HIDDEN)
    tensors["model.embed_tokens.weight"] = _embedding(seed)
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    tensors["lm_head.weight"] = _head(seed)
    first, second, third = math.sqrt(2.0), _NORM, math.sqrt(_NORM**2 + 1.0)  # norms of the inputs
    _look(tensors, "model.layers.0", first, LOOK_BACK, _TOKEN, _FAR, 1.0)
    _look(tensors, "model.layers.1", second, 0, _TOKEN, _COPY, 1.0)
    _look(tensors, "model.layers.2", third, 0, _TOKEN, _COPY, -1.0)
    _write(folder, config, tensors)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    write_tiny_tokenizer(folder, VOCAB_SIZE)
    return folder


def write_copy_head(folder: Path, seed: int = 0) -> Path:
    """Write the head of `write_copy_target(seed)`, SpecForge layout; return its folder."""
    ids = draft_ids()
    tensors = _zeros("midlayer", 1, 2 * HIDDEN)
    tensors["midlayer.hidden_norm.weight"] = torch.ones(HIDDEN)
    tensors["norm.weight"] = torch.ones(HIDDEN)
    tensors["lm_head.weight"] = _head(seed)[ids]
    fc = torch.zeros(HIDDEN, len(TAP_LAYERS) * HIDDEN)
    tap = HIDDEN * TAP_LAYERS.index(1)
    # A feature is as long as what the layer makes of it: its norm then scales both alike.
    fc[_COPY, tap + _COPY.start : tap + _COPY.stop] = math.sqrt(2.0) * torch.eye(_WIDTH)
    fc[_CONSTANT, tap + _CONSTANT] = 1.0
    tensors["fc.weight"] = fc

    own, far, forget_copy, forget_far = range(N_HEADS)
    for head in range(N_HEADS):
        distance = LOOK_BACK - 1 if head == far else 0
        _place(tensors, "midlayer", head, distance, math.sqrt(2.0))
    emb, feature = math.sqrt(2.0), _NORM
    _value(tensors, own, _TOKEN, 1.0, emb)
    _value(tensors, own, _shifted(_TOKEN), -1.0, feature)
    _value(tensors, far, _shifted(_COPY), math.sqrt(0.5), feature)
    _value(tensors, forget_copy, _shifted(_COPY), -1.0, feature)
    _value(tensors, forget_far, _shifted(_FAR), -1.0, feature)
    for head, to in ((own, _TOKEN), (far, _FAR), (forget_copy, _COPY), (forget_far, _FAR)):
        output = tensors["midlayer.self_attn.o_proj.weight"]
        output[to, head * HEAD_DIM : head * HEAD_DIM + _WIDTH] = torch.eye(_WIDTH)
    return _write_head(folder, tensors, ids)


def write_random_head(folder: Path, seed: int = 0) -> Path:
    """Write a head of the same shape with random weights; return its folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors = _zeros("midlayer", 1, 2 * HIDDEN)
    tensors["midlayer.hidden_norm.weight"] = torch.ones(HIDDEN)
    tensors["norm.weight"] = torch.ones(HIDDEN)
    tensors["lm_head.weight"] = torch.zeros(DRAFT_VOCAB_SIZE, HIDDEN)
    tensors["fc.weight"] = torch.zeros(HIDDEN, len(TAP_LAYERS) * HIDDEN)
    for name, tensor in tensors.items():
        scale = 0.1 if tensor.dim() == 1 else 1.3 / math.sqrt(tensor.shape[-1])
        tensors[name] = tensor + scale * torch.randn(tensor.shape, generator=generator)
    return _write_head(folder, tensors, draft_ids())


def draft_ids() -> torch.Tensor:
    """Return the target ids of the draft vocabulary, ascending; the end token is not there."""
    ids = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(VOCAB_SIZE))
    return ids[ids != EOS_TOKEN_ID][:DRAFT_VOCAB_SIZE].sort().values


def _shape() -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": N_HEADS,
        "num_key_value_heads": N_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
    }


def _embedding(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(VOCAB_SIZE, _WIDTH, generator=generator)
    table = torch.zeros(VOCAB_SIZE, HIDDEN)
    table[:, _TOKEN] = vectors / vectors.norm(dim=-1, keepdim=True)
    table[:, _CONSTANT] = 1.0
    return table


def _head(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    head = torch.zeros(VOCAB_SIZE, HIDDEN)
    for part, spread in ((_TOKEN, _SPREADS["token"]), (_FAR, _SPREADS["far"])):
        head[:, part] = spread * torch.randn(VOCAB_SIZE, _WIDTH, generator=generator)
    head[:, _CONSTANT] = _NEVER
    head[draft_ids(), _CONSTANT] = 0.0
    return head / _norm_scale(_NORM)


def _norm_scale(length: float) -> float:
    """Return what RMSNorm multiplies a vector of this length by."""
    return 1.0 / math.sqrt(length**2 / HIDDEN + EPS)


def _zeros(prefix: str, count: int, attention_in: int) -> dict[str, torch.Tensor]:
    """Return layers that add nothing to the residual stream."""
    width = N_HEADS * HEAD_DIM
    tensors = {}
    for index in range(count):
        layer = prefix.format(index)
        for name in "qkv":
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = torch.zeros(width, attention_in)
        tensors[f"{layer}.self_attn.o_proj.weight"] = torch.zeros(HIDDEN, width)
        for name in ("gate", "up"):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = torch.zeros(INTERMEDIATE, HIDDEN)
        tensors[f"{layer}.mlp.down_proj.weight"] = torch.zeros(HIDDEN, INTERMEDIATE)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.ones(HIDDEN)
    return tensors


def _look(
    tensors: dict[str, torch.Tensor],
    layer: str,
    length: float,
    distance: int,
    source: slice,
    to: slice,
    factor: float,
) -> None:
    """Let head 0 add `factor` times what `source` holds `distance` positions back to `to`."""
    _place(tensors, layer, 0, distance, length)
    value = tensors[f"{layer}.self_attn.v_proj.weight"]
    value[:_WIDTH, source] = torch.eye(_WIDTH) / _norm_scale(length)
    tensors[f"{layer}.self_attn.o_proj.weight"][to, :_WIDTH] = factor * torch.eye(_WIDTH)


def _place(
    tensors: dict[str, torch.Tensor], layer: str, head: int, distance: int, length: float
) -> None:
    """Let a head attend to what lies `distance` positions back, whatever is there.

    The key is (1, 0) in every rotated pair, the query the same turned back by `distance`.
    """
    angles = distance * _frequencies()
    sharpness = _LEAST_GAP * math.sqrt(HEAD_DIM) / _gap() * _slow()
    query = torch.cat([sharpness * angles.cos(), -sharpness * angles.sin()])
    key = torch.cat([torch.ones(HEAD_DIM // 2), torch.zeros(HEAD_DIM // 2)])
    rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    scale = _norm_scale(length)
    tensors[f"{layer}.self_attn.q_proj.weight"][rows, _CONSTANT] = (query / scale).float()
    tensors[f"{layer}.self_attn.k_proj.weight"][rows, _CONSTANT] = key / scale


def _frequencies() -> torch.Tensor:
    return ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)


def _slow() -> torch.Tensor:
    """Return 1 for the pairs that take part: within LOOK_BACK positions they turn by half at most.

    So the score only falls from the peak to LOOK_BACK positions beside it, and a short context has
    one nearest position.
    """
    return (_frequencies() * LOOK_BACK <= math.pi).double()


def _gap() -> float:
    """Return how far the score falls at the nearest rival within 512 positions, unscaled."""
    sums = torch.cos(torch.arange(512).double()[:, None] * _frequencies()) @ _slow()
    return float(sums[0] - sums[1:].max())


def _value(
    tensors: dict[str, torch.Tensor], head: int, source: slice, factor: float, length: float
) -> None:
    """Let a head of the draft carry `factor` times what `source` held before its norm."""
    rows = slice(head * HEAD_DIM, head * HEAD_DIM + _WIDTH)
    matrix = factor * torch.eye(_WIDTH) / _norm_scale(length)
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
        **_shape(),
    }
    covered = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    covered[ids] = True
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = covered
    _write(folder, config, tensors)
    return folder


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
