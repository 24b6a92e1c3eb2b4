"""The behaviours E1-E23 of an EAGLE-3 stack, through three processes where they make sense there.

| id | what | where it is shown |
|---|---|---|
| E1 | greedy speculative output is plain greedy output, K 1..7 | test_eagle3_lossless |
| E2 | all forced proposals correct: a = K | here |
| E3 | a of K correct, for every 0 < a < K | here |
| E4 | all wrong: a = 0, tau = 1 | here |
| E5 | an accepted proposal that is a stop id ends the answer | here |
| E6 | so does a correction, and a bonus | here |
| E7 | and the prefill bonus, with no draft pass and no window | here |
| E8 | max_tokens 1: the prefill bonus only, no draft pass | here |
| E9 | no tokens asked for: an error | the runner of programs, and the coordinator's requests |
| E10 | the budget is met exactly inside a round | here |
| E11 | a prompt outside the prefill chunk's range | the runner of programs |
| E12 | metadata that is missing is named | the runner of programs |
| E13 | nothing beyond the context is ever written | here |
| E14 | one target pass a round, K draft passes a round | here, and test_eagle3_counters |
| E15 | slot p has feature p and token p + 1 | here, and the drafter's tests |
| E16 | after a round positions P..P+a are seeded with rows 0..a | here, and test_eagle3_lossless |
| E17 | d2t stays inside the vocabulary | the checkpoint's tests |
| E18 | a head without embeddings, norm_before_fc: taken, not refused | the checkpoint's tests |
| E19 | tap numbering; invalid lists refused | the checkpoint's tests |
| E20 | the draft cache's rules | the draft's tests |
| E21 | tau = (emitted - 1) / rounds, 0 without rounds | here |
| E22 | a used server answers like a fresh one | test_eagle3_crashes |
| E23 | export constraints | the speculator program's tests |

The head copies the target (tests/eagle3_copy.py): what is accepted is what the test forces.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from splitspec.v1 import generation_pb2 as pb
from tests.eagle3_copy import VOCAB_SIZE, write_copy_head, write_copy_target
from tests.system.cluster import ROOT, Answer, Cluster, free_address, scrape, wait_until
from tests.system.conftest import EAGLE3_FLAGS, EAGLE3_VERIFIER

CONTEXT = 128
ALL_RIGHT = 7
PROMPT = random.Random(1).sample(range(3, VOCAB_SIZE), 12)
TOKENS = 1 + 48
"""The prefill bonus and whole rounds for K + 1 of 2, 3, 4, 6 and 8."""
K_AND_FORCED = [(k, a) for k in range(1, 8) for a in range(k + 1)]


@dataclass
class Served:
    """The running cluster, what the target alone says after PROMPT, and the pass counters."""

    cluster: Cluster
    truth: list[int]
    target: Path
    verifier_metrics: str
    drafter_metrics: str

    def ask(self, drafter: str = "fused", prompt: list[int] = PROMPT, **fields: Any) -> Answer:
        """Answer a prompt through a drafter."""
        ids = pb.TokenIds(ids=prompt)
        return self.cluster.generate(f"coordinator-{drafter}", token_ids=ids, **fields)

    def forced(self, draft_count: int, right: int, **fields: Any) -> Answer:
        """Answer PROMPT with at most `right` draft tokens of a round left as they are."""
        return self.ask("forced", sampling={"seed": right}, draft_count=draft_count, **fields)

    def counts(self) -> dict[str, float]:
        """Return the verifier's counters, and the draft passes of the drafter "fused"."""

        def idle() -> bool:
            # Nobody waits for an extend: it has run once its session has gone.
            return scrape(self.drafter_metrics)["slots_in_use"] == 0

        wait_until(idle, "the drafter's slots are free")
        passes = scrape(self.drafter_metrics)["draft_passes_total"]
        return {**scrape(self.verifier_metrics), "draft_passes_total": passes}

    def passes(self) -> list[list[dict[str, Any]]]:
        """Return the passes that the drafter "forced" has written down since the last call."""
        report = self.cluster.folder / "forced.jsonl"
        lines = report.read_text().splitlines()
        report.write_text("")
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, program_cache: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("b")
    target, head = write_copy_target(folder / "target"), write_copy_head(folder / "head")
    metrics = {name: free_address() for name in ("verifier", "fused")}
    flags = [*EAGLE3_VERIFIER, "--fuse-for", str(head), "--metrics-address", metrics["verifier"]]
    cluster = Cluster(folder, target, flags, program_cache)
    try:
        cluster.start_verifier(wait=False)
        fused, raw = ([*EAGLE3_FLAGS, "--rows", rows] for rows in ("fused", "raw"))
        cluster.start_eagle3(
            "fused", head, *fused, "--metrics-address", metrics["fused"], wait=False
        )
        cluster.start_eagle3("raw", head, *raw, wait=False)
        cluster.start_eagle3("forced", head, *fused, variant="forced", wait=False)
        cluster.wait_all_serving()
        for drafter in ("fused", "raw", "forced"):
            cluster.start_coordinator(drafter, "--draft-seconds", "60", wait=False)
        cluster.start_coordinator(None, wait=False)
        cluster.wait_all_serving()
        one = Served(cluster, [], target, metrics["verifier"], metrics["fused"])
        one.truth = one.ask("target", max_tokens=TOKENS, draft_count=0).token_ids
        yield one
    finally:
        cluster.close()


