"""Tiny DFlash drafts of every variant, as files and as what they compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from graph_runtime.drafts.source import DraftSource
from tests.dflash_layouts import FULL, SLIDING, DFlashWeights, random_weights, write_draft
from tests.dflash_reference import block_logits

CONTEXT = 300
"""Crosses four borders between capacity blocks of 64."""
SEEN = 20
"""Sliding window of most of the drafts that have one."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kind of draft: what is written, and what the longhand reference makes of it."""

    sizes: dict[str, Any]
    written: dict[str, Any]
    maths: dict[str, Any]
    anchored: bool = False
    gemma: bool = False


def _variant(
    sizes: dict[str, Any] | None = None,
    written: dict[str, Any] | None = None,
    maths: dict[str, Any] | None = None,
    **flags: bool,
) -> Variant:
    return Variant(sizes=sizes or {}, written=written or {}, maths=maths or {}, **flags)


_GEMMA = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "final_logit_softcapping": 3.0,
}
_OWN = {"own_embeddings": True}
VARIANTS = {
    "z-lab": _variant(),
    "use_swa, not causal": _variant(
        written={"layout": "modelopt", "sliding_window": 70},
        maths={"windows": (70, 70)},
    ),
    "causal windows": _variant(
        written={"sliding_window": SEEN},
        maths={"windows": (SEEN, SEEN), "causal": (True, True)},
    ),
    "causal windows beside full layers": _variant(
        {"n_layers": 3},
        {"sliding_window": SEEN, "layer_types": [SLIDING, FULL, SLIDING]},
        {"windows": (SEEN, None, SEEN), "causal": (True, False, True)},
    ),
    "speculators, reduced vocabulary, windows of both kinds": _variant(
        {"draft_vocab_size": 100},
        {
            "layout": "speculators", "non_causal": True, "sliding_window": SEEN,
            "layer_types": [FULL, SLIDING], **_OWN,
        },
        {"windows": (None, SEEN)},
    ),
    "deepspec, from the anchor": _variant(
        written={"layout": "deepspec", "block_size": 7, **_OWN}, anchored=True
    ),
    "gemma's scale and cap": _variant(
        maths={"embedding_scale": math.sqrt(64), "softcap": 3.0}, gemma=True
    ),
    "biases, wide heads, one K/V head a head": _variant(
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "head_dim": 32, "n_kv_heads": 4}
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BlockDraftFiles:
    """A draft's files and its weights."""

    source: DraftSource
    weights: DFlashWeights
    variant: Variant
    shared: torch.Tensor | None
    """Embedding and head of the target, of drafts that have none."""

    def logits(
        self, features: torch.Tensor, pending: int, block_length: int, draft_count: int
    ) -> torch.Tensor:
        """Return the logits [K, Vd] float64 of a block after context features [P, H], longhand."""
        found = block_logits(
            self.weights,
            features=features,
            pending=pending,
            block_length=block_length,
            mask_token_id=16,
            embedding=self.shared,
            head=self.shared,
            **self.variant.maths,
        )
        first = 0 if self.variant.anchored else 1
        return found[first : first + draft_count]


MakeFiles = Callable[..., BlockDraftFiles]


def write_files(
    folder: Path, name: str, make_target: Callable[..., Path], *, seed: int = 7, **changes: Any
) -> BlockDraftFiles:
    """Write a draft of a variant, and its target.

    Args:
        folder: of the draft.
        name: one of VARIANTS.
        make_target: writes the tiny target.
        seed: of the draft's weights.
        changes: `intermediate` of the weights, and arguments of `write_draft`, which win.
    """
    variant = VARIANTS[name]
    sizes: dict[str, Any] = {"logit_scale": 0.1, **variant.sizes}
    sizes |= {k: changes.pop(k) for k in list(changes) if k == "intermediate"}
    weights = random_weights(seed, **sizes)
    for tensor_name, tensor in weights.tensors.items():
        if tensor_name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.3  # as where a layer adds little to the residual stream
    target_sizes: dict[str, Any] = {"n_layers": 4, "logit_scale": sizes["logit_scale"]}
    if variant.gemma:
        target_sizes["config"] = _GEMMA
    target = make_target(**target_sizes)
    written = {**variant.written, **changes}
    write_draft(folder, weights, **written)
    own = "own_embeddings" in written
    return BlockDraftFiles(
        source=DraftSource(folder=folder, target=target, embeddings="own" if own else "auto"),
        weights=weights,
        variant=variant,
        shared=None
        if own
        else load_file(target / "model.safetensors")["model.embed_tokens.weight"],
    )
