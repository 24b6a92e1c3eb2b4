"""What drafters that run a model share: its files, the handshake, how a session is sampled."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import torch

from drafter_service.config import DrafterConfig
from drafter_service.drafter import DrafterInfo, DraftSampling, SessionParameters
from drafter_service.row_features import row_format
from graph_runtime.choice import Sampling
from splitspec.errors import UserError
from splitspec.folders import model_folder

logger = logging.getLogger(__name__)


class DraftShape(Protocol):
    """What the handshake tells of a draft's shape."""

    @property
    def hidden_size(self) -> int:
        """Return the width of a fused row."""
        ...

    @property
    def raw_row_width(self) -> int:
        """Return the width of a raw row."""
        ...

    @property
    def vocab_size(self) -> int:
        """Return how many ids the target has."""
        ...

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Return the 0-based layer outputs of a raw row."""
        ...


class LoadedDraft(Protocol):
    """A draft of any method."""

    @property
    def config(self) -> DraftShape:
        """Return its shape."""
        ...

    @property
    def model_hash(self) -> str:
        """Return the SHA-256 of the checkpoint, as hex."""
        ...


def draft_folders(config: DrafterConfig) -> tuple[Path, Path | None]:
    """Return the folder of the draft, and that of the target where one is named.

    Raises:
        UserError: the target is neither a folder nor a pulled model, or `~` is nobody's home.
    """
    assert config.draft_model is not None, config
    try:
        folder = config.draft_model.expanduser()
    except RuntimeError as error:
        raise UserError(f"--draft-model {str(config.draft_model)!r}: {error}") from error
    if config.target is None:
        return folder, None
    return folder, model_folder(config.target, config.cache_dir)


def draft_info(
    config: DrafterConfig, draft: LoadedDraft, *, tokenizer_hash: str | None, max_draft_count: int
) -> DrafterInfo:
    """Return the handshake of a loaded draft."""
    assert config.draft_model is not None, config
    shape = draft.config
    return DrafterInfo(
        method=config.draft,
        model_id=config.draft_model.resolve().name,
        model_hash=draft.model_hash,
        vocab_size=shape.vocab_size,
        tokenizer_hash=tokenizer_hash,
        row_format=row_format(
            config.rows,
            config.row_dtype,
            raw_width=shape.raw_row_width,
            fused_width=shape.hidden_size,
        ),
        tap_layers=shape.tap_layers,
        max_draft_count=max_draft_count,
        max_context_length=config.chosen_context_length,
        slot_count=config.chosen_slot_count,
        instant=False,
    )


def session_sampling(parameters: SessionParameters, default: DraftSampling) -> Sampling:
    """Return how a session's draft tokens are chosen: its own way, else by `default`.

    `argmax` is what temperature 0 does; `coupled` is what the target does.
    """
    chosen = parameters.draft_sampling
    if chosen is DraftSampling.METHOD_DEFAULT:
        chosen = default
    if chosen is DraftSampling.ARGMAX:
        return Sampling()
    return Sampling(
        temperature=parameters.temperature,
        top_k=parameters.top_k,
        top_p=parameters.top_p,
        min_p=parameters.min_p,
        seed=parameters.seed,
    )


def check_finite(config: DrafterConfig, what: str, values: torch.Tensor) -> None:
    """Check what a draft gives when it warms up, before it is served.

    Raises:
        UserError: `what` it gives is not finite: no session would ever get a draft token.
    """
    if not bool(torch.isfinite(values).all()):
        raise UserError(
            f"draft {config.draft_model} gives {what} that are not finite: its weights are "
            f"broken, or overflow at {config.chosen_precision}"
        )


def warn_of_spoilt(slot: int, what: str) -> None:
    """Say in the log that a session drafts no more, as `what` was not finite."""
    logger.warning("session in slot %d: %s are not finite, it drafts no more", slot, what)
