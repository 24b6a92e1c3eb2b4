"""`splitspec train rollouts`: the target writes the text that drafts are trained on."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from drafter_service.training.generation import PassPlan, RowWriter
from drafter_service.training.rollouts_config import RolloutsConfig
from drafter_service.training.seeds import built_in_seeds, read_seeds
from drafter_service.training.store import (
    Provenance,
    Rollouts,
    finish_rollouts,
    open_rollouts,
    start_rollouts,
    write_pass,
)
from drafter_service.training.target import TrainingTarget, load_training_target
from drafter_service.training.turns import Turns, read_turns
from splitspec.errors import UserError
from splitspec.folders import model_folder

logger = logging.getLogger(__name__)

TEMPERATURES: Mapping[float, int] = {0.0: 5, 0.7: 3, 1.0: 2}
"""Of a row's answers -> its weight."""
REPEATED_TEMPERATURES: Mapping[float, int] = {0.7: 6, 1.0: 4}
"""Of answers to an instruction that was used before: greedy ones would be the same again."""


def write_rollouts(config: RolloutsConfig) -> Rollouts:
    """Write the passes that the folder lacks, and return all of them, filtered and counted.

    Every pass has random numbers of its own, so a run that ended early continues as if it had not.

    Raises:
        UserError: what is wrong with the target, a flag or the folder, in one line.
    """
    folder = model_folder(config.target, config.cache_dir)
    turns = read_turns(folder)
    seeds = _encoded_seeds(config, turns)
    target = load_training_target(
        folder,
        device=config.device,
        precision=config.chosen_precision,
        cache_dir=config.cache_dir,
    )
    least = len(turns.opening) + len(turns.answer_opening) + len(turns.user_opening) + 16
    if not least <= config.length <= target.max_row_length:
        raise UserError(
            f"--length {config.length} is not in {least}..{target.max_row_length} of this target"
        )
    first = start_rollouts(config.out, _provenance(config, target, turns, seeds))
    if first < config.passes:
        _write_passes(config, range(first, config.passes), target, turns, seeds)
    rollouts = open_rollouts(config.out, model_hash=target.model_hash)
    finish_rollouts(config.out, rollouts)
    return rollouts


def plan_pass(
    config: RolloutsConfig, index: int, turns: Turns, seeds: Sequence[Sequence[int]]
) -> PassPlan:
    """Return what pass `index` starts from: a function of the seed and the index alone.

    Args:
        config: the run's.
        index: 0-based.
        turns: of the target's template.
        seeds: token ids of each instruction, none of them too long for a row. A pass takes the
            next of them in a shuffled order, and starts over when all have been used.
    """
    draws = random.Random(f"{config.seed}/pass {index}")
    order = list(range(len(seeds)))
    random.Random(f"{config.seed}/order").shuffle(order)
    seeded_rows = round(config.rows * config.seeded_share) if seeds else 0
    forced, temperatures = [], []
    for row in range(config.rows):
        use = index * seeded_rows + row if row < seeded_rows else None
        if use is None:
            ids = list(turns.opening)
        else:
            ids = [*turns.opening, *seeds[order[use % len(seeds)]], turns.user_end]
        used_before = use is not None and use >= len(seeds)
        weights = REPEATED_TEMPERATURES if used_before else TEMPERATURES
        temperatures += draws.choices(list(weights), list(weights.values()))
        forced.append(ids)
    return PassPlan(forced=forced, temperatures=temperatures, seed=draws.getrandbits(63))


def _write_passes(
    config: RolloutsConfig,
    indices: range,
    target: TrainingTarget,
    turns: Turns,
    seeds: Sequence[Sequence[int]],
) -> None:
    writer = RowWriter(target, turns, rows=config.rows, length=config.length)
    per_pass = config.length - 1
    with tqdm(
        total=config.passes * per_pass,
        initial=indices.start * per_pass,
        desc="rollouts",
        unit="tok",
        unit_scale=config.rows,
    ) as bar:
        for index in indices:
            written, loop_ends = writer.write(plan_pass(config, index, turns, seeds), bar.update)
            write_pass(config.out, index, written)
            answered = float((written.roles == 1).float().mean())
            bar.set_postfix_str(f"{answered:.1%} in answers, {loop_ends} loops ended")


def _encoded_seeds(config: RolloutsConfig, turns: Turns) -> list[list[int]]:
    """Return the token ids of every instruction that leaves half a row for its answer.

    Raises:
        UserError: the file cannot be read, a line holds a special token, or none is short enough.
    """
    if not config.seeded_share:
        return []
    texts = built_in_seeds(config.seed) if config.seeds is None else read_seeds(config.seeds)
    encoded = [turns.encode(text) for text in texts]
    for text, ids in zip(texts, encoded, strict=True):
        if not turns.text_tokens.issuperset(ids):
            raise UserError(f"--seeds {config.seeds}: {text[:60]!r} holds a special token")
    room = config.length // 2 - len(turns.opening) - 1 - len(turns.answer_opening)
    short = [ids for ids in encoded if len(ids) <= room]
    if not short:
        raise UserError(
            f"--length {config.length} is too short: no instruction has at most {room} tokens"
        )
    if len(short) < len(encoded):
        logger.info("%d instructions are too long for half a row", len(encoded) - len(short))
    return short


def _provenance(
    config: RolloutsConfig,
    target: TrainingTarget,
    turns: Turns,
    seeds: Sequence[Sequence[int]],
) -> Provenance:
    """Return what the text depends on; `passes` is not part of it, so that more can be added."""
    parameters: dict[str, Any] = {
        "seed": config.seed,
        "rows": config.rows,
        "length": config.length,
        "precision": config.chosen_precision,
        "device": target.device.type,
        "seeded_share": config.seeded_share,
        "seeds": "built-in" if config.seeds is None else Path(config.seeds).name,
        "seeds_count": len(seeds),
        "seeds_hash": hashlib.sha256(repr(seeds).encode()).hexdigest(),
        "opening": list(turns.opening),
        "temperatures": {str(value): weight for value, weight in TEMPERATURES.items()},
    }
    return Provenance(
        model_id=target.model_id,
        model_hash=target.model_hash,
        tokenizer_hash=target.tokenizer_hash,
        opening_length=len(turns.opening),
        user_end_token=turns.user_end,
        parameters=parameters,
        filters=config.filters,
    )
