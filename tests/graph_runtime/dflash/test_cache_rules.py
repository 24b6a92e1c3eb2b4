"""What a context holds: committed rows and nothing else, through every rejection and every refusal.

There are no rings here: contexts are flat, so nothing is evicted and nothing is rolled back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from graph_runtime.dflash.draft import BlockWork
from graph_runtime.dflash.torch_draft import TorchBlockDraft
from tests.graph_runtime.dflash.test_torch_draft import (
    CONTEXT,
    SLOTS,
    WINDOW,
    Session,
    attentions,
    fresh,
    make,
    most,
    spoil,
)

KINDS = ("plain", "windows", "causal windows beside full layers", "everything")
EDGES = (0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 56, 63, 64, 65, 63 + WINDOW, 64 + WINDOW, 127)
"""Lengths at which a window starts to hide, a block of 64 positions ends, or both."""


@pytest.fixture(params=KINDS)
def draft(request: pytest.FixtureRequest) -> TorchBlockDraft:
    return make(request.param)


def stored(draft: TorchBlockDraft) -> list[torch.Tensor]:
    """Return copies of every layer's keys and values."""
    caches = [attention.cache for attention in attentions(draft)]
    return [part.clone() for cache in caches for part in (cache.k, cache.v)]


def same_bits(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_k2_k7_block_rows_of_a_rejected_draft_never_show_in_a_later_block_whatever_is_accepted(
    draft: TorchBlockDraft,
) -> None:
    """At every accepted count 0 .. K, from every edge: bit for bit the block of a fresh draft."""
    session = Session(draft, 1)
    k = most(draft)
    expected = {
        length: fresh(draft, session, length, k)
        for edge in EDGES
        for length in range(edge, min(edge + k + 1, CONTEXT) + 1)
    }
    spoil(draft)
    for edge in EDGES:
        for accepted in range(k + 1):
            draft.reset(1)
            (logits,) = draft.run([session.work(1, 0, edge, k)])
            assert torch.equal(logits, expected[edge]), edge
            end = min(edge + accepted + 1, CONTEXT)
            (logits,) = draft.run([session.work(1, edge, end, k)])
            assert torch.equal(logits, expected[end]), (edge, accepted)


def test_k2_a_context_is_the_same_whether_or_not_blocks_were_drafted_in_it(
    draft: TorchBlockDraft,
) -> None:
    """Rounds of random acceptance to the end of the context, against a prefill in one piece."""
    session = Session(draft, 1)
    rng = random.Random(3)
    k = most(draft)
    length = 0
    spoil(draft)
    while length < CONTEXT:
        end = min(length + rng.randint(1, k + 1), CONTEXT)
        (logits,) = draft.run([session.work(1, length, end, k)])
        length = end
        if rng.random() < 0.3 or length == CONTEXT:
            assert torch.equal(logits, fresh(draft, session, length, k)), length


def test_every_cut_of_a_context_gives_the_same_bits(draft: TorchBlockDraft) -> None:
    session = Session(draft, 1)
    expected = fresh(draft, session, 140, most(draft))
    for width in (1, 2, 7, 8, 9, 63, 64, 65, 139):
        spoil(draft)
        draft.reset(2)
        for start in range(0, 140, width):
            draft.run([session.work(2, start, min(start + width, 140))])
        assert torch.equal(draft.run([session.work(2, 140, 140, most(draft))])[0], expected), width


def test_drafting_again_without_new_rows_gives_the_same_bits(draft: TorchBlockDraft) -> None:
    """A block moves nothing: the context ends where it ended."""
    session = Session(draft, 1)
    expected = fresh(draft, session, 64, most(draft))
    for count in (most(draft), 1, 3):
        (logits,) = draft.run([session.work(0, 64, 64, count)])
        assert torch.equal(logits, expected[:count])


REFUSED = {
    "a write at 6: the context of the slot ends at 5": (6, 8, 0),
    "a write at 4: the context of the slot ends at 5": (4, 8, 0),
    "a write at 0: the context of the slot ends at 5": (0, 5, 0),
    r"draft count 8; the block drafts 0\.\.7": (5, 8, 8),
    r"draft count -1; the block drafts 0\.\.7": (5, 8, -1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_k3_a_work_that_breaks_a_rule_is_refused_before_anything_of_its_pack_runs(
    message: str,
) -> None:
    draft = make()
    session, other = Session(draft, 1), Session(draft, 2)
    draft.run([session.work(0, 0, 5, 7), other.work(1, 0, 9, 7)])
    before = stored(draft)
    start, end, count = REFUSED[message]
    bad = session.work(0, start, end, count)
    for pack in ([bad], [other.work(1, 9, 20, 7), bad], [bad, other.work(1, 9, 20, 7)]):
        with pytest.raises(ValueError, match=message):
            draft.run(pack)
        assert same_bits(stored(draft), before)
    expected = fresh(draft, other, 20, 7)
    assert torch.equal(draft.run([other.work(1, 9, 20, 7)])[0], expected)


def test_k3_a_pack_holds_a_slot_once_and_a_block_its_pending_token() -> None:
    draft = make()
    session = Session(draft, 1)
    before = stored(draft)
    with pytest.raises(ValueError, match="slot 3 appears twice in one pack"):
        draft.run([session.work(3, 0, 2), session.work(1, 0, 2), session.work(3, 2, 4)])
    lacking = BlockWork(
        slot=1, start=0, features=session.features[:3], pending_token_id=None, draft_count=1
    )
    with pytest.raises(ValueError, match="a block needs the pending token"):
        draft.run([session.work(0, 0, 2), lacking])
    assert same_bits(stored(draft), before)


def test_k3_a_context_is_filled_to_its_last_position_and_no_further(
    draft: TorchBlockDraft,
) -> None:
    """The block of the fullest context has room too: it stands beyond the context's end."""
    session = Session(draft, 1)
    k = most(draft)
    expected = [fresh(draft, session, length, k) for length in (CONTEXT - 1, CONTEXT)]
    (logits,) = draft.run([session.work(1, 0, CONTEXT - 1, k)])
    assert torch.equal(logits, expected[0])
    (logits,) = draft.run([session.work(1, CONTEXT - 1, CONTEXT, k)])
    assert torch.equal(logits, expected[1])
    beyond = BlockWork(
        slot=1,
        start=CONTEXT,
        features=session.features[:1],
        pending_token_id=5,
        draft_count=k,
    )
    before = stored(draft)
    with pytest.raises(ValueError, match="a context of 151; the cache holds 150"):
        draft.run([session.work(2, 0, 10, k), beyond])
    assert same_bits(stored(draft), before)


def test_k4_a_slot_that_is_reset_starts_empty_and_equals_a_fresh_one(
    draft: TorchBlockDraft,
) -> None:
    """Longer and shorter successors, each in a slot where another session was and drafted."""
    k = most(draft)
    for seed, length in enumerate((140, 30, 64, 0, 100, 1)):
        session = Session(draft, seed)
        expected = fresh(draft, session, length, k)
        draft.reset(1)
        with pytest.raises(ValueError, match="a write at 1: the context of the slot ends at 0"):
            draft.run([session.work(1, 1, 2)])
        (logits,) = draft.run([session.work(1, 0, length, k)])
        assert torch.equal(logits, expected), length


def test_k6_whatever_a_cache_holds_beyond_a_context_or_before_its_windows_is_not_read(
    draft: TorchBlockDraft,
) -> None:
    """NaN and infinities in every place that no slot of the block may see."""
    session = Session(draft, 1)
    k = most(draft)
    for length in (*EDGES, 140):
        expected = fresh(draft, session, length, k)
        assert expected.isfinite().all()
        for value in (float("nan"), float("inf")):
            draft.reset(1)
            draft.run([session.work(1, 0, length)])
            for attention in attentions(draft):
                window = attention.sliding_window
                hidden = 0 if window is None else max(0, length - window)
                for part in (attention.cache.k, attention.cache.v):
                    part[1, :, length:] = value
                    part[1, :, :hidden] = value
                    part[0], part[2:] = value, value
            (logits,) = draft.run([session.work(1, length, length, k)])
            assert torch.equal(logits, expected), (length, value)


def test_k6_a_block_after_an_empty_context_is_finite() -> None:
    """Slot 0 of a causal layer sees itself alone."""
    for name in KINDS:
        draft = make(name)
        spoil(draft)
        (logits,) = draft.run([Session(draft, 1).work(0, 0, 0, most(draft))])
        assert logits.isfinite().all()


def projected_rows(draft: TorchBlockDraft, works: Sequence[BlockWork]) -> int:
    """Run works that only extend; return how many rows went through a layer's k_proj."""
    assert not any(work.draft_count for work in works)
    rows: list[int] = []
    k_proj = draft._network.layers[0].self_attn.k_proj
    hook = k_proj.register_forward_hook(lambda _m, _i, output: rows.append(len(output)))
    draft.run(works)
    hook.remove()
    return sum(rows)


@pytest.mark.parametrize("first", [0, 3, 50, 64, 70])
def test_d16_rows_that_no_block_can_see_are_not_projected_and_drafts_are_the_same(
    first: int,
) -> None:
    """Of chunks that are longer than every window; a row at a time, none can be left out."""
    draft = make("windows")
    session = Session(draft, 1)
    for end in (first + WINDOW, first + WINDOW + 1, first + 40, first + 64, first + 75):
        draft.reset(1)
        for position in range(end):
            draft.run([session.work(1, position, position + 1)])
        (expected,) = draft.run([session.work(1, end, end, 7)])
        spoil(draft)
        draft.reset(0)
        draft.run([session.work(0, 0, first)])
        assert projected_rows(draft, [session.work(0, first, end)]) == 24  # 20, in tiles
        (logits,) = draft.run([session.work(0, end, end, 7)])
        assert torch.equal(logits, expected), end
        (logits,) = draft.run([session.work(0, end, min(end + 3, CONTEXT), 7)])
        assert torch.equal(logits, fresh(draft, session, min(end + 3, CONTEXT), 7)), end


def test_d16_one_layer_without_a_window_needs_every_row() -> None:
    draft = make("causal windows beside full layers")
    session = Session(draft, 1)
    assert projected_rows(draft, [session.work(0, 0, 120)]) == 120
    assert projected_rows(draft, [session.work(i, 0, 30) for i in (1, 2)]) == 64  # 60, in tiles


def test_a_step_that_fails_on_its_way_leaves_contexts_as_they_were() -> None:
    """The engine may try the same rows again: a length moves only after a pack ran."""
    draft = make()
    session, other = Session(draft, 1), Session(draft, 2)
    expected = fresh(draft, session, 30, 7)
    draft.run([session.work(1, 0, 10, 7), other.work(2, 0, 10, 7)])
    hook = draft._network.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        draft.run([session.work(1, 10, 30, 7), other.work(2, 10, 35, 7)])
    hook.remove()
    assert torch.equal(draft.run([session.work(1, 10, 30, 7)])[0], expected)
    assert torch.equal(draft.run([other.work(2, 10, 11, 7)])[0], fresh(draft, other, 11, 7))


def fail(*_: object) -> None:
    raise RuntimeError("out of memory")


def test_slots_are_as_many_as_were_asked_for() -> None:
    draft = make()
    sessions = [Session(draft, seed) for seed in range(SLOTS)]
    outputs = draft.run([s.work(slot, 0, 9 * slot, 7) for slot, s in enumerate(sessions)])
    for slot, session in enumerate(sessions):
        assert torch.equal(outputs[slot], fresh(draft, session, 9 * slot, 7))
