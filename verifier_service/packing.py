"""The packed pass of a step: run the spans that wait, choose tokens, commit by length. No gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

from graph_runtime.choice import choose
from graph_runtime.target import Span, SpanOutput, Target
from splitspec.errors import NonFiniteLogits
from verifier_service.committed_rows import CommittedRows, Wanted
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

    def run(self, target: Target, committed_rows: CommittedRows) -> None:
        """Run the works that wait in one pass of the target (law L5), and commit their results.

        Only committed rows become host bytes (law L6). `copy_ns` is the commit and those bytes,
        and so the fusing of rows too: on a GPU it is queued, and awaited by the copy.
        """
        works, self.works = self.works, []
        begun = perf_counter_ns()
        outputs = target.step([work.span for work in works])
        pairs = zip(works, outputs, strict=True)
        chosen = [(work, output, self._choose(work, output)) for work, output in pairs]
        done = perf_counter_ns()
        self.device_ns += done - begun
        self.pass_count += 1
        wanted: list[tuple[Work, Wanted]] = []
        for work, output, token_ids in chosen:
            count = 0 if token_ids is None else _commit(work, token_ids)
            if count and output.rows is not None:
                rows = Wanted(row_format=work.session.row_format, rows=output.rows[:count])
                wanted.append((work, rows))
        parts = committed_rows.to_bytes([rows for _, rows in wanted])
        for (work, rows), data in zip(wanted, parts, strict=True):
            outcome = work.result.outcome
            assert outcome is not None, "it has committed"
            outcome.rows = Committed(row_format=rows.row_format, start=work.span.start, data=data)
            self.row_bytes += len(data)
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


def _commit(work: Work, chosen: Sequence[int]) -> int:
    """Advance the session by the rows that stand and fill in the result, all but its rows.

    Returns:
        How many rows committed.
    """
    item, session, result = work.item, work.session, work.result
    assert session.committed_length == work.span.start, (
        "law L1: the window starts at the committed length"
    )
    if isinstance(item, VerifyItem):
        accepted_count = accept(item.draft_token_ids, chosen)
        count = accepted_count + 1
        assert 1 <= count <= len(item.draft_token_ids) + 1, "law L3"
        result.outcome = VerifyOutcome(
            accepted_count=accepted_count, bonus_token_id=chosen[accepted_count], rows=None
        )
    else:
        count = len(item.token_ids)
        result.outcome = PrefillOutcome(bonus_token_id=chosen[0] if item.final else None, rows=None)
    session.committed_length += count
    result.committed_length = session.committed_length
    return count
