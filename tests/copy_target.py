"""A synthetic target whose next token depends on known positions, and what its drafts are made of.

Nothing of the product is imported here. The target's next token depends on the current token and
on the one `look_back` positions before it:

    logits(p) = A e[t_p] + C e[t_(p - look_back)]      e[v]: a random unit vector a token

One attention head finds the far token: its queries and keys read a dimension that is the same for
every token, so that RoPE alone decides, and sum_i cos(theta_i (distance - look_back)) has one peak.
Below look_back positions, position 0 is the nearest there is.

Another copy of the current token's vector is in the output of layer 1 only, the middle one of
`TAP_LAYERS`: a draft that reads it there sees nothing in another tap.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import EOS_TOKEN_ID, write_tiny_tokenizer

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

WIDTH = 24
"""Dimensions of a token's vector."""
TOKEN = slice(0, WIDTH)
FAR = slice(WIDTH, 2 * WIDTH)
COPY = slice(2 * WIDTH, 3 * WIDTH)
"""Where the target keeps a second copy of the token's vector, in the output of layer 1 only."""
CONSTANT = 3 * WIDTH
TOKEN_NORM = math.sqrt(2.0)
"""Of an embedding: a unit vector and the constant 1."""
OUTPUT_NORM = math.sqrt(3.0)
"""Of the target's last layer output: two unit vectors and the constant 1."""
_LEAST_GAP = 30.0
"""Between the best score and the next one: the others' weights are below 1e-10 in sum."""
_FAR_SPREAD = 3.0
"""Standard deviation of C's part of the logits."""
_NEVER = -100.0
"""What the logits of ids outside the draft vocabulary are lowered by."""


def write_target(folder: Path, *, look_back: int, token_spread: float, seed: int = 0) -> Path:
    """Write the target, fp32 in the HF layout of a Llama; return its folder.

    Args:
        folder: created when missing.
        look_back: how far the far token lies behind the current one.
        token_spread: standard deviation of A's part of the logits; the far token's is 3.
        seed: same arguments and seed, same bytes.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": N_LAYERS,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        **shape(),
    }
    tensors = idle_layers("model.layers.{}", N_LAYERS, HIDDEN)
    tensors["model.embed_tokens.weight"] = embedding(seed)
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    tensors["lm_head.weight"] = head(seed, token_spread)
    third = math.sqrt(OUTPUT_NORM**2 + 1.0)
    _look(tensors, 0, TOKEN_NORM, query_and_key(look_back, reach=look_back), to=FAR)
    _look(tensors, 1, OUTPUT_NORM, query_and_key(0, reach=look_back), to=COPY)
    _look(tensors, 2, third, query_and_key(0, reach=look_back), to=COPY, factor=-1.0)
    write_folder(folder, config, tensors)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    write_tiny_tokenizer(folder, VOCAB_SIZE)
    return folder


def draft_ids() -> torch.Tensor:
    """Return the target ids of the draft vocabulary, ascending; the end token is not there."""
    ids = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(VOCAB_SIZE))
    return ids[ids != EOS_TOKEN_ID][:DRAFT_VOCAB_SIZE].sort().values


def shape() -> dict[str, Any]:
    """Return the keys of config.json that the target and its drafts have in common."""
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


def embedding(seed: int) -> torch.Tensor:
    """Return the embedding [V, H] of the target of `seed`."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(VOCAB_SIZE, WIDTH, generator=generator)
    table = torch.zeros(VOCAB_SIZE, HIDDEN)
    table[:, TOKEN] = vectors / vectors.norm(dim=-1, keepdim=True)
    table[:, CONSTANT] = 1.0
    return table


def head(seed: int, token_spread: float) -> torch.Tensor:
    """Return the head [V, H] of the target of `seed`; no id outside the draft's can win."""
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.zeros(VOCAB_SIZE, HIDDEN)
    for part, spread in ((TOKEN, token_spread), (FAR, _FAR_SPREAD)):
        weight[:, part] = spread * torch.randn(VOCAB_SIZE, WIDTH, generator=generator)
    weight[:, CONSTANT] = _NEVER
    weight[draft_ids(), CONSTANT] = 0.0
    return weight / norm_scale(OUTPUT_NORM)


def norm_scale(length: float) -> float:
    """Return what RMSNorm multiplies a vector of this length by."""
    return 1.0 / math.sqrt(length**2 / HIDDEN + EPS)


def idle_layers(prefix: str, count: int, attention_in: int) -> dict[str, torch.Tensor]:
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


def query_and_key(distance: int, reach: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a query and a key [D], not rotated, that find what lies `distance` back.

    The key is (1, 0) in every rotated pair, the query the same turned back by `distance`.

    Args:
        distance: where the score has its peak.
        reach: up to how many positions beside the peak the score only falls, so that a short
            context has one nearest position.
    """
    angles = distance * _frequencies()
    slow = (_frequencies() * reach <= math.pi).double()
    sharpness = _LEAST_GAP * math.sqrt(HEAD_DIM) / _gap(slow) * slow
    query = torch.cat([sharpness * angles.cos(), -sharpness * angles.sin()])
    key = torch.cat([torch.ones(HEAD_DIM // 2), torch.zeros(HEAD_DIM // 2)])
    return query, key


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})


def widen(folder: Path, more_ids: int) -> None:
    """Give a target or a draft of it more token ids, of which nothing is known."""
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = VOCAB_SIZE + more_ids
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if len(tensor) == VOCAB_SIZE:
            more = torch.zeros(more_ids, *tensor.shape[1:], dtype=tensor.dtype)
            tensors[name] = torch.cat([tensor, more])
    write_folder(folder, config, tensors)


def _look(
    tensors: dict[str, torch.Tensor],
    layer: int,
    length: float,
    finder: tuple[torch.Tensor, torch.Tensor],
    *,
    to: slice,
    factor: float = 1.0,
) -> None:
    """Let head 0 add `factor` times the token that `finder`'s query and key find to `to`."""
    attention, scale = f"model.layers.{layer}.self_attn", norm_scale(length)
    query, key = finder
    tensors[f"{attention}.q_proj.weight"][:HEAD_DIM, CONSTANT] = (query / scale).float()
    tensors[f"{attention}.k_proj.weight"][:HEAD_DIM, CONSTANT] = (key / scale).float()
    tensors[f"{attention}.v_proj.weight"][:WIDTH, TOKEN] = torch.eye(WIDTH) / scale
    tensors[f"{attention}.o_proj.weight"][to, :WIDTH] = factor * torch.eye(WIDTH)


def _frequencies() -> torch.Tensor:
    return ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)


def _gap(slow: torch.Tensor) -> float:
    """Return how far the score falls at the nearest rival within 512 positions, unscaled."""
    sums = torch.cos(torch.arange(512).double()[:, None] * _frequencies()) @ slow
    return float(sums[0] - sums[1:].max())
