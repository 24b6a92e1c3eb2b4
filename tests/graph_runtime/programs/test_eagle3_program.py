"""Drafts as programs: the torch draft's numbers, and bits that know neither pack nor capacity."""

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

from graph_runtime.eagle3.checkpoint import Eagle3Source
from graph_runtime.eagle3.draft import Draft, DraftSpan
from graph_runtime.eagle3.load import load_draft, load_fusion_module
from graph_runtime.programs import DRAFT_PRECISIONS
from graph_runtime.programs.eagle3_export import ENTER_ROWS, LEAVE_ROWS
from tests.graph_runtime.programs.conftest import DRAFTS, MakeSource

CONTEXT = 300
"""Crosses four borders between capacity blocks of 64."""
SLOTS = 12
"""More than one `leave` takes."""
LoadDraft = Callable[..., Draft]
pytestmark = pytest.mark.usefixtures("exported_here")


@pytest.fixture
def load(program_cache: Path) -> LoadDraft:
    """Return a function that loads a draft's program, exported into the shared cache."""

    def load(source: Eagle3Source, precision: str, *, runtime: str = "executorch") -> Draft:
        return load_draft(
            source,
            runtime=runtime,
            precision=precision,
            cache_dir=program_cache,
            max_context_length=CONTEXT,
            slot_count=SLOTS,
            threads=1,
        )[0]

    return load


def tokens_of(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 300, (length,), generator=generator).tolist()


def features_of(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(length, 64, generator=torch.Generator().manual_seed(seed))


def span(slot: int, start: int, end: int, seed: int = 1) -> DraftSpan:
    """Return draft slots [start, end) of the session that `seed` names."""
    return DraftSpan(
        slot=slot,
        start=start,
        token_ids=tokens_of(CONTEXT, seed)[start:end],
        features=features_of(CONTEXT, seed)[start:end],
    )


def chain(draft: Draft, slot: int, seed_length: int, seed: int = 1, steps: int = 5) -> torch.Tensor:
    """Return the logits [steps, Vd] of a seed and of the steps that feed the feature back."""
    feature = draft.run([span(slot, 0, seed_length, seed)])
    logits = [draft.logits(feature)]
    for step in range(1, steps):
        start = seed_length + step - 1
        feature = draft.run([replace(span(slot, start, start + 1, seed), features=feature)])
        logits.append(draft.logits(feature))
    return torch.cat(logits)


def run_all(draft: Draft, slot: int, seed: int, widths: Iterator[int]) -> dict[int, torch.Tensor]:
    """Run a session to the end in spans of `widths`; return features and logits by last slot."""
    outputs = {}
    start = 0
    while start < CONTEXT:
        end = min(start + next(widths), CONTEXT)
        feature = draft.run([span(slot, start, end, seed)])
        outputs[end - 1] = torch.cat((feature, draft.logits(feature)), dim=1)
        start = end
    return outputs


@pytest.mark.parametrize("case", DRAFTS)
def test_seeds_and_chain_steps_have_the_torch_draft_s_logits(
    case: str, make_source: MakeSource, load: LoadDraft
) -> None:
    source = make_source(case, logit_scale=0.1)
    program, reference = load(source, "fp32"), load(source, "fp32", runtime="torch")
    assert (program.config, program.model_hash) == (reference.config, reference.model_hash)
    for length in (1, 2, 9, 64, ENTER_ROWS + 1, 2 * ENTER_ROWS + 30):
        found, wanted = (chain(draft, 0, length) for draft in (program, reference))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("precision", "most", "least_agreeing"), [("8da8w", 0.1, 0.9), ("8da4w", 0.4, 0.6)]
)
def test_a_quantised_draft_is_close_and_mostly_agrees(
    precision: str,
    most: float,
    least_agreeing: float,
    make_source: MakeSource,
    load: LoadDraft,
) -> None:
    source = make_source()
    program, reference = load(source, precision), load(source, "fp32", runtime="torch")
    found, wanted = (
        torch.cat([chain(draft, 0, 20, seed) for seed in range(20)])
        for draft in (program, reference)
    )
    assert ((found - wanted).norm() / wanted.norm()).item() < most
    assert (found.argmax(1) == wanted.argmax(1)).float().mean().item() > least_agreeing


