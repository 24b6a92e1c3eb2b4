"""Write a synthetic target and a DFlash draft that knows exactly what it will say.

Nothing of the product is imported here. The target is that of tests/copy_target.py, without the
current token's part:

    logits(p) = C e[t_(p - LOOK_BACK)]      e[v]: a random unit vector a token

So the token at P + k is decided by the one `LOOK_BACK + 1` positions before it, for every k alike,
and one head of the draft that looks that far back makes every draft stand, greedy and sampled. In
a block of LOOK_BACK + 2 slots the last one finds the pending token, in slot 0, and the others find
context: the newest rows decide most of the drafts, and a row that is missing, not the target's or
one position off spoils the drafts that look at it.

The pending token and a committed row look the same to the head, as the feature is the token's own
vector, which only the middle tap has. What a slot is itself, pending or MASK, reaches no logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.copy_target import (
    CONSTANT,
    COPY,
    EPS,
    FAR,
    HEAD_DIM,
    HIDDEN,
    INTERMEDIATE,
    ROPE_THETA,
    TAP_LAYERS,
    TOKEN,
    TOKEN_NORM,
    VOCAB_SIZE,
    WIDTH,
    embedding,
    head,
    norm_scale,
    query_and_key,
    write_target,
)
from tests.dflash_layouts import DFlashWeights, random_weights, write_draft

LOOK_BACK = 6
BLOCK_SIZE = LOOK_BACK + 2
"""Of the draft: K is 1 .. BLOCK_SIZE - 1."""
ANCHOR_BLOCK_SIZE = LOOK_BACK + 1
"""Of the draft that samples from the anchor: K is 1 .. ANCHOR_BLOCK_SIZE."""
LEAST_WINDOW = LOOK_BACK
"""A sliding window of fewer positions hides the row that d1 looks at."""
MASK_TOKEN_ID = 150
"""An ordinary token too: texts hold it."""
_N_LAYERS = 2
_FEATURE_SCALE = 3.0
"""Of the linear's output: its norm takes it away."""


def write_planted_target(folder: Path, seed: int = 0) -> Path:
    """Write the target, fp32 in the HF layout of a Llama; return its folder."""
    return write_target(folder, look_back=LOOK_BACK, token_spread=0.0, seed=seed)


def write_planted_draft(folder: Path, **fields: Any) -> Path:
    """Write the draft of `write_planted_target`, z-lab layout; return its folder.

    Args:
        folder: created when missing.
        fields: of `write_draft`, which win.
    """
    weights = planted_weights(LOOK_BACK + 1)
    return _write(folder, weights, **{"block_size": BLOCK_SIZE, **fields})


def write_anchor_draft(folder: Path, **fields: Any) -> Path:
    """Write the same draft as one that samples from the anchor, DeepSpec layout."""
    weights = planted_weights(LOOK_BACK)
    fields = {"block_size": ANCHOR_BLOCK_SIZE, "layout": "deepspec", **fields}
    return _write(folder, weights, own_embeddings=True, **fields)


def write_partial_draft(folder: Path, *, look_back: int) -> Path:
    """Write the draft of a target whose current token decides too: it is right in part."""
    return _write(folder, planted_weights(look_back + 1), block_size=BLOCK_SIZE)


def write_random_draft(folder: Path, seed: int = 0, **fields: Any) -> Path:
    """Write a draft with random weights that fits the target, z-lab layout; return its folder."""
    weights = random_weights(seed, hidden=HIDDEN, vocab_size=VOCAB_SIZE)
    return write_draft(
        folder, weights, **{"block_size": BLOCK_SIZE, "mask_token_id": MASK_TOKEN_ID, **fields}
    )


def tokens_of(features: Sequence[Sequence[float]]) -> list[int]:
    """Return the token whose row each feature of the planted draft is made of."""
    if not features:
        return []
    return (torch.tensor(features)[:, TOKEN] @ embedding(0)[:, TOKEN].T).argmax(-1).tolist()


def planted_weights(distance: int, seed: int = 0) -> DFlashWeights:
    """Return weights whose logits in every slot are those of the token `distance` before it."""
    tensors = {"embed_tokens.weight": embedding(seed), "norm.weight": torch.ones(HIDDEN)}
    tensors["lm_head.weight"] = head(seed, 0.0)
    fc = torch.zeros(HIDDEN, len(TAP_LAYERS) * HIDDEN)
    tap = HIDDEN * TAP_LAYERS.index(1)
    fc[TOKEN, tap + COPY.start : tap + COPY.stop] = _FEATURE_SCALE * torch.eye(WIDTH)
    fc[CONSTANT, tap + CONSTANT] = _FEATURE_SCALE
    tensors["fusion.fc.weight"] = fc
    tensors["fusion.norm.weight"] = torch.ones(HIDDEN)
    for index in range(_N_LAYERS):
        tensors.update({f"layers.{index}.{name}": t for name, t in _idle_layer().items()})
    attention = "layers.0.self_attn"
    # The projections give ones, whose norm is 1: what is looked for stands in the norms' weights.
    query, key = query_and_key(distance, reach=2 * LOOK_BACK + 4)
    for name, weight in (("q", query), ("k", key)):
        tensors[f"{attention}.{name}_proj.weight"][:, CONSTANT] = 1.0
        tensors[f"{attention}.{name}_norm.weight"] = weight.float()
    tensors[f"{attention}.v_proj.weight"][:WIDTH, TOKEN] = torch.eye(WIDTH) / norm_scale(TOKEN_NORM)
    tensors[f"{attention}.o_proj.weight"][FAR, :WIDTH] = torch.eye(WIDTH)
    return DFlashWeights(
        tensors=tensors,
        target_ids=None,
        vocab_size=VOCAB_SIZE,
        hidden=HIDDEN,
        target_hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        n_layers=_N_LAYERS,
        n_heads=1,
        n_kv_heads=1,
        head_dim=HEAD_DIM,
        n_taps=len(TAP_LAYERS),
    )


def _idle_layer() -> dict[str, torch.Tensor]:
    """Return a layer of one head that adds nothing to the residual stream."""
    tensors = {f"self_attn.{n}_proj.weight": torch.zeros(HEAD_DIM, HIDDEN) for n in "qkv"}
    tensors["self_attn.o_proj.weight"] = torch.zeros(HIDDEN, HEAD_DIM)
    tensors |= {f"self_attn.{name}_norm.weight": torch.ones(HEAD_DIM) for name in "qk"}
    tensors |= {f"mlp.{n}_proj.weight": torch.zeros(INTERMEDIATE, HIDDEN) for n in ("gate", "up")}
    tensors["mlp.down_proj.weight"] = torch.zeros(HIDDEN, INTERMEDIATE)
    norms = ("input_layernorm", "post_attention_layernorm")
    return tensors | {f"{name}.weight": torch.ones(HIDDEN) for name in norms}


def _write(folder: Path, weights: DFlashWeights, **fields: Any) -> Path:
    shape = {"rms_norm_eps": EPS, "rope_theta": ROPE_THETA}
    fields = {"mask_token_id": MASK_TOKEN_ID, "tap_layers": TAP_LAYERS, "config": shape, **fields}
    return write_draft(folder, weights, **fields)
