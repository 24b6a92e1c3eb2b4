"""Steps on a target whose every token depends on the whole prefix: laws, quarantine, faults."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest
import torch

from graph_runtime.choice import Sampling
from graph_runtime.target import Span, SpanOutput
from splitspec.errors import (
    CommittedLengthMismatch,
    ContextFull,
    Draining,
    EngineFailed,
    InvalidArgument,
    NoFreeSlot,
    NonFiniteLogits,
    SessionNotFound,
    SplitspecError,
    UserError,
)
from splitspec.v1 import rows_pb2
from tests.fakes import FakeTarget
from tests.graph_runtime.test_choice import reference_choice
from verifier_service.engine import Engine
from verifier_service.sessions import StreamSessions
from verifier_service.steps import (
    ForkItem,
    Item,
    ItemResult,
    OpenItem,
    PrefillItem,
    PrefillOutcome,
    RefusedItem,
    ReleaseItem,
    StepResult,
    VerifyItem,
    VerifyOutcome,
)

NONE, RAW, FUSED = rows_pb2.ROW_KIND_NONE, rows_pb2.ROW_KIND_RAW_TAPS, rows_pb2.ROW_KIND_FUSED
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=77)


class Rig:
    """An engine on a fake target, one stream, and shorthands."""

    def __init__(self, target: FakeTarget | None = None) -> None:
        self.target = target or FakeTarget()
        self.engine = Engine(self.target, max_draft_count=7)
        self.stream = StreamSessions()

    def run(self, *items: Item) -> StepResult:
        return self.engine.run_step(self.stream, items)

    def one(self, item: Item) -> ItemResult:
        (result,) = self.run(item).results
        return result

    def error(self, item: Item) -> SplitspecError:
        error = self.one(item).error
        assert error is not None
        return error

    def start(self, session_id: int, prompt: Sequence[int], sampling: Sampling = GREEDY) -> int:
        """Open a session, prefill its prompt, and return the prefill bonus."""
        result = self.run(
            opening(session_id, sampling), prefill(session_id, 0, prompt, final=True)
        ).results[1]
        assert isinstance(result.outcome, PrefillOutcome)
        assert result.outcome.bonus_token_id is not None
        return result.outcome.bonus_token_id


def opening(session_id: int, sampling: Sampling = GREEDY, row_kind: int = RAW) -> OpenItem:
    return OpenItem(session_id=session_id, sampling=sampling, row_kind=row_kind)


def prefill(
    session_id: int, length: int, token_ids: Sequence[int], final: bool = False
) -> PrefillItem:
    return PrefillItem(
        session_id=session_id, committed_length=length, token_ids=token_ids, final=final
    )


def window(session_id: int, length: int, pending: int, drafts: Sequence[int] = ()) -> VerifyItem:
    return VerifyItem(
        session_id=session_id,
        committed_length=length,
        pending_token_id=pending,
        draft_token_ids=drafts,
    )


def fork(session_id: int, source: int, length: int) -> ForkItem:
    return ForkItem(
        session_id=session_id,
        source_session_id=source,
        length=length,
        sampling=GREEDY,
        row_kind=RAW,
    )


def continuation(
    target: FakeTarget, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY
) -> list[int]:
    """Return what the target alone emits after `prompt`: no cache, no window, no engine."""
    tokens = list(prompt)
    for _ in range(count):
        logits = target.logits_after(tokens).tolist()
        tokens.append(reference_choice(logits, sampling, len(tokens)))
    return tokens[len(prompt) :]


def verified(result: ItemResult) -> VerifyOutcome:
    assert isinstance(result.outcome, VerifyOutcome), result
    return result.outcome


def positions_and_tokens(data: bytes) -> list[tuple[int, int]]:
    """Read what the fake target wrote into its rows."""
    return [(int(p), int(t)) for p, t, _, _ in struct.iter_unpack("<4f", data)]


def draft(kind: str, truth: Sequence[int], generator: random.Random, count: int) -> list[int]:
    """Return draft tokens of a right, a wrong or a coin-flip drafter."""
    drafts = list(truth[:count])
    for index, token in enumerate(drafts):
        if kind == "wrong" or (kind == "coin-flip" and generator.random() < 0.5):
            drafts[index] = (token + 1) % 50
    return drafts


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(temperature=1.0, seed=2**64 - 1)])
@pytest.mark.parametrize("kind", ["right", "wrong", "coin-flip"])
def test_L1_L3_L4_L5_rounds_emit_the_targets_own_tokens_whatever_is_drafted(
    kind: str, sampling: Sampling
) -> None:
    rig = Rig()
    prompt = [3, 1, 4, 1, 5]
    truth = continuation(rig.target, prompt, 50, sampling)
    emitted = [rig.start(1, prompt, sampling)]
    generator = random.Random(1)
    rig.target.passes.clear()
    rounds = 0
    while len(emitted) < 40:
        committed = len(prompt) + len(emitted) - 1  # L1: the last token is pending
        drafts = draft(kind, truth[len(emitted) :], generator, rounds % 8)
        step = rig.run(window(1, committed, emitted[-1], drafts))
        outcome = verified(step.results[0])
        assert outcome.rows is not None
        new = [*drafts[: outcome.accepted_count], outcome.bonus_token_id]
        # L3: acceptance length == rows committed == tokens emitted, in 1..K+1.
        assert 1 <= len(new) <= len(drafts) + 1
        window_tokens = [emitted[-1], *drafts][: len(new)]
        assert positions_and_tokens(outcome.rows.data) == [
            (committed + i, token) for i, token in enumerate(window_tokens)
        ]
        assert step.results[0].committed_length == committed + len(new)
        if kind == "right":
            assert outcome.accepted_count == len(drafts)  # V6: the bonus is the last row's
        if kind == "wrong":
            assert outcome.accepted_count == 0
        emitted += new
        rounds += 1
        assert step.pass_count == 1  # L5
    assert emitted == truth[: len(emitted)]
    assert len(rig.target.passes) == rounds  # L5


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_a_chunked_prefill_and_a_replay_give_the_same_tokens_and_rows(chunk: int) -> None:
    rig = Rig()
    prompt = [7, 7, 2, 9, 30, 1, 0, 49, 5, 5, 11]
    truth = continuation(rig.target, prompt, 8)
    rig.run(opening(1))
    rows, bonus = b"", None
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        final = start + chunk >= len(prompt)
        outcome = rig.one(prefill(1, start, part, final=final)).outcome
        assert isinstance(outcome, PrefillOutcome)
        assert outcome.rows is not None
        rows, bonus = rows + outcome.rows.data, outcome.bonus_token_id
        assert (bonus is not None) == final
    assert bonus == truth[0]
    assert positions_and_tokens(rows) == list(enumerate(prompt))
    # A replay knows the answer so far: all tokens but the last are prefilled, none final.
    tokens = [*prompt, *truth[:5]]
    rig.run(opening(2), prefill(2, 0, tokens[:10]))
    rig.run(prefill(2, 10, tokens[10:-1]))
    outcome = verified(rig.one(window(2, len(tokens) - 1, tokens[-1], truth[5:7])))
    assert outcome.accepted_count == 2
    assert outcome.bonus_token_id == truth[7]


def test_L5_B1_V9_sessions_of_a_step_share_one_pass_and_keep_their_own_parameters() -> None:
    rig = Rig()
    settings = {1: GREEDY, 2: SAMPLED, 3: Sampling(temperature=5.0, seed=4)}
    prompts = {1: [1, 2], 2: [9, 8, 7], 3: [1, 2]}
    tokens = {s: [*prompts[s], rig.start(s, prompts[s], settings[s])] for s in settings}
    rig.target.passes.clear()
    for _ in range(5):
        items = [window(s, len(t) - 1, t[-1], [0] * s) for s, t in tokens.items()]
        random.Random(2).shuffle(items)
        step = rig.run(*items)
        for item, result in zip(items, step.results, strict=True):
            outcome = verified(result)
            tokens[item.session_id] += [
                *item.draft_token_ids[: outcome.accepted_count],
                outcome.bonus_token_id,
            ]
    assert len(rig.target.passes) == 5
    for s, emitted in tokens.items():
        count = len(emitted) - len(prompts[s])
        assert emitted[len(prompts[s]) :] == continuation(
            rig.target, prompts[s], count, settings[s]
        )


def test_L6_D18_only_committed_rows_become_bytes_and_they_are_counted() -> None:
    rig = Rig()
    bonus = rig.start(1, [1, 2, 3])
    truth = continuation(rig.target, [1, 2, 3], 3)
    assert bonus == truth[0]
    wrong = (truth[2] + 1) % 50
    step = rig.run(window(1, 3, bonus, [truth[1], wrong, 0, 0]))
    assert verified(step.results[0]).accepted_count == 1
    assert step.row_bytes == 2 * 4 * 4


def test_rows_of_bfloat16_travel_as_two_bytes_an_element() -> None:
    rig = Rig(FakeTarget(row_dtype=torch.bfloat16))
    rig.run(opening(1))
    outcome = rig.one(prefill(1, 0, [1, 2], final=True)).outcome
    assert isinstance(outcome, PrefillOutcome)
    assert outcome.rows is not None
    # bfloat16 is the upper half of float32: position 1 and token 2 of the second row.
    upper_halves = struct.pack("<f", 1.0)[2:] + struct.pack("<f", 2.0)[2:]
    assert outcome.rows.data[8:12] == upper_halves
    assert len(outcome.rows.data) == 16


def test_a_session_that_wants_no_rows_gets_none_and_the_target_computes_none() -> None:
    rig = Rig()
    rig.run(opening(1, row_kind=NONE))
    step = rig.run(prefill(1, 0, [1, 2], final=True))
    outcome = step.results[0].outcome
    assert isinstance(outcome, PrefillOutcome)
    assert outcome.rows is None
    assert step.row_bytes == 0
    assert not rig.target.passes[0][0].wants_rows


def test_B8_a_fork_continues_its_prefix_like_a_cold_session_and_outlives_its_source() -> None:
    rig = Rig()
    prompt = [5, 6, 7, 8, 9]
    rig.start(1, prompt)
    assert rig.one(fork(2, 1, 3)).committed_length == 3
    assert rig.one(ReleaseItem(session_id=1)).error is None
    rig.start(3, [40, 41, 42, 43])  # takes the slot that the source had
    other = [5, 6, 7, 20, 21]
    outcome = rig.one(prefill(2, 3, other[3:], final=True)).outcome
    assert isinstance(outcome, PrefillOutcome)
    assert [outcome.bonus_token_id] == continuation(rig.target, other, 1)


def test_a_fork_in_the_step_of_its_source_sees_what_the_step_committed() -> None:
    rig = Rig()
    rig.run(opening(1))
    step = rig.run(prefill(1, 0, [5, 6, 7]), fork(2, 1, 3), prefill(2, 3, [8], final=True))
    assert [result.error for result in step.results] == [None] * 3
    outcome = step.results[2].outcome
    assert isinstance(outcome, PrefillOutcome)
    assert [outcome.bonus_token_id] == continuation(rig.target, [5, 6, 7, 8], 1)


def test_a_release_after_the_items_window_runs_the_window_first() -> None:
    rig = Rig()
    bonus = rig.start(1, [1, 2])
    step = rig.run(
        window(1, 2, bonus), ReleaseItem(session_id=1), opening(2), prefill(2, 0, [3], final=True)
    )
    assert [result.error for result in step.results] == [None] * 4
    assert verified(step.results[0]).bonus_token_id == continuation(rig.target, [1, 2], 2)[1]
    assert rig.engine.used_slot_count == 1


def test_the_context_can_be_filled_exactly_and_not_exceeded() -> None:
    rig = Rig(FakeTarget(max_context_length=16))
    bonus = rig.start(1, list(range(14)))
    error = rig.error(window(1, 14, bonus, [1, 2]))
    assert isinstance(error, ContextFull)
    assert error.metadata == {"value": "17", "expected": "16"}
    result = rig.one(window(1, 14, bonus, [(bonus + 1) % 50]))
    assert result.error is None
    rig.run(opening(2))
    assert isinstance(rig.error(prefill(2, 3, [1])), CommittedLengthMismatch)
    rig.run(prefill(2, 0, [1] * 16))
    assert isinstance(rig.error(prefill(2, 16, [1])), ContextFull)


REFUSED: list[tuple[Item, type[SplitspecError], str]] = [
    (window(1, 4, 50), InvalidArgument, "verify.pending_token_id"),
    (window(1, 4, 1, [1, 2**32 - 1]), InvalidArgument, "verify.draft_token_ids"),
    (window(1, 4, 1, [1] * 8), InvalidArgument, "verify.draft_token_ids count"),
    (prefill(1, 4, [1, 50]), InvalidArgument, "prefill.token_ids"),
    (prefill(1, 4, []), InvalidArgument, "prefill.token_ids count"),
    (prefill(1, 4, [1] * 17), InvalidArgument, "prefill.token_ids count"),
    (window(1, 3, 1), CommittedLengthMismatch, ""),
    (prefill(1, 5, [1]), CommittedLengthMismatch, ""),
    (window(9, 4, 1), SessionNotFound, ""),
    (ReleaseItem(session_id=9), SessionNotFound, ""),
    (opening(1), InvalidArgument, "session"),
    (opening(9, row_kind=FUSED), InvalidArgument, "open.row_kind"),
    (opening(9, row_kind=0), InvalidArgument, "open.row_kind"),
    (fork(9, 8, 1), SessionNotFound, ""),
    (fork(9, 1, 5), InvalidArgument, "fork.length"),
    (RefusedItem(session_id=1, error=InvalidArgument("no")), InvalidArgument, ""),
]


@pytest.mark.parametrize(("item", "kind", "field"), REFUSED)
def test_a_bad_item_fails_alone_and_leaves_its_session_as_it_was(
    item: Item, kind: type[SplitspecError], field: str
) -> None:
    rig = Rig()
    rig.start(1, [1, 2, 3, 4])
    rig.start(2, [4, 3])
    truth = continuation(rig.target, [4, 3], 2)
    step = rig.run(item, window(2, 2, truth[0]))
    bad, good = step.results
    assert isinstance(bad.error, kind)
    assert bad.error.metadata.get("field", "") == field
    assert bad.committed_length == (4 if item.session_id == 1 else 0)
    assert verified(good).bonus_token_id == truth[1]
    assert rig.engine.used_slot_count == 2
    after = continuation(rig.target, [1, 2, 3, 4], 2)
    assert verified(rig.one(window(1, 4, after[0]))).bonus_token_id == after[1]


def test_a_second_model_item_of_a_session_in_a_step_is_refused_and_the_first_stands() -> None:
    rig = Rig()
    bonus = rig.start(1, [1, 2])
    step = rig.run(window(1, 2, bonus), window(1, 2, bonus))
    first, second = step.results
    assert verified(first).bonus_token_id == continuation(rig.target, [1, 2], 2)[1]
    assert isinstance(second.error, InvalidArgument)
    assert second.committed_length == 3


def test_no_free_slot_is_said_and_a_released_slot_serves_again() -> None:
    rig = Rig()
    for session_id in range(1, 5):
        assert rig.one(opening(session_id)).error is None
    error = rig.error(opening(5))
    assert isinstance(error, NoFreeSlot)
    assert error.metadata == {"slots": "4"}
    rig.run(ReleaseItem(session_id=2))
    rig.start(5, [1, 2])
    assert rig.engine.used_slot_count == 4


def test_L7_all_slots_of_a_stream_are_free_after_it_and_others_keep_theirs() -> None:
    rig = Rig()
    rig.start(1, [1])
    rig.start(2, [2])
    other = StreamSessions()
    rig.engine.run_step(other, [opening(1)])
    rig.engine.release_all(rig.stream)
    assert rig.engine.used_slot_count == 1
    assert len(rig.stream) == 0


def test_two_streams_can_use_the_same_session_number() -> None:
    rig = Rig()
    rig.start(1, [1])
    other = StreamSessions()
    step = rig.engine.run_step(other, [opening(1), prefill(1, 0, [9, 9], final=True)])
    outcome = step.results[1].outcome
    assert isinstance(outcome, PrefillOutcome)
    assert [outcome.bonus_token_id] == continuation(rig.target, [9, 9], 1)


def test_a_draining_engine_opens_nothing_and_finishes_what_is_open() -> None:
    rig = Rig()
    bonus = rig.start(1, [1, 2])
    items: list[Item] = [opening(2), fork(3, 1, 1), window(1, 2, bonus)]
    step = rig.engine.run_step(rig.stream, items, draining=True)
    assert isinstance(step.results[0].error, Draining)
    assert isinstance(step.results[1].error, Draining)
    assert step.results[2].error is None


@pytest.mark.parametrize("fault", [RuntimeError("device lost"), MemoryError("no memory")])
def test_a_device_fault_fails_the_engine_for_good(fault: Exception) -> None:
    rig = Rig()
    bonus = rig.start(1, [1, 2])
    rig.target.fault = fault
    with pytest.raises(EngineFailed):
        rig.run(window(1, 2, bonus))
    rig.target.fault = None
    with pytest.raises(EngineFailed):
        rig.run(opening(2))


class Overflowing(FakeTarget):
    """Its logits are NaN wherever the token 13 was run."""

    def step(self, spans: Sequence[Span]) -> list[SpanOutput]:
        outputs = super().step(spans)
        return [
            SpanOutput(logits=o.logits * (float("nan") if 13 in s.token_ids else 1), rows=o.rows)
            for s, o in zip(spans, outputs, strict=True)
        ]


@pytest.mark.parametrize(
    "bad", [window(1, 4, 13), window(1, 4, 1, [2, 13]), prefill(1, 4, [5, 13], final=True)]
)
def test_an_item_whose_logits_are_not_finite_fails_alone_and_changes_nothing(bad: Item) -> None:
    rig = Rig(Overflowing())
    bonus = rig.start(1, [1, 2, 3, 4])
    rig.start(2, [4, 3])
    truth = continuation(rig.target, [4, 3], 2)
    failed, good = rig.run(bad, window(2, 2, truth[0])).results
    assert isinstance(failed.error, NonFiniteLogits)
    assert (failed.committed_length, failed.outcome) == (4, None)
    assert verified(good).bonus_token_id == truth[1]
    # The session goes on where it was, and the engine opens new ones.
    after = continuation(rig.target, [1, 2, 3, 4], 2)
    assert bonus == after[0]
    assert verified(rig.one(window(1, 4, bonus))).bonus_token_id == after[1]
    assert rig.start(3, [9]) == continuation(rig.target, [9], 1)[0]


def test_a_target_whose_warm_up_logits_are_not_finite_is_never_served() -> None:
    rig = Rig()
    rig.target.nan = True
    with pytest.raises(UserError, match="model fake gives logits that are not finite"):
        rig.engine.warm_up()


def test_a_target_that_gives_other_logits_than_asked_for_is_an_engine_failure() -> None:
    class Short(FakeTarget):
        def step(self, spans: Sequence[Span]) -> list[SpanOutput]:
            outputs = super().step(spans)
            return [SpanOutput(logits=o.logits[:0], rows=o.rows) for o in outputs]

    rig = Rig(Short())
    rig.run(opening(1))
    with pytest.raises(EngineFailed):
        rig.run(prefill(1, 0, [1], final=True))


def test_warming_up_leaves_no_session_and_changes_no_token() -> None:
    rig = Rig()
    rig.engine.warm_up()
    assert rig.engine.used_slot_count == 0
    assert [rig.start(1, [1, 2])] == continuation(rig.target, [1, 2], 1)