@pytest.mark.parametrize("case", ["safeailab", "specforge, one K/V head a head"])
@pytest.mark.parametrize("precision", DRAFT_PRECISIONS)
def test_a_session_has_the_same_bits_in_spans_of_any_width_and_caches_of_any_size(
    precision: str, case: str, make_source: MakeSource, load: LoadDraft
) -> None:
    draft = load(make_source(case), precision)
    wanted = run_all(draft, 0, 1, itertools.repeat(1))
    draw = random.Random(5)
    for slot, widths in enumerate(
        (
            *(itertools.repeat(width) for width in (2, 3, 8, 50, ENTER_ROWS, CONTEXT)),
            iter(lambda: draw.randint(1, 8), 0),
            iter(lambda: draw.randint(1, 200), 0),
        ),
        start=1,
    ):
        run_all(draft, slot, 7, itertools.repeat(100))  # another session's, to the end
        draft.run([span(slot, 0, 1)])
        draft.run([span(slot, 1, 290, seed=8)])  # what a rollback leaves, in a cache that stays big
        if slot % 2:
            draft.run([span(slot, 0, 1)])
        for last, found in run_all(draft, slot, 1, widths).items():
            assert torch.equal(found, wanted[last]), (slot, last)


@pytest.mark.parametrize("precision", DRAFT_PRECISIONS)
def test_a_session_has_the_same_bits_in_any_pack(
    precision: str, make_source: MakeSource, load: LoadDraft
) -> None:
    draft = load(make_source(), precision)
    alone = {seed: run_all(draft, 0, seed, itertools.repeat(1)) for seed in range(SLOTS)}
    draw = random.Random(3)
    starts = [0] * SLOTS
    while any(start < CONTEXT for start in starts):
        running = [slot for slot in range(SLOTS) if starts[slot] < CONTEXT]
        slots = draw.sample(running, draw.randint(1, len(running)))
        ends = {slot: min(starts[slot] + draw.randint(1, 60), CONTEXT) for slot in slots}
        features = draft.run([span(slot, starts[slot], ends[slot], slot) for slot in slots])
        found = torch.cat((features, draft.logits(features)), dim=1)
        for row, slot in zip(found, slots, strict=True):
            assert torch.equal(row, alone[slot][ends[slot] - 1][0]), (slot, ends)
            starts[slot] = ends[slot]
    assert len(alone) > LEAVE_ROWS


@pytest.mark.parametrize("context", [40, ENTER_ROWS])
def test_a_context_no_longer_than_a_step_s_rows_is_drafted_in_to_its_end(
    context: int, make_source: MakeSource, program_cache: Path
) -> None:
    # Guards a trace that proved that a step as long as the cache can only start at 0.
    logits = []
    for runtime in ("executorch", "torch"):
        draft, _ = load_draft(
            make_source(logit_scale=0.1),
            runtime=runtime,
            precision="fp32",
            cache_dir=program_cache,
            max_context_length=context,
            slot_count=1,
            threads=1,
        )
        logits.append(chain(draft, 0, context - 4))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


class Recorder:
    """A method that notes how many rows it is run with."""

    def __init__(self, method: Any, rows: list[int]) -> None:
        self.method, self.rows = method, rows

    def execute(self, inputs: list[torch.Tensor]) -> Any:
        self.rows.append(len(inputs[0]))
        return self.method.execute(inputs)


def test_no_linear_ever_sees_a_single_row(make_source: MakeSource, load: LoadDraft) -> None:
    # Such products may take other kernels, with other bits; which do depends on the processor.
    draft: Any = load(make_source(), "8da8w")
    rows: list[int] = []
    for name in ("_enter_method", "_leave_method", "_head_method"):
        setattr(draft, name, Recorder(getattr(draft, name), rows))
    draft.logits(draft.run([span(0, 0, 1)]))
    draft.logits(draft.run([span(1, 0, ENTER_ROWS + 1)]))
    draft.logits(draft.run([span(slot, 0, 1) for slot in range(LEAVE_ROWS + 1)]))
    assert set(rows) == {2, LEAVE_ROWS, LEAVE_ROWS + 1, ENTER_ROWS}


