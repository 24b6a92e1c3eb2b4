"""What the EAGLE-3 drafter runs, seen by a draft that writes its passes down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.drafter import (
    DrafterInfo,
    DraftSampling,
    DraftWork,
    SessionParameters,
)
from drafter_service.eagle3 import Eagle3Drafter
from drafter_service.engine import DraftItem, Engine, OpenItem
from drafter_service.sessions import StreamSessions
from graph_runtime.eagle3.draft import DraftLengths, DraftSpan
from splitspec.rows import RowFormat
from splitspec.v1 import rows_pb2

VOCAB = 1000
FUSED_BY_US = 7.0
"""What the fake's fusion adds beside a raw row, so that it can be told."""


def row(slot: int, position: int) -> list[float]:
    """Return the raw row [2] of a position."""
    return [float(slot), float(position)]


def rows(slot: int, start: int, count: int) -> bytes:
    """Return raw rows as they cross the wire."""
    values = [row(slot, start + i) for i in range(count)]
    return cast("bytes", torch.tensor(values).numpy().tobytes())


@dataclass
class RecordingDraft:
    """A draft whose recurrent feature says after which slot it came: drafts can be foretold."""

    slot_count: int = 4
    max_context_length: int = 64
    passes: list[list[DraftSpan]] = field(default_factory=list)
    cache: dict[tuple[int, int], tuple[int, list[float]]] = field(default_factory=dict)
    """(slot, draft slot) -> what was written there last: token and feature."""
    broken_slots: set[int] = field(default_factory=set)
    """Their logits are no numbers."""
    fault: Exception | None = None
    target_ids: torch.Tensor | None = None
    config: Any = None
    model_hash: str = ""

    def __post_init__(self) -> None:
        self._lengths = DraftLengths(self.slot_count, self.max_context_length)

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        assert rows.dtype == torch.float32
        assert rows.shape[1] == 2, "a fused row is no raw row"
        return torch.cat([rows, torch.full((len(rows), 1), FUSED_BY_US)], dim=1)

    def run(self, spans: Sequence[DraftSpan]) -> torch.Tensor:
        if self.fault is not None:
            raise self.fault
        self._lengths.check(spans)
        self._lengths.write(spans)
        self.passes.append(list(spans))
        for span in spans:
            for i, (token, feature) in enumerate(
                zip(span.token_ids, span.features.tolist(), strict=True)
            ):
                self.cache[span.slot, span.start + i] = (token, feature)
        last = [(s.slot, s.start + len(s.token_ids) - 1, s.token_ids[-1]) for s in spans]
        return torch.tensor(last, dtype=torch.float32)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(features), VOCAB)
        for i, (slot, position, token) in enumerate(features.int().tolist()):
            logits[i, drafted(slot, position, token)] = 1.0
            if slot in self.broken_slots:
                logits[i, 5] = math.nan
        return logits

    def reset(self, slot: int) -> None:
        self._lengths.reset(slot)
        self.cache = {key: value for key, value in self.cache.items() if key[0] != slot}

    def shapes(self) -> list[list[tuple[int, int, list[int]]]]:
        """Return (slot, start, tokens) of each span of each pass."""
        return [[(s.slot, s.start, list(s.token_ids)) for s in spans] for spans in self.passes]


def drafted(slot: int, position: int, token: int) -> int:
    """Return what the fake drafts after a draft slot that holds `token`."""
    return (31 * position + 7 * token + 101 * slot + 3) % VOCAB


def drafter(draft: RecordingDraft, *, width: int = 2, fused: bool = False) -> Eagle3Drafter:
    """Return a drafter over the fake that wants raw rows of width 2, or fused ones."""
    info = DrafterInfo(
        method="eagle3",
        model_id="fake",
        row_format=RowFormat(
            kind=rows_pb2.ROW_KIND_FUSED if fused else rows_pb2.ROW_KIND_RAW_TAPS,
            dtype=rows_pb2.ROW_DTYPE_FLOAT32,
            width=width,
        ),
        max_draft_count=7,
        max_context_length=draft.max_context_length,
        slot_count=draft.slot_count,
        instant=False,
    )
    return Eagle3Drafter(draft, info, DraftSampling.ARGMAX)