def rise(before: dict[str, float], after: dict[str, float], name: str) -> int:
    """Return what a counter has grown by."""
    return int(after.get(name, 0.0) - before.get(name, 0.0))


@pytest.mark.parametrize("draft_count", range(1, 8))
def test_e2_e3_e4_each_round_accepts_what_is_forced_and_the_output_is_the_targets(
    served: Served, draft_count: int
) -> None:
    def run(right: int) -> Answer:
        rounds = (TOKENS - 1) // (right + 1)
        return served.forced(draft_count, right, max_tokens=1 + rounds * (right + 1))

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(run, range(draft_count + 1)))
    for right, answer in enumerate(answers):
        rounds = (TOKENS - 1) // (right + 1)
        assert answer.token_ids == served.truth[: 1 + rounds * (right + 1)]
        statistics = answer.finish.statistics
        assert list(statistics.acceptance_length_counts) == [0] * right + [rounds]
        left = [rounds * (right + 1) - done * (right + 1) for done in range(rounds)]
        assert statistics.draft_token_count == sum(min(draft_count, n - 1) for n in left)


def first_seen(truth: list[int], draft_count: int, right: int, offset: int) -> int:
    """Return an index into the answer, `offset` into a late round, whose token is new there."""
    period = min(draft_count, right) + 1
    candidates = range(1 + offset, len(truth), period)
    new = [i for i in candidates if truth[i] not in truth[:i]]
    return new[min(2, len(new) - 1)]


@pytest.mark.parametrize("draft_count", range(1, 8))
def test_e5_an_accepted_draft_token_that_is_a_stop_id_ends_the_output(
    served: Served, draft_count: int
) -> None:
    for offset in range(draft_count):
        end = first_seen(served.truth, draft_count, ALL_RIGHT, offset)
        answer = served.ask(draft_count=draft_count, stop_token_ids=[served.truth[end]])
        assert answer.token_ids == served.truth[: end + 1]
        assert answer.finish.reason == pb.FINISH_REASON_STOP
        statistics = answer.finish.statistics
        assert statistics.round_count == (end - 1) // (draft_count + 1) + 1


@pytest.mark.parametrize(("draft_count", "right"), K_AND_FORCED)
def test_e6_a_correction_or_bonus_that_is_a_stop_id_ends_the_output(
    served: Served, draft_count: int, right: int
) -> None:
    end = first_seen(served.truth, draft_count, right, right)
    stops = [served.truth[end]]
    answer = served.forced(draft_count, right, stop_token_ids=stops, max_tokens=TOKENS)
    assert answer.token_ids == served.truth[: end + 1]
    assert answer.finish.reason == pb.FINISH_REASON_STOP
    assert answer.finish.statistics.round_count == end // (right + 1)


@pytest.mark.parametrize("draft_count", [1, 7])
def test_e7_e8_e21_a_prefill_bonus_that_ends_the_answer_costs_one_target_pass_and_no_draft_pass(
    served: Served, draft_count: int
) -> None:
    bonus = served.truth[0]
    for ends, reason in (
        ({"stop_token_ids": [bonus]}, pb.FINISH_REASON_STOP),
        ({"max_tokens": 1}, pb.FINISH_REASON_LENGTH),
    ):
        before = served.counts()
        answer = served.ask(draft_count=draft_count, **ends)
        after = served.counts()
        assert (answer.token_ids, answer.finish.reason) == ([bonus], reason)
        assert rise(before, after, "target_passes_total") == 1
        assert rise(before, after, "draft_passes_total") == 0
        assert answer.finish.statistics.round_count == 0
        assert answer.finish.statistics.mean_acceptance_length == 0.0


@pytest.mark.parametrize("draft_count", range(1, 8))
def test_e10_e21_the_budget_is_met_exactly_wherever_in_a_round_it_ends(
    served: Served, draft_count: int
) -> None:
    for most in range(1, 2 * draft_count + 4):
        answer = served.ask(draft_count=draft_count, max_tokens=most)
        assert answer.token_ids == served.truth[:most]
        assert answer.finish.reason == pb.FINISH_REASON_LENGTH
        statistics = answer.finish.statistics
        tau = (most - 1) / statistics.round_count if most > 1 else 0.0
        assert statistics.mean_acceptance_length == pytest.approx(tau)


