"""One training run, from its command line to a loadable draft: load, train, publish, plot."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from drafter_service.training import model_card
from drafter_service.training.batches import Recipe
from drafter_service.training.features import Features
from drafter_service.training.run_config import RunConfig
from drafter_service.training.store import Rollouts, open_rollouts
from drafter_service.training.target import TrainingTarget, load_training_target
from drafter_service.training.trainer import CHECKPOINT, HeldOut, TrainResult, train
from splitspec.errors import UserError
from splitspec.folders import model_folder

logger = logging.getLogger(__name__)
RECORD = "run.json"
EVALUATED_ROWS = 96
"""Most held-out rows of one kind, greedy or sampled, that an evaluation walks."""
_FREE = ("run", "rollouts", "cache_dir", "checkpoint_seconds", "feature_gib")
"""Fields that a run may change when it resumes; what `feature_gib` decides is compared apart."""


def run_training(
    config: RunConfig,
    options: Mapping[str, Any],
    build: Callable[[TrainingTarget, Rollouts], Recipe],
) -> None:
    """Train a draft and leave it in `config.run`/draft, with metrics, run.json and the plot.

    A run folder whose training ended early is resumed.

    Args:
        config: what methods have in common.
        options: the method's own options, as JSON values, for run.json.
        build: makes the recipe; may raise UserError.

    Raises:
        UserError: what is wrong with an argument or a file, the run folder is another run's or
            finished, or the loss is not finite.
    """
    target = load_training_target(
        model_folder(config.target, config.cache_dir),
        device=config.device,
        precision=config.chosen_precision,
        cache_dir=config.cache_dir,
    )
    rollouts = open_rollouts(config.rollouts, model_hash=target.model_hash)
    torch.manual_seed(config.seed)
    recipe = build(target, rollouts)
    features = Features(
        target,
        rollouts,
        tap_layers=recipe.tap_layers,
        gib=config.feature_gib,
        least_rows=config.batch_rows,
    )
    record = _describe(config, options, recipe, target, rollouts, features)
    _start(config.run, record)
    result = train(recipe, features, config, held_out=held_out_rows(rollouts))
    _finish(config.run, record, recipe, features, result)


def held_out_rows(rollouts: Rollouts) -> HeldOut:
    """Return the held-out rows that evaluations walk: the first greedy and sampled ones."""
    rows = rollouts.held_out_rows
    greedy = rollouts.temperatures[rows] == 0
    return HeldOut(greedy=rows[greedy][:EVALUATED_ROWS], sampled=rows[~greedy][:EVALUATED_ROWS])


def _describe(
    config: RunConfig,
    options: Mapping[str, Any],
    recipe: Recipe,
    target: TrainingTarget,
    rollouts: Rollouts,
    features: Features,
) -> dict[str, Any]:
    """Return what run.json says from the start on."""
    fields = {name: value for name, value in asdict(config).items() if name not in _FREE}
    fields["precision"] = config.chosen_precision
    fields["tap_layers"] = list(recipe.tap_layers)
    return {
        "method": recipe.method,
        "target_model_id": target.model_id,
        "target_model_hash": target.model_hash,
        "rollouts": {
            "parameters": dict(rollouts.provenance.parameters),
            "counts": dict(rollouts.counts),
            "rows": len(rollouts.training_rows),
            "row_length": features.row_length,
            "tokens": len(rollouts.training_rows) * features.row_length,
        },
        "parameters": {**fields, **options, "rows_at_once": features.capacity},
        "facts": recipe.facts,
        "trained_parameters": sum(p.numel() for p in recipe.parameters.values()),
    }


def _start(folder: Path, record: Mapping[str, Any]) -> None:
    """Make the run folder, or check that the run in it is this one and not finished.

    Raises:
        UserError: names the folder, and the field that differs with both values.
    """
    path = folder / RECORD
    if not path.is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            strange = sorted(entry.name for entry in folder.iterdir())
        except OSError as error:
            raise UserError(f"--run {folder}: {error.strerror}") from error
        if strange:
            raise UserError(f"--run {folder} is no run and not empty: it holds {strange[0]!r}")
        write_json(path, record)
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        flat, wanted = _flat(found), _flat(json.loads(json.dumps(record)))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if "tau" in found:
        raise UserError(f"--run {folder} is finished; give another folder")
    for name in sorted(wanted):
        if flat.get(name) != wanted[name]:
            raise UserError(
                f"--run {folder} was begun with {name} {flat.get(name)!r}, not {wanted[name]!r}: "
                "resume it with the same, or give another folder"
            )


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a record's leaves by their dotted names."""
    leaves: dict[str, Any] = {}
    for key, value in record.items():
        name = f"{prefix}{key}"
        leaves |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return leaves


def _finish(
    folder: Path,
    record: Mapping[str, Any],
    recipe: Recipe,
    features: Features,
    result: TrainResult,
) -> None:
    """Publish the draft, write what became of the run, and plot it."""
    done = {**record, **result.record()}
    draft = folder / "draft"
    recipe.publish(
        draft, result.parameters, tap_rms=features.tap_rms, model_card=model_card.render(done)
    )
    names = ("method", "target_model_id", "target_model_hash", "rollouts", "parameters", "facts")
    write_json(
        draft / "training.json",
        {name: done[name] for name in (*names, "steps", "seconds", "tau", "sampled_tau")},
    )
    write_json(folder / RECORD, done)
    (folder / CHECKPOINT).unlink(missing_ok=True)
    try:
        # Late, because matplotlib is not everywhere where training is.
        importlib.import_module("drafter_service.training.plot").plot_run(folder)
    except ImportError as error:
        logger.warning("no plot: %s; draw it elsewhere: splitspec train plot %s", error, folder)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
