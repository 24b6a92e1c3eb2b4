"""Load DFlash draft checkpoints as users have them: safetensors, every tensor accounted for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from graph_runtime.dflash.config import DFlashConfig
from graph_runtime.drafts.source import DraftSource


@dataclass(frozen=True, kw_only=True)
class DFlashCheckpoint:
    """A draft as it is loaded, whatever format it came in."""

    config: DFlashConfig
    model_hash: str
    """SHA-256 of the draft's own files, as hex."""
    target_ids: torch.Tensor | None
    """Target id of each draft id, [Vd] int64 strictly increasing; None: they are the same."""
    tensors: dict[str, torch.Tensor]
    """float32, under the names of the network's parameters: see `layouts.expected_shapes`."""
    tokenizer_hash: str | None
    """Of the target that was given."""


def load_checkpoint(source: DraftSource, cache_dir: Path) -> DFlashCheckpoint:
    """Load a draft, with embeddings and head from the target where the file has none.

    Args:
        source: the draft's folder, the target's, and what to make of them.
        cache_dir: where hashes are kept.

    Raises:
        UserError: what is wrong, in one line that names the tensor or the key.
    """
    raise NotImplementedError


def load_fusion(
    source: DraftSource, cache_dir: Path
) -> tuple[DFlashConfig, str, dict[str, torch.Tensor]]:
    """Load what turns raw rows into features: all that a verifier needs of a draft.

    Embeddings and head are neither read nor needed.

    Returns:
        The draft's shape, the SHA-256 of its files, and its `fusion.*` tensors in float32.

    Raises:
        UserError: as `load_checkpoint`.
    """
    raise NotImplementedError
