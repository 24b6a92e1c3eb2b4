"""`splitspec train dflash`."""

from __future__ import annotations

from typing import Annotated

from drafter_service.training.dflash_settings import ANCHORS, BLOCK_LENGTH, DFlashOptions
from drafter_service.training.run_config import (
    BatchRows,
    CacheDir,
    CheckpointSeconds,
    Device,
    FeatureGib,
    LearningRate,
    Precision,
    RolloutsFolder,
    RunConfig,
    RunFolder,
    Seconds,
    Seed,
    Steps,
    TapLayers,
    Target,
)
from splitspec.commands import flag, parse_tap_layers

Layers = Annotated[
    int | None, flag("layers", "Of the draft, copied from the target's last; else at most 5.")
]
BlockLength = Annotated[int, flag("block-length", "Slots of a block, the pending token's with it.")]
MaskToken = Annotated[
    int | None,
    flag("mask-token-id", "What empty slots hold; else a special token that the text lacks."),
]
Anchors = Annotated[int, flag("anchors", "Blocks of a row in a step.")]


def dflash(
    rollouts: RolloutsFolder,
    run: RunFolder,
    target: Target = RunConfig.target,
    steps: Steps = None,
    seconds: Seconds = None,
    batch_rows: BatchRows = RunConfig.batch_rows,
    learning_rate: LearningRate = 2e-3,
    seed: Seed = RunConfig.seed,
    device: Device = RunConfig.device,
    precision: Precision = None,
    tap_layers: TapLayers = None,
    layers: Layers = None,
    block_length: BlockLength = BLOCK_LENGTH,
    mask_token_id: MaskToken = None,
    anchors: Anchors = ANCHORS,
    feature_gib: FeatureGib = RunConfig.feature_gib,
    checkpoint_seconds: CheckpointSeconds = RunConfig.checkpoint_seconds,
    cache_dir: CacheDir = RunConfig.cache_dir,
) -> None:
    """Train a DFlash draft on rollouts, or go on with a run that ended early."""
    config = RunConfig(
        rollouts=rollouts,
        run=run,
        target=target,
        steps=steps,
        seconds=seconds,
        batch_rows=batch_rows,
        learning_rate=learning_rate,
        seed=seed,
        device=device,
        precision=precision,
        tap_layers=parse_tap_layers(tap_layers),
        feature_gib=feature_gib,
        checkpoint_seconds=checkpoint_seconds,
        cache_dir=cache_dir,
    )
    options = DFlashOptions(
        layers=layers, block_length=block_length, mask_token_id=mask_token_id, anchors=anchors
    )
    # Torch takes seconds to import, which a wrong flag need not wait for.
    from drafter_service.training.dflash import build_dflash
    from drafter_service.training.run import run_training

    run_training(config, vars(options), lambda *text: build_dflash(config, options, *text))