def opened(draft: RecordingDraft, *slots: int, **fields: Any) -> Eagle3Drafter:
    """Return a drafter with open slots."""
    made = drafter(draft, **fields)
    for slot in slots:
        made.open(slot, SessionParameters())
    return made


def work(
    slot: int, start: int, ids: Sequence[int], pending: int | None = None, count: int = 0
) -> DraftWork:
    """Return a work whose rows are those of its positions."""
    return DraftWork(
        slot=slot,
        parameters=SessionParameters(),
        start=start,
        token_ids=ids,
        rows=rows(slot, start, len(ids)) if ids else None,
        pending_token_id=pending,
        draft_count=count,
    )


def chain(slot: int, length: int, pending: int, count: int) -> list[int]:
    """Foretell a draft: d1 comes after draft slot length - 1, which holds the pending token."""
    ids = [pending]
    for j in range(count):
        ids.append(drafted(slot, length - 1 + j, ids[-1]))
    return ids[1:]


def assert_seeded(draft: RecordingDraft, slot: int, tokens: Sequence[int]) -> None:
    """Check every committed draft slot: feature p beside token p + 1 (E15), of true rows (E16).

    Args:
        draft: the fake.
        slot: the session's.
        tokens: committed ones and the pending one.
    """
    for p in range(len(tokens) - 1):
        assert draft.cache[slot, p] == (tokens[p + 1], [*row(slot, p), FUSED_BY_US]), p


@pytest.mark.parametrize("count", range(1, 8))
def test_e14_e15_a_prompt_in_one_piece_and_every_round_cost_k_passes(count: int) -> None:
    draft = RecordingDraft()
    made = opened(draft, 0)
    assert made.step([work(0, 0, [10, 11, 12])]) == [[]]
    assert made.pass_count == 0, "the newest row waits for its token, and with it the prompt"
    ids = made.step([work(0, 3, [], pending=13, count=count)])
    assert ids == [chain(0, 3, 13, count)]
    assert draft.shapes() == [
        [(0, 0, [11, 12, 13])],
        *([(0, 3 + j, [ids[0][j]])] for j in range(count - 1)),
    ]
    assert_seeded(draft, 0, [10, 11, 12, 13])
    made.step([work(0, 3, [13], pending=14, count=count)])
    assert made.pass_count == len(draft.passes) == 2 * count


def test_e16_a_round_seeds_the_positions_that_committed_with_their_own_rows() -> None:
    for accepted in range(4):
        draft = RecordingDraft()
        made = opened(draft, 0)
        (ids,) = made.step([work(0, 0, [10, 11], pending=12, count=3)])
        draft.passes.clear()
        committed = [12, *ids[:accepted]]  # positions P .. P + a
        made.step([work(0, 2, committed, pending=500, count=3)])
        (span,) = draft.passes[0]
        assert (span.start, list(span.token_ids)) == (2, [*ids[:accepted], 500])
        assert span.features.tolist() == [
            [*row(0, 2 + i), FUSED_BY_US] for i in range(accepted + 1)
        ]
        assert_seeded(draft, 0, [10, 11, *committed, 500])


def test_e15_rows_are_held_over_the_chunks_of_a_prompt_until_their_next_token_is_known() -> None:
    draft = RecordingDraft()
    made = opened(draft, 2)
    made.step([work(2, 0, [10, 11])])
    made.step([work(2, 2, [12])])
    made.step([work(2, 3, [13, 14, 15])])
    assert draft.shapes() == [[(2, 0, [11, 12])], [(2, 2, [13])]]
    made.step([work(2, 6, [16], pending=17, count=1)])
    assert draft.shapes()[2:] == [[(2, 3, [14, 15, 16, 17])]]
    assert_seeded(draft, 2, [*range(10, 18)])


@pytest.mark.parametrize("drafts_at_once", [True, False])
def test_a_slot_seeded_with_a_token_that_did_not_commit_is_run_again(drafts_at_once: bool) -> None:
    draft = RecordingDraft()
    made = opened(draft, 0)
    made.step([work(0, 0, [10, 11], pending=12, count=2)])
    draft.passes.clear()
    if drafts_at_once:
        made.step([work(0, 2, [90, 91], pending=92, count=1)])
        assert draft.shapes() == [[(0, 1, [90, 91, 92])]]
    else:
        made.step([work(0, 2, [90, 91])])
        assert draft.shapes() == [[(0, 1, [90])]]
        made.step([work(0, 4, [], pending=92, count=1)])
    assert_seeded(draft, 0, [10, 11, 90, 91, 92])


