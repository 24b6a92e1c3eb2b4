"""Prompt lookup: draft what followed the last time the newest tokens were seen in this session.

Needs no weights and no rows. After Saxena, "Prompt Lookup Decoding" (2023), with an index instead
of a scan, and with drafts that may copy from themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from drafter_service.config import DrafterConfig
from drafter_service.drafter import Drafter, DrafterInfo, DraftWork, SessionParameters
from splitspec.rows import NO_ROWS


class SuffixIndex:
    """The committed tokens of one session, and where each of their n-grams ended last.

    The *most recent* occurrence is kept: text is local, so what followed last time follows again
    more often than what followed first; and in a loop the most recent occurrence lies one period
    back, so that copying from it goes round the loop.
    """

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self.tokens: list[int] = []
        self._lengths = range(ngram_max, ngram_min - 1, -1)
        self._last_end: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens: one dictionary entry a token and n, whatever came before."""
        tokens = self.tokens
        for token_id in token_ids:
            tokens.append(token_id)
            end = len(tokens)
            for n in self._lengths:
                if n <= end:
                    self._last_end[tuple(tokens[end - n :])] = end

    def draft(self, pending: int, draft_count: int) -> list[int]:
        """Return `draft_count` tokens to follow `pending`, or none where its suffix is new.

        The longest suffix of `[*tokens, pending]` that occurred earlier decides. The index holds
        committed tokens only, so the suffix itself, which ends with pending, is never found.
        """
        tokens = self.tokens
        for n in self._lengths:
            if n > len(tokens):  # the suffix would be the whole text: nothing lies before it
                continue
            end = self._last_end.get((*tokens[len(tokens) - n + 1 :], pending))
            if end is not None:
                return self._continuation(end, pending, draft_count)
        return []

    def _continuation(self, start: int, pending: int, draft_count: int) -> list[int]:
        """Copy from `start` on; where the text ends, go on with what was copied (a loop)."""
        copied = [*self.tokens[start : start + draft_count], pending][:draft_count]
        # `copied` now is the text from `start` to at most its end; period = its full length there.
        period = len(copied)
        while len(copied) < draft_count:
            copied.append(copied[-period])
        return copied


@dataclass(slots=True)
class _Slot:
    """One session's index, and how far its drafts have been trusted to go."""

    index: SuffixIndex
    limit: int
    """Most draft tokens of the next draft."""
    drafted: int = 0
    """Draft tokens of the last draft; 0 when there was none."""

    def judge(self, committed: int, most: int) -> None:
        """Adjust the limit to what became of the last draft: pending and accepted committed.

        A draft token that falls costs the verifier a row. After a draft that stood whole the limit
        doubles; after one that did not, the next draft is one longer than what stood.
        """
        if self.drafted:
            accepted = committed - 1
            stood = accepted >= self.drafted
            self.limit = min(most, 2 * self.limit + 1) if stood else max(1, accepted + 1)
            self.drafted = 0


class NgramDrafter:
    """Prompt lookup over the slots' own tokens."""

    def __init__(self, info: DrafterInfo, *, ngram_min: int, ngram_max: int) -> None:
        self._info = info
        self._ngram_min = ngram_min
        self._ngram_max = ngram_max
        self._slots: dict[int, _Slot] = {}

    @property
    def info(self) -> DrafterInfo:
        """Return the limits; any target fits."""
        return self._info

    @property
    def pass_count(self) -> int:
        """Return 0: there is no model."""
        return 0

    def open(self, slot: int, parameters: SessionParameters) -> None:
        """Begin an empty index. There are no logits to sample from: `parameters` change nothing."""
        del parameters
        assert slot not in self._slots, slot
        index = SuffixIndex(self._ngram_min, self._ngram_max)
        self._slots[slot] = _Slot(index, limit=self._info.max_draft_count)

    def step(self, works: Sequence[DraftWork]) -> list[list[int]]:
        """Extend and look up, session by session."""
        return [self._draft(work) for work in works]

    def _draft(self, work: DraftWork) -> list[int]:
        slot = self._slots[work.slot]
        assert len(slot.index.tokens) == work.start, "law L2"
        slot.judge(len(work.token_ids), self._info.max_draft_count)
        slot.index.extend(work.token_ids)
        if work.draft_count == 0:
            return []
        assert work.pending_token_id is not None
        drafts = slot.index.draft(work.pending_token_id, min(work.draft_count, slot.limit))
        slot.drafted = len(drafts)
        return drafts

    def release(self, slot: int) -> None:
        """Forget the index."""
        del self._slots[slot]


def load(config: DrafterConfig, stop: threading.Event | None = None) -> Drafter:
    """Return the drafter that `config` describes; at once, so `stop` ends nothing."""
    del stop
    assert config.chosen_draft_count is not None, config
    info = DrafterInfo(
        method="ngram",
        model_id=f"ngram-{config.ngram_min}-{config.ngram_max}",
        row_format=NO_ROWS,
        max_draft_count=config.chosen_draft_count,
        max_context_length=config.chosen_context_length,
        slot_count=config.chosen_slot_count,
        instant=True,
    )
    return NgramDrafter(info, ngram_min=config.ngram_min, ngram_max=config.ngram_max)
