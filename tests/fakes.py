"""A target without weights, for tests of everything around one.

Its logits are a hash of the whole token prefix, so a wrong cache, slot, position or length shows as
a different token.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from graph_runtime.target import Span, SpanOutput, TargetInfo

_PRIME = 2**61 - 1
_MIX = 0x5851F42D4C957F2D


def prefix_hash(token_ids: Sequence[int], start: int = 0) -> int:
    """Return a hash of `token_ids` that continues from the hash `start`."""
    state = start
    for token_id in token_ids:
        state = (state * 1_000_003 + token_id + 1) % _PRIME
    return state


def hashed_logits(state: int, vocab_size: int, spread: float = 8.0) -> torch.Tensor:
    """Return [V] float32 logits in [0, spread), a function of a prefix's hash."""
    ids = torch.arange(1, vocab_size + 1)
    mixed = (ids * 0x9E3779B97F4A7C1 + state) * _MIX
    mixed = (mixed ^ (mixed >> 29)) * _MIX
    return ((mixed >> 33) & 0xFFFFFF).float() * (spread / 2**24)


class FakeTarget:
    """Implements `graph_runtime.target.Target`.

    A row of the default width 4 holds its position, its token id and 22 bits of its prefix's hash
    in two halves, so that tests see which rows travelled. In bfloat16 they are rounded.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 50,
        slot_count: int = 4,
        max_context_length: int = 64,
        max_prefill_chunk: int = 16,
        min_prefill_chunk: int = 1,
        row_width: int = 4,
        row_dtype: torch.dtype = torch.float32,
        spread: float = 8.0,
    ) -> None:
        self._info = TargetInfo(
            model_id="fake",
            model_hash="f" * 64,
            tokenizer_hash="0" * 64,
            vocab_size=vocab_size,
            n_layers=4,
            tap_layers=(0, 1, 2, 3),
            row_width=row_width,
            row_dtype=row_dtype,
            min_prefill_chunk=min_prefill_chunk,
            max_prefill_chunk=max_prefill_chunk,
            max_context_length=max_context_length,
            slot_count=slot_count,
            precision="fp32",
            runtime="fake",
        )
        self._spread = spread
        # The prefix's hash at each position: what K/V are to a real target. Never cleared.
        self._cache = [[0] * max_context_length for _ in range(slot_count)]
        self.passes: list[list[Span]] = []
        self.fault: Exception | None = None
        """Raised by the next step."""
        self.nan = False
        """The next step's logits are NaN."""
        self.gate: threading.Event | None = None
        """Steps wait until it is set."""

    @property
    def info(self) -> TargetInfo:
        """Return what is loaded."""
        return self._info

    def logits_after(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits [V] that decide the token after `token_ids`, without any cache."""
        return hashed_logits(prefix_hash(token_ids), self._info.vocab_size, self._spread)

    def step(self, spans: Sequence[Span]) -> list[SpanOutput]:
        """Run one packed step."""
        if self.gate is not None:
            assert self.gate.wait(20)
        if self.fault is not None:
            raise self.fault
        assert spans
        assert len({span.slot for span in spans}) == len(spans), "a slot appears at most once"
        self.passes.append(list(spans))
        return [self._run(span) for span in spans]

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        """Copy positions [0, length)."""
        self._cache[destination][:length] = self._cache[source][:length]

    def _run(self, span: Span) -> SpanOutput:
        info = self._info
        count = len(span.token_ids)
        assert count >= 1, span
        assert 0 <= span.logits_count <= count, span
        assert span.start + count <= info.max_context_length, span
        assert all(0 <= token_id < info.vocab_size for token_id in span.token_ids), span
        cache = self._cache[span.slot]
        for offset, token_id in enumerate(span.token_ids):
            at = span.start + offset
            cache[at] = prefix_hash([token_id], cache[at - 1] if at else 0)
        states = cache[span.start : span.start + count]
        logits = [
            hashed_logits(state, info.vocab_size, self._spread)
            for state in states[count - span.logits_count :]
        ]
        stacked = torch.stack(logits) if logits else torch.empty(0, info.vocab_size)
        if self.nan:
            stacked = stacked * float("nan")
        return SpanOutput(
            logits=stacked, rows=self._rows(span, states) if span.wants_rows else None
        )

    def _rows(self, span: Span, states: Sequence[int]) -> torch.Tensor:
        rows = torch.zeros(len(states), self._info.row_width)
        for index, (token_id, state) in enumerate(zip(span.token_ids, states, strict=True)):
            signs = (span.start + index, token_id, state % 2**11, (state >> 11) % 2**11)
            for column, value in enumerate(signs[: self._info.row_width]):
                rows[index, column] = value
        return rows.to(self._info.row_dtype)
