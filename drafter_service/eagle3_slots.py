"""What an EAGLE-3 drafter keeps of a session: which positions are seeded, which rows are held.

Draft slot p pairs the feature of position p with the token at p + 1. So the newest committed
position waits until its next token is known: its row is **held** until another position commits,
or until the pending token is given to draft from. A prompt that comes in one piece is held whole,
so that it costs no pass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from drafter_service.draft_model import warn_of_spoilt
from drafter_service.drafter import DraftWork
from graph_runtime.choice import Sampling
from graph_runtime.eagle3.draft import DraftSpan


@dataclass(slots=True)
class _Newest:
    """The newest committed position, seeded with a token that was pending then."""

    token_id: int
    """The token at the position itself."""
    feature: torch.Tensor
    """[1, H]."""
    next_id: int
    """The token that it was seeded with."""


@dataclass(slots=True)
class Slot:
    """One session: which of its committed positions the draft's cache holds."""

    slot: int
    sampling: Sampling
    length: int = 0
    """Committed length (law L2)."""
    seeded: int = 0
    """Draft slots [0, seeded) are in the cache; the features of [seeded, length) are held."""
    held_ids: list[int] = field(default_factory=list)
    """Tokens at the held positions."""
    held: list[torch.Tensor] = field(default_factory=list)
    """Their features, [c, H] float32 each."""
    newest: _Newest | None = None
    """None while rows are held."""
    is_spoilt: bool = False
    """A row or a logit was no number: nothing runs until the slot is released."""

    def spoil(self, what: str) -> None:
        """Draft no more, and forget what must not be run; `what` was not finite."""
        warn_of_spoilt(self.slot, what)
        self.held_ids, self.held, self.newest, self.is_spoilt = [], [], None, True

    def advance(self, work: DraftWork, features: torch.Tensor | None) -> DraftSpan | None:
        """Commit a work's positions; return what to run for it, which yields d1 if it drafts.

        Args:
            work: in order (law L2).
            features: [c, H] of its c positions; None when c is 0.
        """
        token_ids, drafts = work.token_ids, work.draft_count > 0
        if self.newest is not None and (drafts or token_ids):
            newest, self.newest = self.newest, None
            # Seeded with a token that did not commit, or its output is asked for again.
            if not token_ids or token_ids[0] != newest.next_id:
                self.seeded -= 1
                self._hold([newest.token_id], newest.feature)
        span = None
        if token_ids and self.held_ids and not drafts:
            span = self._take(token_ids[0])
        if features is not None:
            self._hold(token_ids, features)
        self.length += len(token_ids)
        if drafts and self.held_ids:
            assert work.pending_token_id is not None
            feature = self.held[-1][-1:].clone()  # not a view of a whole chunk
            newest = _Newest(self.held_ids[-1], feature, work.pending_token_id)
            span = self._take(work.pending_token_id)
            self.newest = newest
        assert self.seeded + len(self.held_ids) == self.length, "law L2"
        return span

    def _hold(self, token_ids: Sequence[int], features: torch.Tensor) -> None:
        self.held_ids.extend(token_ids)
        self.held.append(features)

    def _take(self, next_id: int) -> DraftSpan:
        """Return the held positions, which `next_id` follows, as a span of the cache."""
        span = DraftSpan(
            slot=self.slot,
            start=self.seeded,
            token_ids=[*self.held_ids[1:], next_id],
            features=torch.cat(self.held),
        )
        self.seeded += len(self.held_ids)
        self.held_ids, self.held = [], []
        return span


@dataclass(slots=True, kw_only=True)
class Chain:
    """One session's draft of a step."""

    slot: Slot
    count: int
    """Draft tokens to make."""
    ids: list[int]
    """Those made so far."""

    @property
    def position(self) -> int:
        """Return the absolute position of the next draft token."""
        return self.slot.length + len(self.ids) + 1

    def span(self, feature: torch.Tensor) -> DraftSpan:
        """Return the draft slot of the newest draft token, [1, H] `feature` being its own."""
        return DraftSpan(
            slot=self.slot.slot,
            start=self.slot.length + len(self.ids) - 1,
            token_ids=self.ids[-1:],
            features=feature,
        )
