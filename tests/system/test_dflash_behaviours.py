"""The behaviours D1-D21 and K1-K7 of a DFlash stack, through three processes where they make sense.

| id | what | as it is here |
|---|---|---|
| D1 | greedy speculative output is plain greedy output | for every K, sampled output too |
| D2 | one target pass and one draft pass a round | whatever K, from both services' counters |
| D3 | after a round c rows are new, those of window rows 0..c-1 | what the drafter is given |
| D4 | draft context and rows on the way make up the target's length | law L2 at every step |
| D5 | what the caller has is the target's position less the queue | no queue: all but pending |
| D6 | the pending token has no K/V and no row yet | its row comes first in the next round |
| D7 | the block: positions, noncausal, alike for every slot, windows | the draft's tests |
| D8 | a stop id among committed tokens ends the answer | accepted, correction and bonus |
| D9 | the context is filled exactly, with narrower windows at its end | and no crash |
| D10 | impossible requests are refused, and the next one is answered | |
| D11 | a suffix after an early stop is answered as if freshly | on the same, only slot |
| D12 | sampling does not change after prefill | no message could: it comes with `open` |
| D13 | a model that failed serves no more until it is reset | the process ends, and is replayed |
| D14 | stop() ends an answer | the client's cancel does |
| D15 | ignore_eos goes on through end tokens | |
| D16 | of a prompt longer than the window the last rows are enough | |
| D17 | no tail of a prompt is too short | there is no least chunk |
| D18 | row bytes a round are committed rows times their width | |
| D19 | K and block lengths out of bounds are refused | |
| D20 | drafts tried and accepted by position; rounds add up | |
| D21 | images | not yet: nothing here takes images |
| K1 | who sees what in the draft's cache | the draft's tests |
| K2 | freed cells are used again | a slot's: nothing of the session before is left |
| K3 | a context that is too long is refused before anything runs | |
| K4 | rewinding, copying | no rewind: only committed rows enter a slot |
| K5 | two layouts of a cache give equal outputs | torch's and the programs' |
| K6 | nothing beyond a context's length is read | |
| K7 | a window survives rejections | at every acceptance length |

The draft is planted (tests/dflash_planted.py): what is accepted is what the test forces.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from splitspec.v1 import drafter_pb2, verifier_pb2
from splitspec.v1 import generation_pb2 as pb
from tests.dflash_planted import (
    BLOCK_SIZE,
    MASK_TOKEN_ID,
    VOCAB_SIZE,
    tokens_of,
    write_planted_draft,
    write_planted_target,
)
from tests.system.cluster import ROOT, Answer, Cluster
from tests.system.conftest import DFLASH_FLAGS, DFLASH_VERIFIER

SYSTEM = "tests/system/test_dflash_{}.py"
HERE = SYSTEM.format("behaviours")
DRAFT = "tests/graph_runtime/dflash/test_{}.py"
PROGRAM = "tests/graph_runtime/programs/test_dflash_program.py"
DRAFTER = "tests/drafter_service/test_dflash_{}.py"
SHOWN = {
    "d1": [SYSTEM.format("lossless")],
    "d2": [SYSTEM.format("counters"), DRAFTER.format("blocks")],
    "d3": [HERE, DRAFTER.format("blocks")],
    "d4": [HERE, DRAFTER.format("blocks")],
    "d5": [HERE],
    "d6": [HERE, DRAFTER.format("blocks")],
    "d7": [DRAFT.format("torch_draft"), DRAFTER.format("choices"), HERE],
    "d8": [HERE],
    "d9": [HERE, SYSTEM.format("lossless")],
    "d10": [HERE],
    "d11": [SYSTEM.format("reuse"), DRAFTER.format("sessions")],
    "d12": [HERE, DRAFTER.format("sessions")],
    "d13": [SYSTEM.format("crashes"), DRAFTER.format("blocks")],
    "d14": [SYSTEM.format("crashes")],
    "d15": [HERE],
    "d16": [SYSTEM.format("lossless"), DRAFT.format("cache_rules"), PROGRAM],
    "d17": [HERE],
    "d18": [SYSTEM.format("counters")],
    "d19": [SYSTEM.format("handshake"), DRAFT.format("torch_draft")],
    "d20": [SYSTEM.format("counters")],
    "k1": [DRAFT.format("torch_draft"), PROGRAM],
    "k2": [SYSTEM.format("reuse"), DRAFT.format("cache_rules")],
    "k3": [DRAFT.format("cache_rules")],
    "k4": [DRAFT.format("cache_rules")],
    "k5": [PROGRAM],
    "k6": [DRAFT.format("cache_rules")],
    "k7": [SYSTEM.format("counters"), DRAFT.format("cache_rules"), PROGRAM],
}
"""Id -> files that have a test which names it. D21 waits."""
CONTEXT = 128
ALL_RIGHT = 7
PROMPT = random.Random(1).sample(range(3, VOCAB_SIZE), 12)
TOKENS = 1 + 48
"""The prefill bonus and whole rounds for K + 1 of 2, 3, 4, 6 and 8."""
K_AND_FORCED = [(k, a) for k in (1, 4, 7) for a in range(k + 1)]


@dataclass
class Served:
    """The running cluster, and what the target alone says after PROMPT."""

    cluster: Cluster
    truth: list[int]
    target: Path

    def ask(self, drafter: str = "planted", prompt: list[int] = PROMPT, **fields: Any) -> Answer:
        """Answer a prompt through a drafter; all draft tokens stay as they are."""
        fields = {"sampling": {"seed": ALL_RIGHT}, **fields}
        ids = pb.TokenIds(ids=prompt)
        return self.cluster.generate(f"coordinator-{drafter}", token_ids=ids, **fields)

    def forced(self, draft_count: int, right: int, **fields: Any) -> Answer:
        """Answer PROMPT with at most `right` draft tokens of a round left as they are."""
        return self.ask(sampling={"seed": right}, draft_count=draft_count, **fields)

    def steps(self) -> list[list[dict[str, Any]]]:
        """Return the steps that the drafter has written down since the last call."""
        report = self.cluster.folder / "planted.jsonl"
        lines = report.read_text().splitlines()
        report.write_text("")
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, program_cache: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("b")
    target = write_planted_target(folder / "target")
    draft = write_planted_draft(folder / "draft")
    cluster = Cluster(folder, target, [*DFLASH_VERIFIER, "--fuse-for", str(draft)], program_cache)
    try:
        cluster.start_verifier(wait=False)
        flags = [*DFLASH_FLAGS, "--rows", "fused"]
        cluster.start_dflash("planted", draft, *flags, variant="forced", wait=False)
        cluster.wait_all_serving()
        cluster.start_coordinator("planted", "--draft-seconds", "60", wait=False)
        cluster.start_coordinator(None, wait=False)
        cluster.wait_all_serving()
        one = Served(cluster, [], target)
        one.truth = one.ask("target", max_tokens=TOKENS, draft_count=0).token_ids
        yield one
    finally:
        cluster.close()


@pytest.mark.parametrize(("draft_count", "right"), K_AND_FORCED)
def test_d3_d4_d5_d6_a_round_brings_the_rows_of_pending_and_accepted_tokens_and_no_other(
    served: Served, draft_count: int, right: int
) -> None:
    served.steps()
    rounds = 3
    # Two tokens more, so that no round of these is cut short.
    answer = served.forced(draft_count, right, max_tokens=1 + rounds * (right + 1) + ALL_RIGHT + 1)
    text = [*PROMPT, *answer.token_ids]
    works = [work for step in served.steps() for work in step]
    # The prompt's rows come as they commit, in an item that drafts nothing.
    assert [work["draft_count"] for work in works[: rounds + 1]] == [0] + [draft_count] * rounds
    committed = len(PROMPT)
    assert works[0]["start"] == 0
    assert tokens_of(works[0]["features"]) == PROMPT
    for done, work in enumerate(works[1 : rounds + 1]):
        assert work["start"] == committed
        committed = len(PROMPT) + done * (right + 1)
        # D3, D6: rejected tokens' rows never come, the pending token's not yet.
        assert tokens_of(work["features"]) == text[work["start"] : committed]
        # D4 (L2): nothing is on the way. D5: everything that was emitted is known, pending too.
        assert work["start"] + len(work["features"]) == committed
        assert work["pending_token_id"] == text[committed]


def first_seen(truth: list[int], draft_count: int, right: int, offset: int) -> int:
    """Return an index into the answer, `offset` into a late round, whose token is new there."""
    period = min(draft_count, right) + 1
    candidates = range(1 + offset, len(truth), period)
    new = [i for i in candidates if truth[i] not in truth[:i]]
    return new[min(2, len(new) - 1)]


@pytest.mark.parametrize("draft_count", range(1, 8))
def test_d8_an_accepted_draft_token_that_is_a_stop_id_ends_the_output(
    served: Served, draft_count: int
) -> None:
    for offset in range(draft_count):
        end = first_seen(served.truth, draft_count, ALL_RIGHT, offset)
        answer = served.ask(draft_count=draft_count, stop_token_ids=[served.truth[end]])
        assert answer.token_ids == served.truth[: end + 1]
        assert answer.finish.reason == pb.FINISH_REASON_STOP
        assert answer.finish.statistics.round_count == (end - 1) // (draft_count + 1) + 1


@pytest.mark.parametrize("draft_count", [1, 4, 7])
def test_d8_a_correction_or_bonus_that_is_a_stop_id_ends_the_output(
    served: Served, draft_count: int
) -> None:
    for right in range(draft_count + 1):
        end = first_seen(served.truth, draft_count, right, right)
        stops = [served.truth[end]]
        answer = served.forced(draft_count, right, stop_token_ids=stops, max_tokens=TOKENS)
        assert answer.token_ids == served.truth[: end + 1]
        assert answer.finish.reason == pb.FINISH_REASON_STOP
        assert answer.finish.statistics.round_count == end // (right + 1)


@pytest.mark.parametrize("draft_count", [1, 4, 7])
@pytest.mark.parametrize("room", [1, 2, 5, 8, 9])
def test_d9_no_context_position_of_the_draft_lies_beyond_the_end(
    served: Served, draft_count: int, room: int
) -> None:
    prompt = random.Random(room).choices(range(3, VOCAB_SIZE), k=CONTEXT - room)
    truth = served.ask("target", prompt, draft_count=0).token_ids
    assert len(truth) == room
    served.steps()
    answer = served.ask(prompt=prompt, draft_count=draft_count)
    assert answer.token_ids == truth
    assert answer.finish.reason == pb.FINISH_REASON_LENGTH
    works = [work for step in served.steps() for work in step]
    # The last token of the context is at CONTEXT - 1: it never commits, nor is it drafted after.
    for work in works:
        committed = work["start"] + len(work["features"])
        assert committed + work["draft_count"] < CONTEXT


def test_d9_d10_a_request_that_cannot_be_is_refused_and_the_next_one_is_answered(
    served: Served,
) -> None:
    for fields in (
        {"prompt": [5] * (CONTEXT + 1)},
        {"prompt": []},
        {"prompt": [VOCAB_SIZE]},
        {"sampling": {"temperature": -0.5}},
        {"sampling": {"top_p": 1.5}},
        {"draft_count": 64},
    ):
        with pytest.raises(grpc.RpcError) as caught:
            served.ask(**fields)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        answer = served.ask(max_tokens=17, draft_count=7)
        assert answer.token_ids == served.truth[:17]
        assert list(answer.finish.statistics.acceptance_length_counts) == [0] * 7 + [2]


def test_d12_sampling_comes_with_a_sessions_opening_and_with_no_later_message() -> None:
    def names(message: Any) -> set[str]:
        return {field.name for field in message.DESCRIPTOR.fields}

    assert "sampling" in names(drafter_pb2.OpenDraftSession)
    assert "sampling" in names(verifier_pb2.OpenSession)
    for later in (drafter_pb2.Draft, verifier_pb2.PrefillChunk, verifier_pb2.VerifyWindow):
        assert not names(later) & {"sampling", "temperature", "seed", "top_p", "top_k"}


def test_d15_an_end_token_ends_the_output_unless_it_is_to_be_ignored(served: Served) -> None:
    end = first_seen(served.truth, 3, ALL_RIGHT, 1)
    model = served.cluster.folder / "ending"
    shutil.copytree(served.target, model)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((model / name).read_text())
        settings["eos_token_id"] = served.truth[end]
        (model / name).write_text(json.dumps(settings))
    cluster = served.cluster
    # The last --model counts: only the coordinator knows of end tokens.
    cluster.start_coordinator("planted", "--model", str(model), name="coordinator-ending")
    stopped, ignored = (
        served.ask("ending", draft_count=3, max_tokens=TOKENS, ignore_eos=ignore)
        for ignore in (False, True)
    )
    cluster.kill("coordinator-ending")
    del cluster.commands["coordinator-ending"]
    assert stopped.token_ids == served.truth[: end + 1]
    assert stopped.finish.reason == pb.FINISH_REASON_STOP
    assert ignored.token_ids == served.truth
    assert list(ignored.finish.statistics.acceptance_length_counts) == [0] * 3 + [12]


@pytest.mark.parametrize("length", [31, 32, 33, 34, 35, 36, 37, 64, 65])
def test_d17_a_prompt_may_end_anywhere_in_a_prefill_chunk(served: Served, length: int) -> None:
    prompt = random.Random(length).choices(range(3, VOCAB_SIZE), k=length)
    answer = served.ask(prompt=prompt, draft_count=7, max_tokens=17)
    assert answer.token_ids == served.ask("target", prompt, max_tokens=17).token_ids
    # The first block looks at the prompt's last rows: none is missing or another's.
    assert list(answer.finish.statistics.acceptance_length_counts) == [0] * 7 + [2]


def test_d7_tokens_of_a_text_that_are_the_masks_id_are_tokens_like_others(served: Served) -> None:
    prompt = [MASK_TOKEN_ID, 7, MASK_TOKEN_ID, MASK_TOKEN_ID, 90, 91, 92, MASK_TOKEN_ID]
    for length in range(1, len(prompt) + 1):
        some = prompt[:length]
        answer = served.ask(prompt=some, draft_count=BLOCK_SIZE - 1, max_tokens=17)
        assert answer.token_ids == served.ask("target", some, max_tokens=17).token_ids
        assert list(answer.finish.statistics.acceptance_length_counts) == [0] * 7 + [2]


def test_every_behaviour_has_a_test_that_names_it() -> None:
    assert list(SHOWN) == [*(f"d{n}" for n in range(1, 21)), *(f"k{n}" for n in range(1, 8))]
    names = {
        file: re.findall(r"def (test_\w+)", (ROOT / file).read_text())
        for file in {file for files in SHOWN.values() for file in files}
    }
    for behaviour, files in SHOWN.items():
        for file in files:
            assert any(behaviour in name.split("_") for name in names[file]), (behaviour, file)
