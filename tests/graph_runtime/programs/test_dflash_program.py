"""DFlash drafts as programs: the published maths, and bits that know neither pack nor capacity."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("executorch")

from graph_runtime.dflash.draft import BlockDraft, BlockWork
from graph_runtime.dflash.load import load_draft, load_fusion_module
from graph_runtime.programs import DRAFT_PRECISIONS
from graph_runtime.programs.dflash_export import CONTEXT_ROWS, HEAD_ROWS
from tests.graph_runtime.programs.block_drafts import (
    CONTEXT,
    SEEN,
    VARIANTS,
    BlockDraftFiles,
    MakeFiles,
    write_files,
)
from tests.graph_runtime.programs.conftest import MakeModel

SLOTS = 12
LENGTHS = (0, 1, 2, SEEN, SEEN + 1, 64, CONTEXT_ROWS + 1, CONTEXT - 1, CONTEXT)
"""Where windows, capacity blocks and calls of `context` end, and the ends of the context."""
LoadDraft = Callable[..., BlockDraft]
pytestmark = pytest.mark.usefixtures("exported_here")


@pytest.fixture
def make_files(tmp_path: Path, make_model: MakeModel) -> MakeFiles:
    """Return a function that writes a draft of a variant."""

    def make(name: str = "z-lab", **changes: Any) -> BlockDraftFiles:
        folder = tmp_path / f"{name} {sorted(changes.items())}".replace("/", " ")
        return write_files(folder, name, make_model, **changes)

    return make


@pytest.fixture
def load(program_cache: Path) -> LoadDraft:
    """Return a function that loads a draft's program, exported into the shared cache."""

    def load(
        files: BlockDraftFiles,
        precision: str = "fp32",
        *,
        runtime: str = "executorch",
        block_length: int | None = None,
        context: int = CONTEXT,
    ) -> BlockDraft:
        return load_draft(
            files.source,
            block_length=block_length,
            runtime=runtime,
            precision=precision,
            cache_dir=program_cache,
            max_context_length=context,
            slot_count=SLOTS,
            threads=1,
        )[0]

    return load


class Session:
    """What one session feeds a draft with: the tokens and features of all positions."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 300, (CONTEXT + 1,), generator=generator).tolist()
        self.features = torch.randn(CONTEXT, 64, generator=generator)

    def work(self, slot: int, start: int, end: int, draft_count: int = 0) -> BlockWork:
        """Return the work that takes the context from `start` to `end`."""
        return BlockWork(
            slot=slot,
            start=start,
            features=self.features[start:end] if end > start else None,
            pending_token_id=self.tokens[end],
            draft_count=draft_count,
        )


def most(draft: BlockDraft) -> int:
    """Return the largest K of a block."""
    return draft.config.max_draft_count(draft.block_length)


def fresh(draft: BlockDraft, session: Session, end: int, slot: int = 0) -> torch.Tensor:
    """Return the logits [K, Vd] of a block after a context that comes whole, of a session alone."""
    draft.reset(slot)
    (logits,) = draft.run([session.work(slot, 0, end, most(draft))])
    return logits


def run_all(
    draft: BlockDraft, slot: int, session: Session, widths: Iterator[int]
) -> dict[int, torch.Tensor]:
    """Run a session to the end, `widths` rows a step; return each block's logits by its place."""
    draft.reset(slot)
    found = {}
    end = 0
    while end < CONTEXT:
        start, end = end, min(end + next(widths), CONTEXT)
        (found[end],) = draft.run([session.work(slot, start, end, most(draft))])
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_blocks_have_the_logits_of_the_published_maths_and_of_the_torch_draft(
    name: str, make_files: MakeFiles, load: LoadDraft
) -> None:
    files = make_files(name)
    program, torch_draft = load(files), load(files, runtime="torch")
    assert program.config == torch_draft.config
    assert (program.model_hash, program.block_length) == (
        torch_draft.model_hash,
        torch_draft.block_length,
    )
    session = Session(1)
    for length in LENGTHS:
        found = fresh(program, session, length)
        assert found.shape == (most(program), files.weights.draft_vocab_size)
        wanted = files.logits(
            session.features[:length].double(),
            session.tokens[length],
            program.block_length,
            most(program),
        )
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(found, fresh(torch_draft, session, length), rtol=0, atol=1e-5)
        assert torch.equal(found.argmax(1), wanted.argmax(1))


