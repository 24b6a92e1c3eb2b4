"""EAGLE-3: draft with a small network that reads the target's rows, in the shifted scheme.

A round is K passes: one that seeds what has committed since the last one and yields d1, then K - 1
of one draft slot a session, each fed with the session's own recurrent feature. When draft tokens
are accepted, the target's rows of their positions overwrite those slots: nothing is rolled back.
After Li et al., "EAGLE-3" (2025).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from drafter_service.config import DrafterConfig
from drafter_service.draft_model import (
    check_finite,
    draft_folders,
    draft_info,
    session_sampling,
)
from drafter_service.drafter import (
    Drafter,
    DrafterInfo,
    DraftSampling,
    DraftWork,
    SessionParameters,
)
from drafter_service.eagle3_slots import Chain, Slot
from drafter_service.row_features import RowFeatures
from graph_runtime.choice import Sampling, choose
from graph_runtime.eagle3.checkpoint import Eagle3Source
from graph_runtime.eagle3.draft import Draft, DraftSpan
from graph_runtime.eagle3.load import load_draft
from graph_runtime.load import needing_executorch


class Eagle3Drafter:
    """Drafts for many sessions in packed passes of one draft."""

    def __init__(self, draft: Draft, info: DrafterInfo, draft_sampling: DraftSampling) -> None:
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
        self._slots: dict[int, Slot] = {}
        self._pass_count = 0

    @property
    def info(self) -> DrafterInfo:
        """Return what is loaded."""
        return self._info

    @property
    def pass_count(self) -> int:
        """Return how many packed passes steps have run."""
        return self._pass_count

    def open(self, slot: int, parameters: SessionParameters) -> None:
        """Begin an empty context in a free slot."""
        assert slot not in self._slots, slot
        sampling = session_sampling(parameters, self._draft_sampling)
        self._slots[slot] = Slot(slot, sampling)

    def step(self, works: Sequence[DraftWork]) -> list[list[int]]:
        """Seed what is known of every session in one pass, then draft on in step.

        No draft slot beyond the context is written (E13): near its end fewer tokens are drafted.
        """
        drafts: list[list[int]] = [[] for _ in works]
        spans: list[DraftSpan] = []
        chains: dict[int, Chain] = {}
        for work, ids in zip(works, drafts, strict=True):
            slot = self._slots[work.slot]
            span = self._advance(slot, work)
            if span is None:
                continue
            if work.draft_count:
                room = self._info.max_context_length - slot.length + 1
                chains[len(spans)] = Chain(slot=slot, count=min(work.draft_count, room), ids=ids)
            spans.append(span)
        if spans:
            features = self._run(spans)
            self._chain(list(chains.values()), features[list(chains)])
        return drafts

    def release(self, slot: int) -> None:
        """Forget a slot's context."""
        del self._slots[slot]
        self._draft.reset(slot)

    def _advance(self, slot: Slot, work: DraftWork) -> DraftSpan | None:
        """Extend a session; a row that is no number spoils it, and it alone."""
        assert slot.length == work.start, "law L2"
        features = None
        if work.token_ids and not slot.is_spoilt:
            features = self._features.read(work)
            if not bool(torch.isfinite(features).all()):
                slot.spoil("the features of its rows")
        if slot.is_spoilt:
            slot.length += len(work.token_ids)
            return None
        return slot.advance(work, features)

    def _run(self, spans: Sequence[DraftSpan]) -> torch.Tensor:
        self._pass_count += 1
        return self._draft.run(spans)

    def _chain(self, chains: Sequence[Chain], features: torch.Tensor) -> None:
        """Draft each session's tokens, those of one step of all in one pass.

        Args:
            chains: B sessions, none with a token yet.
            features: [B, H] recurrent features of their last seeded slots.
        """
        while chains:
            kept = self._choose(chains, features)
            chains = [chains[i] for i in kept]
            if not chains:
                return
            spans = [c.span(features[i : i + 1]) for i, c in zip(kept, chains, strict=True)]
            features = self._run(spans)

    def _choose(self, chains: Sequence[Chain], features: torch.Tensor) -> list[int]:
        """Add one draft token each; return the indices of the sessions that want another."""
        logits = self._draft.logits(features)
        finite = torch.isfinite(logits).all(dim=1).tolist()
        alike: dict[Sampling, list[int]] = {}
        for i, chain in enumerate(chains):
            if finite[i]:
                alike.setdefault(chain.slot.sampling, []).append(i)
            else:
                chain.slot.spoil("the draft's logits")
                chain.ids.clear()
        for sampling, at in alike.items():  # a row's choice does not depend on the other rows
            positions = [chains[i].position for i in at]
            chosen = choose(logits[at], sampling, positions, target_ids=self._target_ids)
            for i, token_id in zip(at, chosen, strict=True):
                chains[i].ids.append(token_id)
        return [i for i, c in enumerate(chains) if finite[i] and len(c.ids) < c.count]


def load(config: DrafterConfig, stop: threading.Event | None = None) -> Drafter:
    """Load and warm up the draft that `config` names; `stop` ends an export.

    Raises:
        UserError: what is wrong with the checkpoint, the target or a flag.
    """
    draft, checkpoint = load_draft(
        _source(config),
        runtime=config.runtime,
        precision=config.chosen_precision,
        cache_dir=config.cache_dir.expanduser(),
        max_context_length=config.chosen_context_length,
        slot_count=config.chosen_slot_count,
        threads=config.threads,
        device=config.device,
        stop=stop,
    )
    assert config.chosen_draft_count is not None, config
    info = draft_info(
        config,
        draft,
        tokenizer_hash=checkpoint.tokenizer_hash,
        max_draft_count=config.chosen_draft_count,
    )
    _warm_up(config, draft, info)
    return Eagle3Drafter(draft, info, DraftSampling(config.chosen_draft_sampling))


def ensure_program(config: DrafterConfig) -> Path:
    """Return the path of the draft's program in the cache, exported now if it is not there.

    Raises:
        UserError: what is wrong with the checkpoint, the target, a flag or the program.
    """
    with needing_executorch():
        from graph_runtime.programs import check_digest, ensure_eagle3_program
    path = ensure_eagle3_program(
        _source(config),
        precision=config.chosen_precision,
        cache_dir=config.cache_dir.expanduser(),
        max_context_length=config.chosen_context_length,
    )
    check_digest(path)
    return path


def _source(config: DrafterConfig) -> Eagle3Source:
    """Return what `config` says about the checkpoint.

    Raises:
        UserError: see `draft_folders`.
    """
    folder, target = draft_folders(config)
    return Eagle3Source(
        folder=folder,
        target=target,
        tap_layers=config.tap_layers,
        embeddings=config.embeddings,
        feedback=config.feedback,
    )


def _warm_up(config: DrafterConfig, draft: Draft, info: DrafterInfo) -> None:
    """Run every kind of pass once: the first call of each takes longer than any later one.

    Raises:
        UserError: what comes out is not finite: no session would ever get a draft token.
    """
    draft.fuse(torch.zeros(1, draft.config.raw_row_width))
    count = min(8, info.max_context_length)
    features = torch.zeros(count, draft.config.hidden_size)
    draft.run([DraftSpan(slot=0, start=0, token_ids=[0] * count, features=features)])
    last = DraftSpan(slot=0, start=count - 1, token_ids=[0], features=features[-1:])
    feature = draft.run([last])
    logits = draft.logits(feature)
    check_finite(config, "features", feature)
    check_finite(config, "logits", logits)
    draft.reset(0)
