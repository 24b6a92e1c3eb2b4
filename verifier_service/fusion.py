"""The projection of the draft that `--fuse-for` names."""

from __future__ import annotations

from pathlib import Path

from graph_runtime.projection import RowProjection, load_projection
from verifier_service.config import VerifierConfig


def load_draft_fusion(config: VerifierConfig, target: Path) -> RowProjection | None:
    """Load the projection that `config.fuse_for` asks for onto the target's device; None: none.

    Args:
        config: as the process was started.
        target: the target's HF-layout folder.

    Raises:
        UserError: the draft is broken, reads layers or widths that the target does not have, or
            other layers than `--tap-layers`.
    """
    if config.fuse_for is None:
        return None
    return load_projection(
        config.fuse_for.expanduser(),
        target=target,
        tap_layers=config.tap_layers,
        cache_dir=config.cache_dir.expanduser(),
        device=config.device,
    )