def test_a_block_trained_at_16_runs_at_8_as_a_block_of_8_and_not_as_half_of_16(
    make_files: MakeFiles, load: LoadDraft
) -> None:
    files = make_files(block_size=16)
    long, short = load(files), load(files, block_length=8)
    assert (most(long), most(short)) == (15, 7)
    session = Session(1)
    for length in (0, 1, 65):
        found = fresh(short, session, length)
        wanted = files.logits(
            session.features[:length].double(), session.tokens[length], 8, most(short)
        )
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
        assert (fresh(long, session, length)[:7] - found).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize(
    ("precision", "most_error", "least_agreeing"), [("8da8w", 0.05, 0.9), ("8da4w", 0.4, 0.5)]
)
def test_a_quantised_draft_is_close_and_mostly_agrees(
    precision: str,
    most_error: float,
    least_agreeing: float,
    make_files: MakeFiles,
    load: LoadDraft,
) -> None:
    files = make_files()
    program, reference = load(files, precision), load(files, runtime="torch")
    found, wanted = (
        torch.cat([fresh(draft, Session(seed), 20) for seed in range(20)])
        for draft in (program, reference)
    )
    error = ((found - wanted).norm() / wanted.norm()).item()
    agreeing = (found.argmax(1) == wanted.argmax(1)).float().mean().item()
    assert error < most_error, (error, agreeing)
    assert agreeing > least_agreeing, (error, agreeing)


KINDS = (
    "z-lab",
    "causal windows",
    "causal windows beside full layers",
    "gemma's scale and cap",
)
"""One of each kind of mask, and one whose logits are capped."""
RUNS = [("z-lab", precision) for precision in DRAFT_PRECISIONS] + [
    (name, "fp32") for name in KINDS[1:]
]


@pytest.mark.parametrize(("name", "precision"), RUNS)
def test_k5_a_session_has_the_same_bits_in_steps_of_any_width_and_caches_of_any_size(
    name: str, precision: str, make_files: MakeFiles, load: LoadDraft
) -> None:
    draft = load(make_files(name), precision)
    session = Session(1)
    wanted = run_all(draft, 0, session, itertools.repeat(1))
    draw = random.Random(5)
    for slot, widths in enumerate(
        (
            *(itertools.repeat(width) for width in (2, 3, 8, 50, CONTEXT_ROWS, CONTEXT)),
            iter(lambda: draw.randint(1, 8), 0),
            iter(lambda: draw.randint(1, 200), 0),
        ),
        start=1,
    ):
        for length, found in run_all(draft, slot, session, widths).items():
            assert torch.equal(found, wanted[length]), (slot, length)


def test_a_cache_of_the_largest_capacity_gives_the_bits_of_one_that_fits(
    make_files: MakeFiles, load: LoadDraft
) -> None:
    draft: Any = load(make_files("causal windows beside full layers"))
    session = Session(1)
    for length in (1, 40, 56, 57, 130):
        wanted = fresh(draft, session, length)
        fitting = draft._slots[0].capacity
        draft.reset(1)
        draft._slots[1].reserve(draft._metadata.max_capacity, kept=0)
        draft._slots[1].reserve = lambda *_, **__: None  # stays as large as it is
        (found,) = draft.run([session.work(1, 0, length, most(draft))])
        assert draft._slots[1].capacity > fitting
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("name", "precision"), RUNS)
def test_k1_k5_a_session_has_the_same_bits_in_any_pack(
    name: str, precision: str, make_files: MakeFiles, load: LoadDraft
) -> None:
    draft = load(make_files(name), precision)
    sessions = [Session(seed) for seed in range(SLOTS)]
    alone: dict[tuple[int, int], torch.Tensor] = {}
    reference = load(make_files(name), precision)
    draw = random.Random(3)
    ends = [0] * SLOTS
    head_rows = []
    while min(ends) < 150:
        slots = draw.sample(range(SLOTS), draw.randint(1, SLOTS))
        works = []
        for slot in slots:
            end = min(ends[slot] + draw.choice((0, 1, 1, 2, 5, 8, 60)), CONTEXT)
            works.append(sessions[slot].work(slot, ends[slot], end, draw.randint(0, most(draft))))
        head_rows.append(sum(work.draft_count for work in works))
        for work, found in zip(works, draft.run(works), strict=True):
            key = work.slot, work.length
            if key not in alone:
                alone[key] = fresh(reference, sessions[work.slot], work.length)
            assert torch.equal(found, alone[key][: work.draft_count]), (key, slots)
            ends[work.slot] = work.length
    assert min(head_rows) < HEAD_ROWS < max(head_rows)


