"""`splitspec train eagle3`."""

from __future__ import annotations

from typing import Annotated

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
from splitspec.commands import check_range, flag, parse_tap_layers

MAX_UNROLL = 7
"""As many draft tokens as a round of the served drafter may have."""
MAX_INTERMEDIATE_SIZE = 2**17
MAX_DRAFT_VOCAB_SIZE = 2**24

DraftVocabSize = Annotated[
    int | None,
    flag("draft-vocab-size", "Tokens that the draft's head can draft; else what fits in a file."),
]
IntermediateSize = Annotated[
    int | None,
    flag("intermediate-size", "Inner width of the draft's MLP; else twice the target's."),
]
Unroll = Annotated[int, flag("unroll", "Chain steps that are trained, each on the last one's.")]


def eagle3(
    rollouts: RolloutsFolder,
    run: RunFolder,
    target: Target = RunConfig.target,
    steps: Steps = None,
    seconds: Seconds = None,
    batch_rows: BatchRows = RunConfig.batch_rows,
    learning_rate: LearningRate = 3e-3,
    seed: Seed = RunConfig.seed,
    device: Device = RunConfig.device,
    precision: Precision = None,
    tap_layers: TapLayers = None,
    draft_vocab_size: DraftVocabSize = None,
    intermediate_size: IntermediateSize = None,
    unroll: Unroll = 4,
    feature_gib: FeatureGib = RunConfig.feature_gib,
    checkpoint_seconds: CheckpointSeconds = RunConfig.checkpoint_seconds,
    cache_dir: CacheDir = RunConfig.cache_dir,
) -> None:
    """Train an EAGLE-3 draft on rollouts, or go on with a run that ended early."""
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
    check_range("--unroll", unroll, 1, MAX_UNROLL)
    if draft_vocab_size is not None:
        check_range("--draft-vocab-size", draft_vocab_size, 1, MAX_DRAFT_VOCAB_SIZE)
    if intermediate_size is not None:
        check_range("--intermediate-size", intermediate_size, 1, MAX_INTERMEDIATE_SIZE)
    # Torch takes seconds to import, which a wrong flag need not wait for.
    from drafter_service.training.eagle3_start import Eagle3Options, build_eagle3
    from drafter_service.training.run import run_training

    options = Eagle3Options(
        draft_vocab_size=draft_vocab_size, intermediate_size=intermediate_size, unroll=unroll
    )
    run_training(config, vars(options), lambda *text: build_eagle3(config, options, *text))
