"""What the DFlash drafter runs, seen by a draft that writes its steps down."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.drafter import SessionParameters
from tests.drafter_service.block_drafts import (
    CONFIG,
    RecordingDraft,
    feature,
    foretold,
    opened,
    row,
    work,
)


def assert_context(draft: RecordingDraft, slot: int, length: int, *, text: int) -> None:
    """Check that a context is the committed rows of a text, each once and in order."""
    assert draft.length(slot) == length
    assert draft.contexts.get(slot, []) == [feature(text, p) for p in range(length)]


@pytest.mark.parametrize("count", range(1, 8))
def test_d2_a_round_is_one_pass_whatever_k_and_a_prompt_costs_none_of_its_own(count: int) -> None:
    draft = RecordingDraft()
    made = opened(draft, 0)
    assert made.step([work(0, 0, [10, 11])]) == [[]]
    assert made.step([work(0, 2, [12])]) == [[]]
    assert made.pass_count == 0, "projecting rows is no pass"
    assert made.step([work(0, 3, [], pending=13, count=count)]) == [foretold(0, 3, 13, count)]
    assert made.pass_count == 1
    for rounds in range(1, 4):
        start = 2 + rounds
        (ids,) = made.step([work(0, start, [13], pending=13, count=count)])
        assert ids == foretold(0, start + 1, 13, count)
        assert made.pass_count == 1 + rounds
    assert draft.shapes() == [
        [(0, 0, 2, 0)],
        [(0, 2, 1, 0)],
        [(0, 3, 0, count)],
        *([(0, 2 + r, 1, count)] for r in range(1, 4)),
    ]


def test_d2_sessions_of_different_lengths_and_k_share_the_pass_of_a_step() -> None:
    draft = RecordingDraft()
    made = opened(draft, 0, 1, 2, 3)
    made.step([work(3, 0, [40, 41])])
    ids = made.step(
        [
            work(0, 0, [10, 11], pending=12, count=2),
            work(1, 0, [20], pending=21, count=7),
            work(3, 2, [42]),  # extends only, in the same step
            work(2, 0, [30, 31, 32], pending=33, count=1),
        ]
    )
    assert ids == [foretold(0, 2, 12, 2), foretold(1, 1, 21, 7), [], foretold(2, 3, 33, 1)]
    assert draft.shapes()[1:] == [[(0, 0, 2, 2), (1, 0, 1, 7), (3, 2, 1, 0), (2, 0, 3, 1)]]
    assert made.pass_count == 1
    made.step([work(1, 1, [21, *ids[1]], pending=22, count=5), work(0, 2, [12], 13, 3)])
    assert made.pass_count == 2
    for slot, length in ((0, 3), (1, 9), (2, 3), (3, 3)):
        assert_context(draft, slot, length, text=slot)


def test_d2_d20_a_draft_is_exactly_k_tokens_and_each_step_that_drafts_is_counted_once() -> None:
    draft = RecordingDraft()
    made = opened(draft, 0, 1)
    for count in range(8):
        got = made.step([work(s, count, [9], pending=5, count=count) for s in (0, 1)])
        assert [len(ids) for ids in got] == [count, count]
        assert made.pass_count == count, "one for each step before that drafted, this one with it"


def test_nothing_is_run_where_nothing_is_known() -> None:
    draft = RecordingDraft()
    made = opened(draft, 0, 1)
    assert made.step([]) == []
    assert made.step([work(0, 0, []), work(1, 0, [], pending=4)]) == [[], []]
    assert (draft.steps, made.pass_count) == ([], 0)


@pytest.mark.parametrize("accepted", range(8))
def test_d3_d4_d6_a_round_gives_the_context_the_rows_of_pending_and_accepted_tokens_only(
    accepted: int,
) -> None:
    draft = RecordingDraft()
    made = opened(draft, 2)
    (ids,) = made.step([work(2, 0, [10, 11, 12], pending=13, count=7)])
    assert_context(draft, 2, 3, text=2)  # d6: pending at 3 is not in it, and has no row
    committed = [13, *ids[:accepted]]
    made.step([work(2, 3, committed, pending=500, count=7)])
    (last,) = draft.steps[-1]
    assert (last.start, last.length) == (3, 3 + 1 + accepted), "rows c == acceptance length"
    assert (last.pending_token_id, last.draft_count) == (500, 7)
    assert_context(draft, 2, 4 + accepted, text=2)


@st.composite
def courses(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Draw steps of one session: (positions committed, K)."""
    step = st.tuples(st.integers(0, 8), st.integers(0, 7))
    return draw(st.lists(step, min_size=1, max_size=12))


@settings(max_examples=150, deadline=None)
@given(steps=courses(), first=st.integers(1, 6))
def test_d3_d4_d6_after_any_course_a_context_is_the_committed_rows_each_once(
    steps: list[tuple[int, int]], first: int
) -> None:
    draft = RecordingDraft(max_context_length=128)
    made = opened(draft, 1)
    made.step([work(1, 0, range(200, 200 + first))])
    length, passes = first, 0
    for number, (committed, count) in enumerate(steps):
        pending = 300 + number
        ids = range(50, 50 + committed)
        (drafts,) = made.step([work(1, length, ids, pending=pending, count=count)])
        length += committed
        passes += count > 0
        assert drafts == foretold(1, length, pending, count)
        assert_context(draft, 1, length, text=1)
        assert made.pass_count == passes