@pytest.mark.parametrize("name", KINDS)
def test_k2_k7_rejected_drafts_leave_nothing_in_the_context(
    name: str, make_files: MakeFiles, load: LoadDraft
) -> None:
    draft = load(make_files(name))
    session = Session(1)
    k = most(draft)
    for edge in (0, 1, SEEN - 3, 60):
        wanted = {length: fresh(draft, session, length) for length in range(edge, edge + k + 2)}
        for accepted in range(k + 1):
            draft.reset(1)
            draft.run([session.work(1, 0, edge, k)])
            (found,) = draft.run([session.work(1, edge, edge + accepted + 1, k)])
            assert torch.equal(found, wanted[edge + accepted + 1]), (edge, accepted)
            again = draft.run([session.work(1, edge + accepted + 1, edge + accepted + 1, 2)])
            assert torch.equal(again[0], found[:2])


@pytest.mark.parametrize("context", [1, CONTEXT_ROWS])
def test_a_context_no_longer_than_a_step_s_rows_is_drafted_from_to_its_end(
    context: int, make_files: MakeFiles, load: LoadDraft
) -> None:
    # Guards a trace that proved that a step as long as the cache can only start at 0.
    files = make_files()
    session = Session(1)
    for length in {0, 1, context}:
        found, wanted = (
            fresh(load(files, runtime=runtime, context=context), session, length)
            for runtime in ("executorch", "torch")
        )
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


class Recorder:
    """A method that notes how many rows it is run with."""

    def __init__(self, method: Any) -> None:
        self.method = method
        self.rows: list[int] = []

    def execute(self, inputs: list[torch.Tensor]) -> Any:
        self.rows.append(len(inputs[0]))
        return self.method.execute(inputs)


def recorded(draft: Any) -> tuple[list[int], list[int], list[int]]:
    """Return the rows of the calls of `context`, `block` and `head` from here on."""
    recorders = []
    for name in ("_context_method", "_block_method", "_head_method"):
        recorders.append(Recorder(getattr(draft, name)))
        setattr(draft, name, recorders[-1])
    return tuple(recorder.rows for recorder in recorders)  # type: ignore[return-value]


def test_d2_a_session_s_block_is_one_call_whatever_the_draft_count(
    make_files: MakeFiles, load: LoadDraft
) -> None:
    draft, session = load(make_files(), "8da8w"), Session(1)
    context, block, _ = recorded(draft)
    for length, count in enumerate(range(1, 8)):
        draft.run([session.work(0, length, length + 1, count)])
    assert (context, block) == ([2] * 7, [8] * 7)


def test_what_a_step_runs_is_what_was_asked_for_and_never_a_single_row(
    make_files: MakeFiles, load: LoadDraft
) -> None:
    # Products of one row may take other kernels, with other bits.
    draft, session = load(make_files(), "8da8w"), Session(1)
    context, block, head = recorded(draft)
    draft.run([session.work(0, 0, 1), session.work(1, 0, 0, 1)])
    assert (context, block, head) == ([2], [8], [2])
    draft.run([session.work(0, 1, 4, 3), session.work(1, 0, 2), session.work(2, 0, 5, 7)])
    assert (context, block, head) == ([2, 10], [8, 8, 8], [2, 10])
    draft.run([session.work(0, 4, 4 + CONTEXT_ROWS), session.work(1, 2, 3)])
    assert (context, block, head) == ([2, 10, CONTEXT_ROWS, 2], [8, 8, 8], [2, 10])
    draft.run([session.work(3, 0, 0), session.work(4, 0, 0)])
    assert len(context + block + head) == 9
    draft.run([session.work(slot, 0, 0, 7) for slot in (3, 4, 5)])
    assert head == [2, 10, HEAD_ROWS, 21 - HEAD_ROWS]


def test_d16_rows_that_no_block_can_see_any_more_are_not_projected(
    make_files: MakeFiles, load: LoadDraft
) -> None:
    windowed, mixed = load(make_files("causal windows")), load(make_files(KINDS[2]))
    session = Session(1)
    for draft, wanted in ((windowed, [SEEN, SEEN]), (mixed, [100, 30])):
        context, _, _ = recorded(draft)
        draft.run([session.work(0, 0, 100)])
        (found,) = draft.run([session.work(0, 100, 130, 7)])
        assert context == wanted
        context.clear()
        for end in range(130):
            draft.run([session.work(1, end, end + 1)])
        assert torch.equal(draft.run([session.work(1, 130, 130, 7)])[0], found)