def test_a_second_draft_of_the_same_length_runs_the_newest_position_again() -> None:
    draft = RecordingDraft()
    made = opened(draft, 0)
    made.step([work(0, 0, [10, 11], pending=12, count=3)])
    draft.passes.clear()
    assert made.step([work(0, 2, [], pending=12, count=2)]) == [chain(0, 2, 12, 2)]
    assert made.step([work(0, 2, [], pending=44, count=2)]) == [chain(0, 2, 44, 2)]
    assert [passed[0] for passed in draft.shapes()[::2]] == [(0, 1, [12]), (0, 1, [44])]
    made.step([work(0, 2, [44], pending=45, count=1)])
    assert_seeded(draft, 0, [10, 11, 44, 45])


def test_nothing_is_run_where_nothing_is_known() -> None:
    draft = RecordingDraft()
    made = opened(draft, 0, 1)
    assert made.step([]) == []
    assert made.step([work(0, 0, []), work(1, 0, [], pending=4, count=3)]) == [[], []]
    assert made.step([work(0, 0, [10])]) == [[]]
    assert made.pass_count == 0


def test_e14_sessions_share_every_pass_and_each_has_its_own_k() -> None:
    draft = RecordingDraft()
    made = opened(draft, 0, 1, 2, 3)
    made.step([work(3, 0, [40, 41])])
    ids = made.step(
        [
            work(0, 0, [10, 11], pending=12, count=2),
            work(1, 0, [20], pending=21, count=5),
            work(3, 2, [42]),  # extends only, in the same pass
            work(2, 0, [30, 31, 32], pending=33, count=1),
        ]
    )
    assert ids == [chain(0, 2, 12, 2), chain(1, 1, 21, 5), [], chain(2, 3, 33, 1)]
    assert [[span.slot for span in spans] for spans in draft.passes] == [
        [0, 1, 3, 2],
        [0, 1],
        *[[1]] * 3,
    ]
    assert made.pass_count == 5
    ids = made.step(
        [
            work(1, 1, [21, *ids[1][:5]], pending=22, count=1),
            work(0, 2, [12], pending=13, count=7),
        ]
    )
    assert ids == [chain(1, 7, 22, 1), chain(0, 3, 13, 7)]
    assert made.pass_count == 5 + 7


@pytest.mark.parametrize("length", range(1, 9))
def test_e13_no_draft_slot_beyond_the_context_is_written(length: int) -> None:
    draft = RecordingDraft(max_context_length=8)
    made = opened(draft, 0)
    tokens = list(range(100, 100 + length))
    (ids,) = made.step([work(0, 0, tokens, pending=99, count=7)])
    assert ids == chain(0, length, 99, min(7, 8 - length + 1))
    written = max(p for _, p in draft.cache)
    assert written == min(7, length - 1 + 6)
    if length < 8:  # what the fewer drafts left behind is overwritten as ever
        made.step([work(0, length, [99], pending=98, count=7)])
        assert_seeded(draft, 0, [*tokens, 99, 98])


@st.composite
def rounds(draw: st.DrawFn) -> list[tuple[int, int, bool]]:
    """Draw steps of one session: (positions committed, K, whether pending is what was said)."""
    step = st.tuples(st.integers(0, 5), st.integers(0, 7), st.booleans())
    return draw(st.lists(step, min_size=1, max_size=12))


@settings(max_examples=150, deadline=None)
@given(steps=rounds(), first=st.integers(1, 6))
def test_e15_e16_any_course_of_a_session_leaves_true_pairs_in_the_cache(
    steps: list[tuple[int, int, bool]], first: int
) -> None:
    draft = RecordingDraft(max_context_length=80)
    made = opened(draft, 0)
    tokens = list(range(200, 200 + first))
    made.step([work(0, 0, tokens)])
    pending = 77
    for number, (committed, count, keeps) in enumerate(steps):
        ids = [pending if keeps else 900 + number, *range(50, 50 + committed)][:committed]
        start = len(tokens)
        tokens += ids
        pending = 300 + number
        (drafts,) = made.step([work(0, start, ids, pending=pending, count=count)])
        assert drafts == (chain(0, len(tokens), pending, min(count, 81 - len(tokens))))
        if count:
            assert_seeded(draft, 0, [*tokens, pending])
            assert len(draft.passes) == made.pass_count


