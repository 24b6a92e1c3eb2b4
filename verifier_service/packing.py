"""The packed pass of a step: run the spans that wait, choose tokens, commit by length. No gRPC."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

import torch

from graph_runtime.choice import choose
from graph_runtime.target import Span, SpanOutput, Target
from splitspec.errors import NonFiniteLogits
from verifier_service.sessions import Session
from verifier_service.steps import (
    Committed,
    ItemResult,
    ModelItem,
    PrefillOutcome,
    VerifyItem,
    VerifyOutcome,
)
from verifier_service.verification import accept

assert sys.byteorder == "little", "rows cross the wire as this machine's own bytes"


@dataclass(slots=True)
class Work:
    """A model item that waits for the step's pass."""

    item: ModelItem
    session: Session
    result: ItemResult
    span: Span


@dataclass(slots=True)
class Pack:
    """The model items of a step that wait to share a pass, and what the step has cost."""

    works: list[Work] = field(default_factory=list)
    modelled: set[int] = field(default_factory=set)
    """Sessions that have had their model item in this step, run or not."""
    failed: list[ItemResult] = field(default_factory=list)
    device_ns: int = 0
    copy_ns: int = 0
    pass_count: int = 0
    row_bytes: int = 0

    def run(self, target: Target) -> None:
        """Run the works that wait in one pass of the target (law L5), and commit their results."""
        works, self.works = self.works, []
        begun = perf_counter_ns()
        outputs = target.step([work.span for work in works])
        pairs = zip(works, outputs, strict=True)
        chosen = [(work, output, self._choose(work, output)) for work, output in pairs]
        done = perf_counter_ns()
        self.device_ns += done - begun
        self.pass_count += 1
        for work, output, token_ids in chosen:
            if token_ids is not None:
                self.row_bytes += _commit(work, output, token_ids)
        self.copy_ns += perf_counter_ns() - done

    def _choose(self, work: Work, output: SpanOutput) -> list[int] | None:
        """Return the chosen tokens; None where the item has failed alone and commits nothing."""
        try:
            return _choose(work, output)
        except NonFiniteLogits as error:
            work.result.error = error
            self.failed.append(work.result)
            return None


def _choose(work: Work, output: SpanOutput) -> list[int]:
    """Return the target's token after each row whose logits were wanted.

    Raises:
        NonFiniteLogits: a row has no largest finite logit.
    """
    span = work.span
    assert output.logits.shape[0] == span.logits_count, "the target gave the logits asked for"
    if span.logits_count == 0:
        return []
    # A row computed at position q decides the token at q + 1, and noise goes by the latter.
    end = span.start + len(span.token_ids) + 1
    positions = range(end - span.logits_count, end)
    drafts = work.item.draft_token_ids if isinstance(work.item, VerifyItem) else ()
    return choose(output.logits, work.session.sampling, positions, drafts)


def _commit(work: Work, output: SpanOutput, chosen: Sequence[int]) -> int:
    """Advance the session by the rows that stand, fill in the result; return the rows' bytes."""
    item, session, result = work.item, work.session, work.result
    start = work.span.start
    assert session.committed_length == start, "law L1: the window starts at the committed length"
    if isinstance(item, VerifyItem):
        accepted_count = accept(item.draft_token_ids, chosen)
        count = accepted_count + 1
        assert 1 <= count <= len(item.draft_token_ids) + 1, "law L3"
    else:
        count = len(item.token_ids)
    # Law L6: only committed rows become host bytes.
    rows = None if output.rows is None else Committed(start=start, data=_bytes(output.rows[:count]))
    session.committed_length = start + count
    result.committed_length = session.committed_length
    if isinstance(item, VerifyItem):
        result.outcome = VerifyOutcome(
            accepted_count=accepted_count, bonus_token_id=chosen[accepted_count], rows=rows
        )
    else:
        result.outcome = PrefillOutcome(bonus_token_id=chosen[0] if item.final else None, rows=rows)
    return len(rows.data) if rows is not None else 0


def _bytes(rows: torch.Tensor) -> bytes:
    """Return rows [n, W] as row-major bytes, copied off their device."""
    data: bytes = rows.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return data