def test_e20_what_breaks_a_rule_of_the_cache_runs_nothing(
    make_source: MakeSource, load: LoadDraft
) -> None:
    draft = load(make_source(), "8da8w")
    draft.run([span(0, 0, 10)])
    good, wrong = span(0, 5, 10, seed=2), span(1, 1, 2)
    for broken, message in (
        ([good, wrong], "a write at 1 leaves a gap: 0 are valid"),
        ([good, span(0, 5, 6)], "slot 0 appears twice"),
        ([good, replace(span(1, 0, 2), token_ids=[5])], "1 tokens with 2 features"),
        ([good, replace(span(1, 0, 2), token_ids=[], features=features_of(0))], "0 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            draft.run(broken)
    # The good one did not run either.
    wanted = draft.run([span(2, 0, 12)])
    assert torch.equal(draft.run([span(0, 10, 12)]), wanted)


def test_e20_an_overwrite_truncates_and_a_reset_forgets(
    make_source: MakeSource, load: LoadDraft
) -> None:
    draft = load(make_source(), "8da8w")
    draft.run([span(0, 0, 20)])
    draft.run([span(0, 5, 6)])
    with pytest.raises(ValueError, match="a write at 20 leaves a gap: 6 are valid"):
        draft.run([span(0, 20, 21)])
    draft.reset(0)
    with pytest.raises(ValueError, match="a write at 6 leaves a gap: 0 are valid"):
        draft.run([span(0, 6, 7)])


def test_e20_the_cache_is_filled_exactly_and_no_further(
    make_source: MakeSource, load: LoadDraft
) -> None:
    draft = load(make_source(), "8da8w")
    draft.run([span(0, 0, CONTEXT - 1)])
    draft.run([span(0, CONTEXT - 1, CONTEXT)])
    with pytest.raises(ValueError, match=f"ends at {CONTEXT + 1}; the cache holds {CONTEXT}"):
        draft.run([DraftSpan(slot=0, start=CONTEXT, token_ids=[1], features=features_of(1))])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("precision", ["fp32", "8da8w"])
def test_what_is_not_finite_stays_in_its_session_and_ends_with_a_rollback(
    precision: str, bad: float, make_source: MakeSource, load: LoadDraft
) -> None:
    draft = load(make_source("modelopt without taps"), precision)
    wanted = [draft.run([span(slot, 0, 40, slot), span(slot + 2, 0, 5)])[0] for slot in (0, 1)]
    broken = features_of(CONTEXT)[10:30].index_fill(0, torch.arange(3, 20), bad)
    for slot in (4, 5):
        draft.run([span(slot, 0, 10)])
        found = draft.run(
            [span(6, 0, 40, 0), replace(span(slot, 10, 30), features=broken), span(7, 0, 40, 1)]
        )
        assert torch.equal(found[0], wanted[0])
        assert not found[1].isfinite().all()
        assert torch.equal(found[2], wanted[1])
    # One goes on from before, another begins anew.
    draft.run([span(8, 0, 13)])
    assert torch.equal(draft.run([span(4, 10, 13)]), draft.run([span(8, 10, 13)]))
    assert torch.equal(draft.run([span(5, 0, 40, 0)])[0], wanted[0])


def test_rows_are_fused_as_the_verifier_does(
    make_source: MakeSource, load: LoadDraft, program_cache: Path
) -> None:
    source = make_source()
    draft = load(source, "8da8w")
    _, digest, fusion = load_fusion_module(source, program_cache)
    rows = torch.randn(11, draft.config.raw_row_width)
    assert digest == draft.model_hash
    assert torch.equal(draft.fuse(rows), fusion(rows))
    assert torch.equal(draft.fuse(rows)[4:6], draft.fuse(rows[4:6]))


def test_nothing_to_run_is_nothing(make_source: MakeSource, load: LoadDraft) -> None:
    draft = load(make_source(), "8da8w")
    assert draft.run([]).shape == (0, 64)
    assert draft.logits(torch.empty(0, 64)).shape == (0, 100)