def test_a_fused_row_is_the_feature_itself_and_never_meets_fc() -> None:
    draft = RecordingDraft()
    made = opened(draft, 0, width=3, fused=True)
    features = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    made.step(
        [
            DraftWork(
                slot=0,
                parameters=SessionParameters(),
                start=0,
                token_ids=[10, 11],
                rows=features.numpy().tobytes(),
                pending_token_id=12,
                draft_count=1,
            )
        ]
    )
    (span,) = draft.passes[0]
    assert span.features.equal(features)


def test_a_session_whose_logits_are_no_numbers_drafts_nothing_and_disturbs_nobody() -> None:
    draft = RecordingDraft(broken_slots={1})
    made = opened(draft, 0, 1)
    for start, ids in ((0, [10, 11]), (2, [12])):
        got = made.step([work(s, start, ids, pending=12 + start, count=3) for s in (1, 0)])
        assert got == [[], chain(0, start + len(ids), 12 + start, 3)]
    assert [span.slot for spans in draft.passes[1:] for span in spans] == [0] * 5
    draft.broken_slots.clear()
    made.release(1)
    made.open(1, SessionParameters())
    assert made.step([work(1, 0, [10], pending=11, count=2)]) == [chain(1, 1, 11, 2)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_no_number_and_what_was_held_with_it_never_reach_the_draft(
    bad: float,
) -> None:
    draft = RecordingDraft()
    made = opened(draft, 0, 1)
    made.step([work(0, 0, [10, 11])])
    hostile = torch.tensor([row(0, 2), [bad, 0.0]]).numpy().tobytes()
    made.step([replace(work(0, 2, [12, 13]), rows=hostile), work(1, 0, [20])])
    assert made.step([work(0, 4, [14], pending=15, count=3), work(1, 1, [], 21, 1)]) == [
        [],
        chain(1, 1, 21, 1),
    ]
    assert {span.slot for spans in draft.passes for span in spans} == {1}


def test_e22_a_slot_that_is_released_is_reset() -> None:
    draft = RecordingDraft()
    made = opened(draft, 0, 1)
    made.step([work(s, 0, [10, 11], pending=12, count=3) for s in (0, 1)])
    made.release(0)
    assert {slot for slot, _ in draft.cache} == {1}
    made.open(0, SessionParameters())
    assert made.step([work(0, 0, [10], pending=11, count=2)]) == [chain(0, 1, 11, 2)]


def test_logits_that_are_no_numbers_later_in_a_chain_leave_no_draft() -> None:
    draft = RecordingDraft()
    made = opened(draft, 0)
    run = draft.run

    def run_and_break(spans: Sequence[DraftSpan]) -> torch.Tensor:
        draft.broken_slots |= {0} if draft.passes else set()
        return run(spans)

    draft.run = run_and_break  # type: ignore[method-assign]
    assert made.step([work(0, 0, [10], pending=11, count=4)]) == [[]]
    assert len(draft.passes) == 2


def test_a_fault_of_the_device_is_raised() -> None:
    draft = RecordingDraft(fault=RuntimeError("device lost"))
    made = opened(draft, 0)
    with pytest.raises(RuntimeError, match="device lost"):
        made.step([work(0, 0, [10], pending=11, count=1)])


def test_e14_the_engine_reports_the_passes_of_each_step() -> None:
    engine, stream = Engine(drafter(RecordingDraft())), StreamSessions()
    counts = []
    for items in (
        [OpenItem(session_id=1, parameters=SessionParameters())],
        [_item(0, [10, 11])],
        [_item(2, [12], pending=13, count=4)],
        [_item(9, [12], pending=13, count=4)],  # refused
        [_item(3, [13], pending=14, count=2)],
    ):
        counts.append(engine.run(stream, items).pass_count)
    assert counts == [0, 0, 4, 0, 2]


def _item(start: int, ids: list[int], pending: int | None = None, count: int = 0) -> DraftItem:
    return DraftItem(
        session_id=1,
        context_length=start,
        token_ids=ids,
        rows=rows(3, start, len(ids)),
        pending_token_id=pending,
        draft_count=count,
    )
