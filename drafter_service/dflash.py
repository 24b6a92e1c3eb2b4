"""DFlash: draft a block of tokens in one pass over the target's committed rows.

A step extends each session's context by the rows that have committed and then runs, for every
session that drafts, one block `[pending, MASK, ...]`: one pass, whatever K is. The pending token's
row is not needed: it does not exist yet. Only committed rows enter a context, so that nothing is
ever rolled back. After "DFlash" (arXiv:2602.06036).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from drafter_service.config import DrafterConfig
from drafter_service.draft_model import (
    check_finite,
    draft_folders,
    draft_info,
    session_sampling,
    warn_of_spoilt,
)
from drafter_service.drafter import (
    Drafter,
    DrafterInfo,
    DraftSampling,
    DraftWork,
    SessionParameters,
)
from drafter_service.row_features import RowFeatures
from graph_runtime.choice import Sampling, choose
from graph_runtime.dflash.draft import BlockDraft, BlockWork
from graph_runtime.dflash.load import load_draft
from graph_runtime.drafts.source import DraftSource
from graph_runtime.load import needing_executorch
from splitspec.commands import check_range


@dataclass(slots=True)
class _Slot:
    """One session."""

    slot: int
    sampling: Sampling
    length: int = 0
    """Committed length (law L2)."""
    is_spoilt: bool = False
    """A row or a logit was no number: nothing runs until the slot is released."""

    def spoil(self, what: str) -> None:
        """Draft no more; `what` was not finite."""
        warn_of_spoilt(self.slot, what)
        self.is_spoilt = True


class DFlashDrafter:
    """Drafts for many sessions in packed steps of one draft."""

    def __init__(self, draft: BlockDraft, info: DrafterInfo, draft_sampling: DraftSampling) -> None:
        """Draft with a loaded `draft`.

        Args:
            draft: with a cache of `info`'s slots and lengths.
            info: the handshake; its row format says what rows are.
            draft_sampling: of sessions that leave it to the method.
        """
        self._draft = draft
        self._info = info
        self._draft_sampling = draft_sampling
        self._features = RowFeatures(info.row_format, draft.fuse)
        self._target_ids = None if draft.target_ids is None else draft.target_ids.numpy()
        self._slots: dict[int, _Slot] = {}
        self._pass_count = 0

    @property
    def info(self) -> DrafterInfo:
        """Return what is loaded."""
        return self._info

    @property
    def pass_count(self) -> int:
        """Return how many packed blocks steps have run; projecting rows is no pass (D2)."""
        return self._pass_count

    def open(self, slot: int, parameters: SessionParameters) -> None:
        """Begin an empty context in a free slot."""
        assert slot not in self._slots, slot
        self._slots[slot] = _Slot(slot, session_sampling(parameters, self._draft_sampling))

    def step(self, works: Sequence[DraftWork]) -> list[list[int]]:
        """Extend every session's context and run the blocks of those that draft, in one pass."""
        drafts: list[list[int]] = [[] for _ in works]
        blocks = {i: block for i, w in enumerate(works) if (block := self._advance(w)) is not None}
        if not blocks:
            return drafts
        packed = list(blocks.values())
        self._pass_count += any(block.draft_count for block in packed)
        logits = self._draft.run(packed)
        for (i, block), own in zip(blocks.items(), logits, strict=True):
            if block.draft_count:
                drafts[i] = self._choose(self._slots[block.slot], own)
        return drafts

    def release(self, slot: int) -> None:
        """Forget a slot's context."""
        del self._slots[slot]
        self._draft.reset(slot)

    def _advance(self, work: DraftWork) -> BlockWork | None:
        """Commit a work's positions; return what to run for it, None where that is nothing."""
        slot = self._slots[work.slot]
        assert slot.length == work.start, "law L2"
        slot.length += len(work.token_ids)
        features = None
        if work.token_ids and not slot.is_spoilt:
            features = self._features.read(work)
            if not bool(torch.isfinite(features).all()):
                slot.spoil("the features of its rows")
        if slot.is_spoilt or not (work.token_ids or work.draft_count):
            return None
        block = BlockWork(
            slot=work.slot,
            start=work.start,
            features=features,
            pending_token_id=work.pending_token_id,
            draft_count=work.draft_count,
        )
        assert block.length == slot.length, "law L2: a row for each committed position"
        return block

    def _choose(self, slot: _Slot, logits: torch.Tensor) -> list[int]:
        """Return the draft tokens of logits [K, Vd]; none where one is no number."""
        if not bool(torch.isfinite(logits).all()):
            slot.spoil("the draft's logits")
            return []
        # Pending is at position `length`, and each of d1.. meets the noise of its own (V8).
        positions = range(slot.length + 1, slot.length + 1 + len(logits))
        return choose(logits, slot.sampling, positions, target_ids=self._target_ids)


def load(config: DrafterConfig, stop: threading.Event | None = None) -> Drafter:
    """Load and warm up the draft that `config` names; `stop` ends an export.

    Raises:
        UserError: what is wrong with the checkpoint, the target or a flag.
    """
    draft, checkpoint = load_draft(
        _source(config),
        block_length=config.block_length,
        runtime=config.runtime,
        precision=config.chosen_precision,
        cache_dir=config.cache_dir.expanduser(),
        max_context_length=config.chosen_context_length,
        slot_count=config.chosen_slot_count,
        threads=config.threads,
        device=config.device,
        stop=stop,
    )
    most = draft.config.max_draft_count(draft.block_length)
    count = most if config.chosen_draft_count is None else config.chosen_draft_count
    check_range("--max-draft-count", count, 1, most)
    info = draft_info(
        config, draft, tokenizer_hash=checkpoint.tokenizer_hash, max_draft_count=count
    )
    _warm_up(config, draft, info)
    return DFlashDrafter(draft, info, DraftSampling(config.chosen_draft_sampling))


def ensure_program(config: DrafterConfig) -> Path:
    """Return the path of the draft's program in the cache, exported now if it is not there.

    Raises:
        UserError: what is wrong with the checkpoint, the target, a flag or the program.
    """
    with needing_executorch():
        from graph_runtime.programs import check_digest, ensure_dflash_program
    path = ensure_dflash_program(
        _source(config),
        block_length=config.block_length,
        precision=config.chosen_precision,
        cache_dir=config.cache_dir.expanduser(),
        max_context_length=config.chosen_context_length,
    )
    check_digest(path)
    return path


def _source(config: DrafterConfig) -> DraftSource:
    """Return what `config` says about the checkpoint.

    Raises:
        UserError: see `draft_folders`.
    """
    folder, target = draft_folders(config)
    return DraftSource(
        folder=folder,
        target=target,
        tap_layers=config.tap_layers,
        embeddings=config.embeddings,
    )


def _warm_up(config: DrafterConfig, draft: BlockDraft, info: DrafterInfo) -> None:
    """Run a chunk of rows and a block once: the first call takes longer than any later one.

    Raises:
        UserError: what comes out is not finite: no session would ever get a draft token.
    """
    count = min(8, info.max_context_length)
    features = draft.fuse(torch.ones(count, draft.config.raw_row_width))
    check_finite(config, "features", features)
    work = BlockWork(
        slot=0,
        start=0,
        features=features,
        pending_token_id=0,
        draft_count=draft.config.max_draft_count(draft.block_length),
    )
    (logits,) = draft.run([work])
    check_finite(config, "logits", logits)
    draft.reset(0)
