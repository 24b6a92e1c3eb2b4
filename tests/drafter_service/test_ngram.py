"""Prompt lookup against a slow reference that scans the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.drafter import DraftWork, SessionParameters
from drafter_service.ngram import SuffixIndex
from tests.drafter_service.served import ngram


def reference(text: list[int], count: int, ngram_min: int, ngram_max: int) -> list[int]:
    """Draft by definition: scan for the longest suffix, latest first; then copy, token by token."""
    for n in range(ngram_max, ngram_min - 1, -1):
        if n >= len(text):
            continue
        suffix = text[len(text) - n :]
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == suffix:
                grown = list(text)
                for offset in range(count):
                    grown.append(grown[start + n + offset])
                return grown[len(text) :]
    return []


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    chunks=st.lists(st.integers(1, 9), max_size=20),
    count=st.integers(1, 12),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
)
def test_the_index_drafts_what_a_scan_of_the_text_drafts(
    text: list[int], chunks: list[int], count: int, lengths: list[int]
) -> None:
    ngram_min, ngram_max = lengths
    index = SuffixIndex(ngram_min, ngram_max)
    committed, pending = text[:-1], text[-1]
    while committed:  # in chunks of any size, as commits come
        size = chunks.pop() if chunks else len(committed)
        index.extend(committed[:size])
        committed = committed[size:]
    assert index.draft(pending, count) == reference(text, count, ngram_min, ngram_max)


@given(text=st.lists(st.integers(0, 2), min_size=2, max_size=30), count=st.integers(1, 8))
def test_a_draft_does_not_change_later_drafts(text: list[int], count: int) -> None:
    index = SuffixIndex(1, 4)
    for end in range(1, len(text)):
        assert index.draft(text[end - 1], count) == reference(text[:end], count, 1, 4)
        assert index.draft(text[end - 1], count) == reference(text[:end], count, 1, 4)
        index.extend(text[end - 1 : end])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 1, 2], [3, 1, 2, 3, 1]),  # a loop of three goes round
        ([7, 7], [7, 7, 7, 7, 7]),  # a loop of one
        ([1, 2, 9, 1, 3, 9, 1], [3, 9, 1, 3, 9]),  # the longest suffix, 9 1, beats 1 alone
        ([5, 1, 5, 2, 5], [2, 5, 2, 5, 2]),  # the most recent 5 decides
        ([1, 2, 3, 4], []),  # nothing came before
        ([4], []),  # only pending
    ],
)
def test_known_texts_are_drafted_as_worked_out_by_hand(
    text: list[int], expected: list[int]
) -> None:
    index = SuffixIndex(1, 4)
    index.extend(text[:-1])
    assert index.draft(text[-1], 5) == expected


def test_ngram_min_keeps_short_matches_out() -> None:
    index = SuffixIndex(3, 4)
    index.extend([1, 2, 3, 9, 2])
    assert index.draft(3, 4) == []
    index.extend([3, 1, 2])
    assert index.draft(3, 4) == [9, 2, 3, 1]


def test_the_index_grows_by_at_most_one_entry_a_token_and_length() -> None:
    index = SuffixIndex(1, 4)
    index.extend(range(1000))
    assert len(index._last_end) == 1000 + 999 + 998 + 997
    index.extend([0] * 1000)
    assert len(index._last_end) <= 4 * 2000


def test_sessions_do_not_see_each_other() -> None:
    drafter = ngram()
    drafter.open(0, SessionParameters())
    drafter.open(1, SessionParameters(temperature=1.0, seed=2**63))

    def work(slot: int, start: int, ids: list[int], pending: int) -> DraftWork:
        return DraftWork(
            slot=slot,
            parameters=SessionParameters(),
            start=start,
            token_ids=ids,
            rows=None,
            pending_token_id=pending,
            draft_count=2,
        )

    assert drafter.step([work(0, 0, [1, 2, 3], 1), work(1, 0, [1, 8, 9], 1)]) == [[2, 3], [8, 9]]
    drafter.release(0)
    drafter.open(0, SessionParameters())
    assert drafter.step([work(0, 0, [5], 1), work(1, 3, [1, 8, 9], 1)]) == [[], [8, 9]]


def test_drafts_that_fall_make_the_next_one_short_and_drafts_that_stand_make_it_long() -> None:
    drafter = ngram()
    drafter.open(0, SessionParameters())
    text: list[int] = [1, 2, 3, 4, 5, 6, 7, 8, 9]

    def draft_after(committed: list[int]) -> int:
        """Commit tokens, draft after a pending 1, and return how many tokens were drafted."""
        text.extend(committed)
        work = DraftWork(
            slot=0,
            parameters=SessionParameters(),
            start=len(text) - len(committed),
            token_ids=committed,
            rows=None,
            pending_token_id=1,
            draft_count=7,
        )
        return len(drafter.step([work])[0])

    first, text = text, []
    assert draft_after(first) == 7
    assert draft_after([1]) == 1  # nothing stood
    assert draft_after([1, 2]) == 3  # all of it stood
    assert draft_after([1, 2, 3]) == 3  # two of three stood: one more than that
    assert draft_after([1, 2, 3, 4]) == 7


def test_l2_a_drafter_with_another_context_length_refuses_to_draft() -> None:
    drafter = ngram()
    drafter.open(0, SessionParameters())
    work = DraftWork(
        slot=0,
        parameters=SessionParameters(),
        start=3,
        token_ids=[1],
        rows=None,
        pending_token_id=2,
        draft_count=1,
    )
    with pytest.raises(AssertionError, match="law L2"):
        drafter.step([work])
