"""What `train eagle3` and `train dflash` have in common: their flags and one run's configuration.

A command declares its parameters with the types here, in the same names as `RunConfig`'s fields:

    def dflash(rollouts: RolloutsFolder, run: RunFolder, target: Target = DEFAULTS.target, ...):
        config = RunConfig(rollouts=rollouts, run=run, target=target, ...)
        from drafter_service.training.run import run_training
        run_training(config, {"block_length": 8}, build)

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from splitspec.commands import check_range, flag
from splitspec.errors import UserError
from splitspec.folders import DEFAULT_CACHE_DIR

DEVICES = ("cpu", "cuda")
PRECISIONS = ("fp32", "bf16", "8da8w")
MAX_SEED = 2**63 - 1
MAX_STEPS = 10**9
MAX_SECONDS = 30 * 24 * 3600.0
MAX_BATCH_ROWS = 4096
MAX_FEATURE_GIB = 65536.0

RolloutsFolder = Annotated[Path, flag("rollouts", "Folder that `train rollouts` wrote.")]
RunFolder = Annotated[
    Path, flag("run", "Folder of the run: metrics, checkpoints, draft. One that is there resumes.")
]
Target = Annotated[str, flag("target", "A pulled model's name, or an HF-layout folder.")]
Steps = Annotated[int | None, flag("steps", "Optimiser steps; this or --seconds.")]
Seconds = Annotated[
    float | None, flag("seconds", "Seconds of steps, features and evaluations apart; or --steps.")
]
BatchRows = Annotated[int, flag("batch-rows", "Rows of text in a step.")]
LearningRate = Annotated[float, flag("learning-rate", "Highest learning rate; see the schedule.")]
Seed = Annotated[int, flag("seed", "Of the first weights and of every draw of the training.")]
Device = Annotated[str, flag("device", "cpu or cuda.")]
Precision = Annotated[
    str | None,
    flag("precision", "Of the target: fp32, bf16, 8da8w; else fp32 on cpu, bf16 on cuda."),
]
TapLayers = Annotated[
    str | None, flag("tap-layers", "Target layers that the draft reads, like 1,14,26; by method.")
]
FeatureGib = Annotated[
    float, flag("feature-gib", "Device memory for the target's features; the rest takes turns.")
]
CheckpointSeconds = Annotated[
    float, flag("checkpoint-seconds", "Seconds between checkpoints that a run resumes from.")
]
CacheDir = Annotated[Path, flag("cache-dir", "Where models and programs are kept.")]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run; the flags have the same names and defaults.

    Raises:
        UserError: a value is out of its range; names the flag, the value and the range.
    """

    rollouts: Path
    run: Path
    learning_rate: float
    """Each method has a default of its own."""
    target: str = "smollm2-135m"
    steps: int | None = None
    seconds: float | None = None
    """Exactly one of `steps` and `seconds` is given."""
    batch_rows: int = 16
    seed: int = 0
    device: str = "cpu"
    precision: str | None = None
    tap_layers: tuple[int, ...] | None = None
    """None: the method's own choice for the target."""
    feature_gib: float = 100.0
    checkpoint_seconds: float = 120.0
    cache_dir: Path = DEFAULT_CACHE_DIR

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            given = "both" if self.steps is not None else "neither"
            raise UserError(f"--steps and --seconds: {given} given; expected one of them")
        if self.steps is not None:
            check_range("--steps", self.steps, 1, MAX_STEPS)
        if self.seconds is not None:
            check_range("--seconds", self.seconds, 1, MAX_SECONDS)
        check_range("--learning-rate", self.learning_rate, 1e-8, 1.0)
        check_range("--batch-rows", self.batch_rows, 1, MAX_BATCH_ROWS)
        check_range("--seed", self.seed, 0, MAX_SEED)
        check_range("--feature-gib", self.feature_gib, 1e-6, MAX_FEATURE_GIB)
        check_range("--checkpoint-seconds", self.checkpoint_seconds, 0, MAX_SECONDS)
        _check_choice("--device", self.device, DEVICES)
        if self.precision is not None:
            _check_choice("--precision", self.precision, PRECISIONS)
        if self.device == "cuda" and self.precision == "fp32":
            raise UserError("--precision 'fp32' is for --device cpu; cuda trains in bf16 or 8da8w")

    @property
    def chosen_precision(self) -> str:
        """Return the target's precision."""
        return self.precision or ("fp32" if self.device == "cpu" else "bf16")


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"{name} {value!r} is not {', '.join(known[:-1])} or {known[-1]}")
