"""The DFlash drafter behind the engine: sessions, lengths, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drafter_service.drafter import DraftSampling, SessionParameters
from drafter_service.engine import DraftItem, Engine, Item, OpenItem, ReleaseItem
from drafter_service.sessions import StreamSessions
from graph_runtime.choice import Sampling, choose
from tests.drafter_service.block_drafts import (
    VOCAB,
    RecordingDraft,
    drafter,
    foretold,
    rows,
)


def _opened(session: int, **fields: Any) -> OpenItem:
    return OpenItem(session_id=session, parameters=SessionParameters(**fields))


def _item(
    session: int, start: int, ids: Sequence[int], pending: int | None = None, count: int = 0
) -> DraftItem:
    return DraftItem(
        session_id=session,
        context_length=start,
        token_ids=ids,
        rows=rows(3, start, len(ids)) if ids else None,
        pending_token_id=pending,
        draft_count=count,
    )


def test_d11_prefix_rows_missing_on_a_reused_session_are_refused_and_nothing_else_is_lost() -> None:
    draft = RecordingDraft()
    engine, stream = Engine(drafter(draft)), StreamSessions()

    def run(*items: Item) -> list[Any]:
        return [
            (r.context_length, r.error.reason if r.error else r.draft_token_ids)
            for r in engine.run(stream, items).results
        ]

    run(_opened(1), _opened(2))
    run(_item(1, 0, [10, 11, 12], 13, 3), _item(2, 0, [20], 21, 3))
    # The session ends and begins again: its peer believes that the three rows are still there.
    run(ReleaseItem(session_id=1), _opened(1))
    assert run(_item(1, 3, [13], 14, 2), _item(2, 1, [21], 22, 2)) == [
        (0, "COMMITTED_LENGTH_MISMATCH"),
        (2, foretold(3, 2, 22, 2)),
    ]
    assert run(_item(1, 0, [10, 11, 12, 13], 14, 2)) == [(4, foretold(3, 4, 14, 2))]
    # And so it is where the context is longer than the peer believes.
    assert run(_item(1, 2, [12], 13, 2)) == [(4, "COMMITTED_LENGTH_MISMATCH")]
    assert run(_item(1, 4, [14], 15, 2)) == [(5, foretold(3, 5, 15, 2))]


def test_d12_how_a_session_samples_stays_as_it_was_opened() -> None:
    own = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(8))
    draft = RecordingDraft(logits=lambda _context, _pending, count: own[:count])
    engine, stream = Engine(drafter(draft)), StreamSessions()
    engine.run(stream, [_opened(1, temperature=1.0, seed=3, draft_sampling=DraftSampling.COUPLED)])
    engine.run(stream, [_item(1, 0, [10, 11])])
    again, drafted = engine.run(
        stream, [_opened(1, temperature=1.0, seed=4), _item(1, 2, [12], 13, 7)]
    ).results
    assert again.error is not None
    assert (again.error.reason, again.context_length) == ("INVALID_ARGUMENT", 2)
    truth = choose(own, Sampling(temperature=1.0, seed=3), range(4, 11))
    assert drafted.draft_token_ids == truth


def test_d2_the_engine_reports_the_passes_of_each_step() -> None:
    engine, stream = Engine(drafter(RecordingDraft())), StreamSessions()
    counts = []
    for items in (
        [_opened(1), _opened(2)],
        [_item(1, 0, [10, 11])],
        [_item(1, 2, [12], 13, 4), _item(2, 0, [10, 11], 12, 7)],
        [_item(1, 9, [12], 13, 4)],  # refused
        [_item(1, 3, [13], 14, 2), ReleaseItem(session_id=2)],
    ):
        counts.append(engine.run(stream, items).pass_count)
    assert counts == [0, 0, 1, 0, 1]


def test_k3_a_context_beyond_the_cache_is_refused_before_anything_runs() -> None:
    draft = RecordingDraft(max_context_length=4)
    engine, stream = Engine(drafter(draft)), StreamSessions()
    engine.run(stream, [_opened(1), _opened(2)])
    engine.run(stream, [_item(1, 0, [10, 11])])
    full, mate = engine.run(
        stream, [_item(1, 2, [12, 13, 14], 15, 3), _item(2, 0, [10], 11, 3)]
    ).results
    assert full.error is not None
    assert (full.error.reason, full.context_length) == ("CONTEXT_FULL", 2)
    assert mate.draft_token_ids == foretold(3, 1, 11, 3)
    assert draft.shapes()[1:] == [[(1, 0, 1, 3)]]
    # d9: exactly full, and the block beyond it is the draft's own room.
    (exact,) = engine.run(stream, [_item(1, 2, [12, 13], 15, 7)]).results
    assert (exact.context_length, exact.draft_token_ids) == (4, foretold(3, 4, 15, 7))