def test_what_breaks_a_rule_of_the_context_runs_nothing(
    make_files: MakeFiles, load: LoadDraft
) -> None:
    draft, session, other = load(make_files(), "8da8w"), Session(1), Session(2)
    draft.run([session.work(0, 0, 10)])
    good = other.work(0, 10, 12)
    for broken, message in (
        (session.work(1, 1, 2), "a write at 1: the context of the slot ends at 0"),
        (session.work(0, 10, 11), "slot 0 appears twice"),
        (session.work(1, 0, 2, 8), r"draft count 8; the block drafts 0\.\.7"),
        (replace(session.work(1, 0, 2, 3), pending_token_id=None), "needs the pending token"),
    ):
        with pytest.raises(ValueError, match=message):
            draft.run([good, broken])
    assert torch.equal(draft.run([session.work(0, 10, 20, 7)])[0], fresh(draft, session, 20, 1))


def test_the_context_is_filled_exactly_and_no_further_and_a_reset_forgets(
    make_files: MakeFiles, load: LoadDraft
) -> None:
    draft, session = load(make_files(), "8da8w"), Session(1)
    draft.run([session.work(0, 0, CONTEXT - 1, 7)])
    (found,) = draft.run([session.work(0, CONTEXT - 1, CONTEXT, 7)])
    assert torch.equal(found, fresh(draft, session, CONTEXT, 1))
    too_long = replace(session.work(0, 0, 1), start=CONTEXT)
    with pytest.raises(ValueError, match=f"a context of {CONTEXT + 1}; the cache holds {CONTEXT}"):
        draft.run([too_long])
    draft.reset(0)
    with pytest.raises(ValueError, match=f"a write at {CONTEXT}: the context of the slot ends at"):
        draft.run([too_long])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize(
    ("name", "precision"), [("z-lab", "fp32"), ("z-lab", "8da8w"), ("causal windows", "fp32")]
)
def test_what_is_not_finite_stays_in_its_session_and_ends_with_it(
    name: str, precision: str, bad: float, make_files: MakeFiles, load: LoadDraft
) -> None:
    draft = load(make_files(name), precision)
    sessions = [Session(seed) for seed in range(3)]
    wanted = [fresh(draft, session, 40) for session in sessions]
    sick = Session(9)
    sick.features[3:30] = bad
    found = draft.run(
        [sessions[0].work(4, 0, 40, 7), sick.work(5, 0, 40, 7), sessions[1].work(6, 0, 40, 7)]
    )
    assert torch.equal(found[0], wanted[0])
    assert not found[1].isfinite().all()
    assert torch.equal(found[2], wanted[1])
    draft.reset(5)
    for start, end in ((0, 1), (1, 40)):  # shorter at first than what its predecessor left
        (after,) = draft.run([sessions[2].work(5, start, end, 7)])
        assert torch.equal(after, fresh(draft, sessions[2], end))


def test_what_is_not_finite_leaves_with_the_windows_that_saw_it(
    make_files: MakeFiles, load: LoadDraft
) -> None:
    draft, healthy, sick = load(make_files("causal windows")), Session(1), Session(1)
    sick.features[10:13] = float("nan")
    broken = []
    for end in range(0, 60, 5):
        (found,) = draft.run([sick.work(1, max(end - 5, 0), end, 7)])
        broken.append(not found.isfinite().all())
        assert broken[-1] or torch.equal(found, fresh(draft, healthy, end))
    assert broken == [10 < end < 13 + SEEN for end in range(0, 60, 5)]


def test_rows_are_fused_as_the_verifier_does(
    make_files: MakeFiles, load: LoadDraft, program_cache: Path
) -> None:
    files = make_files()
    draft = load(files, "8da8w")
    _, digest, fusion = load_fusion_module(files.source, program_cache)
    rows = torch.randn(11, draft.config.raw_row_width)
    assert digest == draft.model_hash
    assert torch.equal(draft.fuse(rows), fusion(rows))
    assert torch.equal(draft.fuse(rows)[4:6], draft.fuse(rows[4:6]))


def test_nothing_to_run_is_nothing(make_files: MakeFiles, load: LoadDraft) -> None:
    draft = load(make_files(), "8da8w")
    assert draft.run([]) == []
    (logits,) = draft.run([Session(1).work(0, 0, 5)])
    assert logits.shape == (0, 300)
