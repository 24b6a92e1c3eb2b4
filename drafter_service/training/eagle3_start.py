"""Choose what a new EAGLE-3 draft looks like, for any target."""

from __future__ import annotations

from dataclasses import dataclass

from drafter_service.training.draft_vocabulary import choose_target_ids, special_token_ids
from drafter_service.training.eagle3 import Eagle3Recipe, Eagle3Shape
from drafter_service.training.features import FIRST_POSITIONS
from drafter_service.training.publish import largest_head
from drafter_service.training.run_config import RunConfig
from drafter_service.training.store import Rollouts
from drafter_service.training.target import TrainingTarget
from drafter_service.training.walk import DRAFT_COUNT
from graph_runtime.limits import check_tap_layers
from splitspec.commands import check_range
from splitspec.errors import UserError
from splitspec.folders import model_folder

_VOCABULARY_STEP = 512
_FLASH_HEAD_DIMS = (8, 256)


@dataclass(frozen=True, kw_only=True)
class Eagle3Options:
    """What a user may choose; None: chosen for the target."""

    draft_vocab_size: int | None
    """None: as many as fit in one published file, in multiples of 512, at most the target's."""
    intermediate_size: int | None
    """None: twice the target's."""
    unroll: int


def build_eagle3(
    config: RunConfig, options: Eagle3Options, target: TrainingTarget, rollouts: Rollouts
) -> Eagle3Recipe:
    """Return a new draft for `target` with a vocabulary chosen from the training rows.

    Raises:
        UserError: names the flag, its value and the range; or the text's rows are too short.
    """
    length = rollouts.tokens.shape[1]
    least = FIRST_POSITIONS + DRAFT_COUNT + 3
    if length < least:
        raise UserError(f"rollouts have rows of {length} tokens; expected at least {least}")
    _check_head_dim(target)
    rows = rollouts.training_rows
    vocabulary = target.config.vocab_size
    ids, coverage = choose_target_ids(
        rollouts.tokens[rows],
        rollouts.roles[rows],
        size=_vocabulary_size(options.draft_vocab_size, target),
        vocab_size=vocabulary,
        always=special_token_ids(model_folder(config.target, config.cache_dir)),
    )
    shape = Eagle3Shape(
        tap_layers=check_tap_layers(target.config, config.tap_layers),
        target_ids=ids,
        intermediate_size=options.intermediate_size or 2 * target.config.intermediate_size,
        unroll=options.unroll,
    )
    facts = {
        "draft_vocab_size": len(ids),
        "coverage": round(coverage, 4),
        "intermediate_size": shape.intermediate_size,
        "unroll": shape.unroll,
    }
    return Eagle3Recipe(target, shape, seed=config.seed, facts=facts)


def _vocabulary_size(wanted: int | None, target: TrainingTarget) -> int:
    vocabulary = target.config.vocab_size
    most = min(largest_head(target.config.hidden_size), vocabulary)
    if wanted is not None:
        check_range("--draft-vocab-size", wanted, 1, most)
        return wanted
    return most if most == vocabulary else max(most // _VOCABULARY_STEP, 1) * _VOCABULARY_STEP


def _check_head_dim(target: TrainingTarget) -> None:
    least, most = _FLASH_HEAD_DIMS
    width = target.config.head_dim
    if target.device.type == "cuda" and (width % least or width > most):
        raise UserError(
            f"head_dim of the target is {width}; --device cuda trains EAGLE-3 drafts with a "
            f"multiple of {least} up to {most}"
        )
