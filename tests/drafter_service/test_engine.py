"""Steps: items run in order, share passes, fail alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from drafter_service.drafter import DraftWork, SessionParameters
from drafter_service.engine import DraftItem, Engine, Item, OpenItem, ReleaseItem
from drafter_service.sessions import StreamSessions
from tests.drafters import OracleDrafter

TRUTH = [([1, 2], [3, 4, 5, 6, 7, 8])]


class CountingDrafter(OracleDrafter):
    """Remembers how many works each pass had."""

    def __init__(self, **fields: Any) -> None:
        super().__init__("right", TRUTH, **fields)
        self.passes: list[int] = []

    def step(self, works: Sequence[DraftWork]) -> list[list[int]]:
        self.passes.append(len(works))
        return super().step(works)


def opened(session: int) -> OpenItem:
    return OpenItem(session_id=session, parameters=SessionParameters())


def draft(session: int, length: int, ids: Sequence[int], pending: int, count: int) -> DraftItem:
    return DraftItem(
        session_id=session,
        context_length=length,
        token_ids=ids,
        rows=None,
        pending_token_id=pending,
        draft_count=count,
    )


def summary(engine: Engine, stream: StreamSessions, *items: Item) -> list[Any]:
    """Return (context length, drafts or reason) of each item."""
    return [
        (r.context_length, r.error.reason if r.error else r.draft_token_ids)
        for r in engine.run(stream, items).results
    ]


def test_draft_items_of_many_sessions_share_one_pass() -> None:
    drafter = CountingDrafter()
    engine, stream = Engine(drafter), StreamSessions()
    engine.run(stream, [opened(1), opened(2), opened(3)])
    got = summary(engine, stream, *(draft(i, 0, [1, 2], 3, 2) for i in (1, 2, 3)))
    assert got == [(2, [4, 5])] * 3
    assert drafter.passes == [3]


def test_open_draft_and_release_of_one_session_fit_one_step() -> None:
    drafter = CountingDrafter(slot_count=1)
    engine, stream = Engine(drafter), StreamSessions()
    got = summary(
        engine,
        stream,
        opened(1),
        draft(1, 0, [1, 2], 3, 1),
        ReleaseItem(session_id=1),
        opened(2),
        draft(2, 0, [1], 2, 2),
    )
    assert got == [(0, None), (2, [4]), (0, None), (0, None), (1, [])]
    assert drafter.passes == [1, 1]
    assert engine.used_slot_count == 1


def test_one_bad_item_fails_alone_and_its_session_is_as_before() -> None:
    engine, stream = Engine(CountingDrafter(slot_count=2)), StreamSessions()
    engine.run(stream, [opened(1), opened(2)])
    got = summary(
        engine,
        stream,
        draft(1, 0, [1, 2], 3, 3),
        draft(2, 9, [1, 2], 3, 3),
        draft(3, 0, [1, 2], 3, 3),
        opened(4),
        opened(1),
        draft(1, 2, [3], 4, 1),
    )
    assert got == [
        (2, [4, 5, 6]),
        (0, "COMMITTED_LENGTH_MISMATCH"),
        (0, "SESSION_NOT_FOUND"),
        (0, "NO_FREE_SLOT"),
        (2, "INVALID_ARGUMENT"),
        (2, "INVALID_ARGUMENT"),  # a second draft item of one session in one step
    ]
    got = summary(engine, stream, draft(1, 2, [3], 4, 2), draft(2, 0, [1, 2], 3, 1))
    assert got == [(3, [5, 6]), (2, [4])]


def test_extend_only_drafts_nothing_and_advances_the_context() -> None:
    engine, stream = Engine(CountingDrafter()), StreamSessions()
    engine.run(stream, [opened(1)])
    assert summary(engine, stream, draft(1, 0, [1], 0, 0)) == [(1, [])]
    assert summary(engine, stream, draft(1, 1, [2], 0, 0)) == [(2, [])]
    assert summary(engine, stream, draft(1, 2, [], 3, 3)) == [(2, [4, 5, 6])]
    assert summary(engine, stream, draft(1, 2, [3, 4], 5, 9)) == [(4, [6, 7, 8])]


def test_a_context_longer_than_the_drafter_holds_is_context_full() -> None:
    from tests.drafter_service.served import ngram

    engine, stream = Engine(ngram(max_context_length=4)), StreamSessions()
    engine.run(stream, [opened(1)])
    assert summary(engine, stream, draft(1, 0, [1, 2, 1, 2, 1], 2, 1)) == [(0, "CONTEXT_FULL")]
    assert summary(engine, stream, draft(1, 0, [1, 2, 1, 2], 1, 2)) == [(4, [2, 1])]
    assert summary(engine, stream, draft(1, 4, [1], 2, 1)) == [(4, "CONTEXT_FULL")]


def test_streams_have_sessions_of_their_own_and_share_the_slots() -> None:
    engine = Engine(CountingDrafter(slot_count=3))
    first, second = StreamSessions(), StreamSessions()
    assert summary(engine, first, opened(1), opened(2)) == [(0, None)] * 2
    assert summary(engine, second, opened(1), opened(2)) == [(0, None), (0, "NO_FREE_SLOT")]
    engine.release_all(first)  # L7
    assert engine.used_slot_count == 1
    assert summary(engine, second, opened(2), draft(1, 0, [1, 2], 3, 1)) == [(0, None), (2, [4])]


def test_a_drafter_that_drafts_too_many_is_our_own_bug() -> None:
    class Eager(CountingDrafter):
        def step(self, works: Sequence[DraftWork]) -> list[list[int]]:
            return [[1] * (work.draft_count + 1) for work in works]

    engine, stream = Engine(Eager()), StreamSessions()
    engine.run(stream, [opened(1)])
    with pytest.raises(AssertionError):
        engine.run(stream, [draft(1, 0, [1], 2, 1)])