def test_d7_a_block_stands_at_the_committed_length_of_its_own_session() -> None:
    draft = RecordingDraft()
    made = opened(draft, 0, 1)
    made.step([work(0, 0, [10] * 9, pending=11, count=3), work(1, 0, [20], pending=21, count=3)])
    first, second = draft.steps[0]
    assert (first.length, second.length) == (9, 1)


def test_where_every_slot_drafts_the_first_one_does_too_and_k_is_the_whole_block() -> None:
    draft = RecordingDraft(config=replace(CONFIG, sample_from_anchor=True))
    made = opened(draft, 0)
    assert made.info.max_draft_count == 8
    assert made.step([work(0, 0, [10], pending=11, count=8)]) == [foretold(0, 1, 11, 8)]


def test_l2_a_work_that_does_not_start_where_the_context_ends_is_our_own_bug() -> None:
    made = opened(RecordingDraft(), 0)
    made.step([work(0, 0, [10, 11])])
    for start in (1, 3):
        with pytest.raises(AssertionError, match="law L2"):
            made.step([work(0, start, [12], pending=13, count=1)])


def test_a_token_of_the_text_that_is_the_mask_id_is_as_any_other() -> None:
    mask = CONFIG.mask_token_id
    draft = RecordingDraft()
    made = opened(draft, 0)
    assert made.step([work(0, 0, [mask, mask], pending=mask, count=3)]) == [foretold(0, 2, mask, 3)]
    assert made.step([work(0, 2, [mask], pending=9, count=3)]) == [foretold(0, 3, 9, 3)]
    assert_context(draft, 0, 3, text=0)


def test_a_fused_row_is_the_feature_itself_and_never_meets_fc() -> None:
    draft = RecordingDraft()
    made = opened(draft, 0, fused=True)
    features = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0]])
    made.step([replace(work(0, 0, [10, 11], 12, 1), rows=features.numpy().tobytes())])
    assert draft.contexts[0] == features.tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_d13_a_row_that_is_no_number_spoils_its_session_alone_until_it_is_released(
    bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    draft = RecordingDraft()
    made = opened(draft, 0, 1)
    hostile = torch.tensor([row(0, 0), [bad, 0.0, 0.0, 0.0]]).numpy().tobytes()
    got = made.step(
        [replace(work(0, 0, [12, 13], 14, 3), rows=hostile), work(1, 0, [20], pending=21, count=2)]
    )
    assert got == [[], foretold(1, 1, 21, 2)]
    got = made.step([work(0, 2, [14], pending=15, count=3), work(1, 1, [21], 22, 2)])
    assert got == [[], foretold(1, 2, 22, 2)]
    assert made.step([work(0, 3, [], pending=15, count=3)]) == [[]]
    assert {w.slot for works in draft.steps for w in works} == {1}
    assert made.pass_count == 2, "no block ran for it"
    (warned,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "slot 0" in warned
    assert "features" in warned
    made.release(0)
    made.open(0, SessionParameters())
    assert made.step([work(0, 0, [10], pending=11, count=2)]) == [foretold(0, 1, 11, 2)]


def test_d13_logits_that_are_no_numbers_spoil_their_session_alone_until_it_is_released(
    caplog: pytest.LogCaptureFixture,
) -> None:
    draft = RecordingDraft(broken_slots={1})
    made = opened(draft, 0, 1)
    for start, ids in ((0, [10, 11]), (2, [12])):
        got = made.step([work(s, start, ids, pending=12 + start, count=3) for s in (1, 0)])
        assert got == [[], foretold(0, start + len(ids), 12 + start, 3)]
    assert draft.shapes()[1] == [(0, 2, 1, 3)], "a spoilt session is run no more"
    (warned,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "slot 1" in warned
    assert "logits" in warned
    draft.broken_slots.clear()
    assert made.step([work(1, 3, [13], pending=14, count=3)]) == [[]]
    made.release(1)
    made.open(1, SessionParameters())
    assert made.step([work(1, 0, [10], pending=11, count=2)]) == [foretold(1, 1, 11, 2)]


def test_d13_a_fault_of_the_device_is_raised() -> None:
    made = opened(RecordingDraft(fault=RuntimeError("device lost")), 0)
    with pytest.raises(RuntimeError, match="device lost"):
        made.step([work(0, 0, [10], pending=11, count=1)])


def test_d11_a_slot_that_was_released_early_serves_a_longer_prompt_as_a_fresh_one() -> None:
    draft = RecordingDraft()
    made = opened(draft, 0, 1)
    made.step([work(s, 0, [10, 11], pending=12, count=7) for s in (0, 1)])
    made.release(0)  # d1..d7 are out; none of them came back
    assert_context(draft, 0, 0, text=0)
    assert_context(draft, 1, 2, text=1)
    made.open(0, SessionParameters())
    longer = [10, 11, 12, 13, 14, 15]
    assert made.step([work(0, 0, longer, pending=16, count=7, text=6)]) == [foretold(6, 6, 16, 7)]
    assert_context(draft, 0, 6, text=6)