@pytest.mark.parametrize("draft_count", [1, 4, 7])
@pytest.mark.parametrize("room", [1, 2, 5, 8, 9])
def test_e13_the_context_is_filled_to_its_end_and_no_draft_slot_lies_beyond_it(
    served: Served, draft_count: int, room: int
) -> None:
    prompt = random.Random(room).choices(range(3, VOCAB_SIZE), k=CONTEXT - room)
    truth = served.ask("target", prompt, draft_count=0).token_ids
    assert len(truth) == room
    served.passes()
    answer = served.ask("forced", prompt, draft_count=draft_count, sampling={"seed": ALL_RIGHT})
    assert answer.token_ids == truth
    assert answer.finish.reason == pb.FINISH_REASON_LENGTH
    ends = [s["start"] + len(s["token_ids"]) for one in served.passes() for s in one]
    # Slot p has the token of p + 1, and the last token of the context is at CONTEXT - 1.
    assert max(ends, default=0) < CONTEXT


@pytest.mark.parametrize("draft_count", range(1, 8))
def test_e14_l5_one_target_pass_a_round_and_k_draft_passes_a_round_and_no_window_of_one_row(
    served: Served, draft_count: int
) -> None:
    rounds = (TOKENS - 1) // (draft_count + 1)
    before = served.counts()
    answer = served.ask(draft_count=draft_count, max_tokens=1 + rounds * (draft_count + 1))
    after = served.counts()
    assert answer.finish.statistics.round_count == rounds
    assert rise(before, after, "target_passes_total") == 1 + rounds
    assert rise(before, after, "draft_passes_total") == draft_count * rounds
    narrower, whole = (
        rise(before, after, f'window_rows_bucket{{le="{rows}.0"}}')
        for rows in (draft_count, draft_count + 1)
    )
    assert (narrower, whole) == (0, rounds)


@pytest.mark.parametrize("draft_count", [1, 2, 7])
def test_e14_l5_the_only_window_of_one_row_is_the_one_for_a_last_token(
    served: Served, draft_count: int
) -> None:
    # To the budget's end, then to the context's: a token is left over after whole rounds.
    whole = 2 * (draft_count + 1)
    long_prompt = random.Random(2).choices(range(3, VOCAB_SIZE), k=CONTEXT - 1 - whole - 1)
    chunks = -(-len(long_prompt) // 32)
    for prompt, most, chunk_count in (
        (PROMPT, 1 + whole + 1, 1),
        (long_prompt, None, chunks),
    ):
        before = served.counts()
        answer = served.ask(prompt=prompt, draft_count=draft_count, max_tokens=most)
        after = served.counts()
        assert len(answer.token_ids) == 1 + whole + 1
        assert answer.finish.statistics.draft_token_count == 2 * draft_count
        assert rise(before, after, "target_passes_total") == chunk_count + 3
        assert rise(before, after, 'window_rows_bucket{le="1.0"}') == 1
        # A prompt's last chunk waits for the bonus: a prompt of one chunk has no pass of its own.
        seeds = chunk_count - 1
        assert rise(before, after, "draft_passes_total") == seeds + 2 * draft_count


def tokens_of(features: list[list[float]], target: Path) -> list[int | None]:
    """Return the token that each feature is a target's row of; None for the draft's own ones."""
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"][:, :24]
    parts = torch.tensor(features)[:, 48:72]
    return [int((table @ part).argmax()) if part.norm() > 1.0 else None for part in parts]


@pytest.mark.parametrize(("draft_count", "right"), K_AND_FORCED)
def test_e15_e16_seeds_are_features_p_with_tokens_p_plus_1_of_rows_0_to_a_only(
    served: Served, draft_count: int, right: int
) -> None:
    served.passes()
    rounds = 3
    # Two tokens more, so that no round of these is cut short.
    answer = served.forced(draft_count, right, max_tokens=1 + rounds * (right + 1) + ALL_RIGHT + 1)
    text = [*PROMPT, *answer.token_ids]
    passes = served.passes()[: rounds * draft_count]
    starts = [0, *(len(PROMPT) + done * (right + 1) for done in range(rounds))]
    for done in range(rounds):
        seed, *chain = passes[done * draft_count : (done + 1) * draft_count]
        (span,) = seed
        begin, end = starts[done], starts[done + 1]
        assert (span["start"], len(span["token_ids"])) == (begin, end - begin)
        assert span["token_ids"] == text[begin + 1 : end + 1]
        assert tokens_of(span["features"], served.target) == text[begin:end]
        for step, (one,) in enumerate(chain):
            assert (one["start"], len(one["token_ids"])) == (end + step, 1)
            assert tokens_of(one["features"], served.target) == [None]


def test_every_behaviour_has_a_test_that_names_it() -> None:
    sources = [file.read_text() for file in (ROOT / "tests").rglob("test_*.py")]
    names = "\n".join(re.findall(r"def (test_\w+)", "\n".join(sources)))
    named = {int(number) for number in re.findall(r"(?<=_)e(\d+)(?=_|$)", names, re.MULTILINE)}
    assert set(range(1, 24)) - named == set()
