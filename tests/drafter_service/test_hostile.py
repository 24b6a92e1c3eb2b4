"""2,000 malformed or hostile messages leave the service healthy and others' drafts unchanged."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from drafter_service.drafter import Drafter
from splitspec.probe import peer_health
from splitspec.rows import RowFormat, encode_rows
from splitspec.v1 import drafter_pb2 as pb
from splitspec.v1 import rows_pb2
from tests.drafter_service import block_drafts
from tests.drafter_service.served import Served, Stream, draft, opened, serving_drafter
from tests.drafters import RowsDrafter

MESSAGES = 2000
TAPS = RowFormat(kind=rows_pb2.ROW_KIND_RAW_TAPS, dtype=rows_pb2.ROW_DTYPE_FLOAT32, width=4)
PROMPT = [1, 2, 3]
ANSWER = list(range(4, 250))
ALLOWED = {"INVALID_ARGUMENT", "COMMITTED_LENGTH_MISMATCH", "SESSION_NOT_FOUND", "NO_FREE_SLOT"}
ALLOWED |= {"CONTEXT_FULL"}
Dice = random.Random
Truth = Callable[[int, int, int], list[int]]
"""(context length, pending token id, K) -> the drafts of a session whose rows are zeros."""


def _rows(start: int, count: int) -> rows_pb2.Rows:
    return encode_rows(TAPS, start, bytes(count * TAPS.row_bytes))


def _wild(dice: Dice) -> int:
    return dice.choice([0, 1, 7, 8, 2**16, 2**31 - 1, 2**31, 2**32 - 1, dice.getrandbits(32)])


def _wrong_length(dice: Dice) -> pb.DraftItem:
    length = _wild(dice) or 5
    return draft(1, length, [1, 2], pending=3, count=2, rows=_rows(length % 2**20, 2))


def _huge_count(dice: Dice) -> pb.DraftItem:
    return draft(1, 0, [1], pending=2, count=dice.randint(8, 2**32 - 1), rows=_rows(0, 1))


def _bad_ids(dice: Dice) -> pb.DraftItem:
    ids = [dice.randint(2**31, 2**32 - 1) for _ in range(dice.randint(1, 50))]
    return draft(1, 0, ids, pending=dice.choice(ids), count=1, rows=_rows(0, len(ids)))


def _bad_rows(dice: Dice) -> pb.DraftItem:
    fields: dict[str, Any] = {name: _wild(dice) for name in ("width", "start", "count")}
    fields |= {name: _wild(dice) % 9 for name in ("kind", "dtype")}
    rows = rows_pb2.Rows(**fields, inline=dice.randbytes(dice.randint(0, 64)))
    return draft(1, 0, [1, 2], pending=3, count=2, rows=rows)


def _truncated_rows(dice: Dice) -> pb.DraftItem:
    rows = _rows(0, 2)
    rows.inline = rows.inline[: dice.randint(0, len(rows.inline) - 1)]
    return draft(1, 0, [1, 2], pending=3, count=2, rows=rows)


def _shared_memory(dice: Dice) -> pb.DraftItem:
    rows = _rows(0, 1)
    rows.shared_memory.name = dice.choice(["../../etc/passwd", "", "x" * 10_000])
    rows.shared_memory.length_bytes = 2**64 - 1
    return draft(1, 0, [1], rows=rows)


def _unknown_session(dice: Dice) -> pb.DraftItem:
    session = dice.choice([2, 2**63, 2**64 - 1])
    return draft(session, 0, [1], pending=2, count=1, rows=_rows(0, 1))


def _unset(dice: Dice) -> pb.DraftItem:
    return dice.choice(
        [
            pb.DraftItem(),
            pb.DraftItem(session=1),
            pb.DraftItem(session=1, context_length=0),
            pb.DraftItem(session=1, draft=pb.Draft(draft_count=1)),
            pb.DraftItem(session=0, context_length=0, open={}),
            draft(1, 0, [], count=3),
        ]
    )


def _bad_open(dice: Dice) -> pb.DraftItem:
    sampling: dict[str, Any] = dice.choice(
        [
            {"temperature": float("nan")},
            {"temperature": -1.0},
            {"temperature": 1.0},
            {"top_p": -0.0},
            {"repetition_penalty": 1.1},
            {"logit_bias": {i: 1.0 for i in range(300)}},
        ]
    )
    return opened(dice.choice([1, 3]), sampling=sampling)


def _again(dice: Dice) -> pb.DraftItem:
    del dice
    return opened(1)


def _future_field(dice: Dice) -> pb.DraftItem:
    item = draft(1, 0, [1], rows=_rows(0, 1))
    item.draft.MergeFromString(bytes([dice.choice([0x28, 0x30, 0x78]), dice.randint(0, 127)]))
    return item


MAKERS: list[Callable[[Dice], pb.DraftItem]] = [
    _wrong_length,
    _huge_count,
    _bad_ids,
    _bad_rows,
    _truncated_rows,
    _shared_memory,
    _unknown_session,
    _unset,
    _bad_open,
    _again,
    _future_field,
]


def _oracle() -> tuple[Drafter, Truth]:
    drafter = RowsDrafter([(PROMPT, ANSWER)], row_format=TAPS, tap_layers=(1,), instant=True)

    def truth(context_length: int, pending: int, count: int) -> list[int]:
        del pending
        return (PROMPT + ANSWER)[context_length + 1 : context_length + 1 + count]

    return drafter, truth


def _dflash() -> tuple[Drafter, Truth]:
    draft = block_drafts.RecordingDraft(slot_count=64, max_context_length=65_536)
    feature = [*[0.0] * TAPS.width, block_drafts.FUSED_BY_US]

    def truth(context_length: int, pending: int, count: int) -> list[int]:
        return block_drafts.foretold_of([feature] * context_length, pending, count)

    return block_drafts.drafter(draft), truth


DRAFTERS = {"oracle": _oracle, "dflash": _dflash}


class Witness:
    """A well-behaved session on a stream of its own."""

    def __init__(self, stream: Stream, truth: Truth) -> None:
        self._stream = stream
        self._truth = truth
        self._length = 0
        self._tokens = PROMPT + ANSWER

    async def round(self) -> None:
        """Commit one token and check that the drafts are the true ones."""
        start, end = self._length, max(len(PROMPT), self._length + 1)
        item = draft(
            9,
            start,
            self._tokens[start:end],
            pending=self._tokens[end],
            count=5,
            rows=_rows(start, end - start),
        )
        (result,) = (await self._stream.step(item)).results
        assert not result.HasField("error"), result.error
        assert result.context_length == end
        assert list(result.draft.draft_token_ids) == self._truth(end, self._tokens[end], 5)
        self._length = end


async def _send_hostile_items(served: Served, dice: Dice, count: int, truth: Truth) -> None:
    """Send `count` messages with hostile items on one stream; each item must fail by itself."""
    stream = served.stream()
    await stream.step(opened(1))
    for _ in range(count):
        items = [dice.choice(MAKERS)(dice) for _ in range(dice.randint(1, 4))]
        reply = await stream.step(*items)
        for item, result in zip(items, reply.results, strict=True):
            assert result.error.reason in ALLOWED, (item, result)
            assert result.context_length == 0
    # The stream's own session is as it was, too.
    reply = await stream.step(draft(1, 0, [1, 2, 3], pending=4, count=2, rows=_rows(0, 3)))
    assert list(reply.results[0].draft.draft_token_ids) == truth(3, 4, 2)
    await stream.finish()


async def _send_hostile_bytes(served: Served, dice: Dice) -> None:
    """Send what is no message, or ends in its middle; it costs its sender the stream."""
    good = pb.DrafterRunStepsRequest(
        step=1, items=[opened(1), draft(1, 0, [1, 2, 3], rows=_rows(0, 3))]
    ).SerializeToString()
    # NOTE: a cut between two fields of the outermost message leaves a valid, shorter one.
    data = dice.choice([good[: dice.randint(5, len(good) - 1)], dice.randbytes(60) + b"\xff"])
    call = served.channel.stream_stream(
        "/splitspec.v1.Drafter/RunSteps",
        response_deserializer=pb.DrafterRunStepsResponse.FromString,
    )()
    await call.write(data)
    async with asyncio.timeout(20):
        with suppress(grpc.aio.AioRpcError):
            await call.read()
            await call.done_writing()
        assert await call.code() in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", DRAFTERS)
async def test_two_thousand_hostile_messages_leave_the_drafter_healthy(
    tmp_path: Path, kind: str, seed: int
) -> None:
    dice = random.Random(seed)
    drafter, truth = DRAFTERS[kind]()
    async with serving_drafter(drafter, tmp_path) as served:
        witness = served.stream()
        await witness.step(opened(9))
        session = Witness(witness, truth)
        for _ in range(MESSAGES // 4 // 25):
            await _send_hostile_items(served, dice, 20, truth)
            for _ in range(5):
                await _send_hostile_bytes(served, dice)
            await session.round()
        assert await peer_health(served.address, "splitspec.v1.Drafter") == "SERVING"
        async with asyncio.timeout(5):
            while await served.free_slot_count() < 63:  # L7: only the witness holds a slot
                await asyncio.sleep(0.01)
        await session.round()
