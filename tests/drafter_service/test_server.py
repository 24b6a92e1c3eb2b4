"""The Drafter service over real gRPC on a unix socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from drafter_service.drafter import DraftWork
from drafter_service.server import DrafterServicer
from splitspec import serving
from splitspec.errors import Draining, EngineFailed, InvalidArgument, NotReady
from splitspec.metrics import new_registry
from splitspec.rows import RowFormat, encode_rows
from splitspec.telemetry import OFF, SPAN_DRAFT, SPAN_DRAFTER_STEP, setup_tracing
from splitspec.v1 import drafter_pb2 as pb
from splitspec.v1 import rows_pb2
from tests.drafter_service.served import (
    LIMIT_SECONDS,
    draft,
    ngram,
    opened,
    released,
    serving_drafter,
)
from tests.drafters import OracleDrafter, RowsDrafter

TRUTH = [([1, 2], [3, 4, 5, 6, 7, 8])]


async def test_a_session_is_opened_extended_drafted_for_and_released(tmp_path: Path) -> None:
    async with serving_drafter(ngram(), tmp_path) as served:
        info = await served.stub.GetModel(pb.DrafterGetModelRequest())
        assert (info.method, info.max_draft_count, info.slot_count) == ("ngram", 7, 64)
        assert info.row_kind == rows_pb2.ROW_KIND_NONE
        stream = served.stream()
        await stream.step(opened(5))
        reply = await stream.step(draft(5, 0, [1, 2, 3], pending=1, count=4))
        assert reply.results[0].context_length == 3
        assert reply.results[0].draft.draft_token_ids == [2, 3, 1, 2]
        assert reply.timings.device.ToNanoseconds() > 0
        assert reply.timings.queue.ToNanoseconds() > 0
        reply = await stream.step(draft(5, 3, [1, 2], pending=9, count=4))
        assert reply.results[0].context_length == 5
        assert reply.results[0].WhichOneof("result") == "draft"
        assert reply.results[0].draft.draft_token_ids == []
        reply = await stream.step(released(5), draft(5, 5, [9]))
        assert reply.results[0].WhichOneof("result") is None
        assert reply.results[1].error.reason == "SESSION_NOT_FOUND"
        await stream.finish()


async def test_one_bad_item_of_a_step_fails_alone(tmp_path: Path) -> None:
    async with serving_drafter(ngram(slot_count=2), tmp_path) as served:
        stream = served.stream()
        reply = await stream.step(opened(1), opened(2), opened(3), opened(1))
        errors = [result.error.reason for result in reply.results]
        assert errors == ["", "", "NO_FREE_SLOT", "INVALID_ARGUMENT"]
        assert reply.results[2].error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        reply = await stream.step(
            draft(1, 4, [1]),
            draft(2, 0, [1, 2, 1], pending=2, count=2),
            draft(7, 0, [1]),
        )
        mismatch, good, unknown = reply.results
        assert mismatch.error.reason == "COMMITTED_LENGTH_MISMATCH"
        assert mismatch.error.metadata == {"value": "4", "expected": "0"}
        assert good.draft.draft_token_ids == [1, 2]
        assert unknown.error.code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_steps_that_do_not_increase_end_the_stream_and_free_its_slots(
    tmp_path: Path,
) -> None:
    async with serving_drafter(ngram(slot_count=1), tmp_path) as served:
        stream = served.stream()
        await stream.step(opened(1))
        await stream.call.write(pb.DrafterRunStepsRequest(step=1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.call.read()
        error = serving.error_from_rpc(caught.value)
        assert isinstance(error, InvalidArgument)
        assert error.metadata["field"] == "step"
        assert await served.free_slot_count() == 1


async def test_a_step_with_more_items_than_slots_can_need_ends_the_stream(tmp_path: Path) -> None:
    async with serving_drafter(ngram(slot_count=2), tmp_path) as served:
        call = served.stub.RunSteps()
        items = [released(i + 1) for i in range(9)]
        await call.write(pb.DrafterRunStepsRequest(step=1, items=items))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert serving.error_from_rpc(caught.value).metadata["field"] == "items count"


@pytest.mark.parametrize("instant", [True, False])
async def test_l7_a_cancelled_stream_frees_its_slots_within_a_second(
    tmp_path: Path, instant: bool
) -> None:
    drafter = OracleDrafter("right", TRUTH, slot_count=4, instant=instant)
    async with serving_drafter(drafter, tmp_path) as served:
        stream = served.stream()
        await stream.step(*(opened(i) for i in range(1, 5)))
        assert await served.free_slot_count() == 0
        stream.call.cancel()
        async with asyncio.timeout(1):
            while await served.free_slot_count() < 4:
                await asyncio.sleep(0.01)
            while drafter.tokens:  # of the stream that counted the free slots
                await asyncio.sleep(0.01)


async def test_l7_a_lost_connection_frees_its_slots(tmp_path: Path) -> None:
    async with serving_drafter(ngram(slot_count=2), tmp_path) as served:
        async with grpc.aio.insecure_channel(served.address) as channel:
            call = type(served.stub)(channel).RunSteps()
            await call.write(pb.DrafterRunStepsRequest(step=1, items=[opened(1), opened(2)]))
            await call.read()
        async with asyncio.timeout(1):
            while await served.free_slot_count() < 2:
                await asyncio.sleep(0.01)


async def test_l7_a_stream_cancelled_inside_a_step_frees_its_slots_after_the_step(
    tmp_path: Path,
) -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(OracleDrafter):
        def step(self, works: Sequence[DraftWork]) -> list[list[int]]:
            entered.set()
            assert leave.wait(LIMIT_SECONDS)
            return super().step(works)

    drafter = Slow("right", TRUTH, slot_count=1, instant=False)
    async with serving_drafter(drafter, tmp_path) as served:
        stream = served.stream()
        await stream.step(opened(1))
        request = pb.DrafterRunStepsRequest(step=2, items=[draft(1, 0, [1, 2], pending=3, count=2)])
        await stream.call.write(request)
        await asyncio.to_thread(entered.wait, LIMIT_SECONDS)
        stream.call.cancel()
        await served.stub.GetModel(pb.DrafterGetModelRequest())  # the loop is not blocked
        assert drafter.tokens != {}
        leave.set()
        async with asyncio.timeout(1):
            while await served.free_slot_count() < 1:
                await asyncio.sleep(0.01)


async def test_an_engine_that_fails_ends_the_service_and_says_so(tmp_path: Path) -> None:
    class Broken(OracleDrafter):
        def step(self, works: Sequence[DraftWork]) -> list[list[int]]:
            raise RuntimeError(f"lost the device at {works[0].slot}")

    async with serving_drafter(Broken("right", TRUTH), tmp_path) as served:
        stream = served.stream()
        await stream.step(opened(1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.step(draft(1, 0, [1, 2], pending=3, count=2))
        error = serving.error_from_rpc(caught.value)
        assert isinstance(error, EngineFailed)
        assert "lost the device" in error.message
        with pytest.raises(EngineFailed):
            async with asyncio.timeout(LIMIT_SECONDS):
                await served.task


async def test_a_drain_ends_idle_streams_and_opens_no_session(tmp_path: Path) -> None:
    async with serving_drafter(ngram(), tmp_path) as served:
        busy, idle = served.stream(), served.stream()
        await busy.step(opened(1))
        await idle.step(opened(1))
        await idle.step(released(1))
        served.lifecycle.drain()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(LIMIT_SECONDS):
                await idle.call.read()
        assert isinstance(serving.error_from_rpc(caught.value), Draining)
        reply = await busy.step(draft(1, 0, [1, 2, 1], pending=2, count=2), opened(2))
        assert reply.results[0].draft.draft_token_ids == [1, 2]
        assert reply.results[1].error.reason == "DRAINING"
        assert not served.task.done()
        await busy.step(released(1))
        with pytest.raises(grpc.aio.AioRpcError):
            await busy.call.read()
        async with asyncio.timeout(LIMIT_SECONDS):
            await served.task


async def test_calls_are_not_ready_while_the_drafter_loads() -> None:

    servicer = DrafterServicer(serving.Lifecycle(), OFF, new_registry())
    with pytest.raises(NotReady):
        await servicer.GetModel(pb.DrafterGetModelRequest(), None)
    with pytest.raises(NotReady):
        await servicer.RunSteps(None, None)
    servicer.close()


async def test_l2_rows_reach_the_drafter_whole_and_in_order(tmp_path: Path) -> None:
    taps = RowFormat(kind=rows_pb2.ROW_KIND_RAW_TAPS, dtype=rows_pb2.ROW_DTYPE_BFLOAT16, width=3)
    drafter = RowsDrafter(TRUTH, row_format=taps, tap_layers=(1,))

    def rows(start: int, count: int) -> rows_pb2.Rows:
        return encode_rows(taps, start, bytes(range(start * 6, (start + count) * 6)))

    async with serving_drafter(drafter, tmp_path) as served:
        stream = served.stream()
        await stream.step(opened(1), opened(2))
        reply = await stream.step(
            draft(1, 0, [1, 2, 3], pending=4, count=2, rows=rows(0, 3)),
            draft(2, 0, [1], rows=rows(0, 1)),
        )
        assert reply.results[0].draft.draft_token_ids == [5, 6]
        reply = await stream.step(
            draft(1, 3, [4], pending=5, count=3, rows=rows(3, 1)),
            draft(2, 1, [2], pending=3, count=1, rows=rows(2, 1)),
        )
        assert reply.results[0].draft.draft_token_ids == [6, 7, 8]
        assert reply.results[1].error.metadata["field"] == "rows.start"
        reply = await stream.step(draft(2, 1, [2], pending=3, count=1, rows=rows(1, 1)))
        assert reply.results[0].draft.draft_token_ids == [4]
    assert (drafter.row_count, drafter.changed_row_count, drafter.session_count) == (6, 0, 2)


async def test_a_step_leaves_one_span_in_the_trace_of_each_item(tmp_path: Path) -> None:
    file = tmp_path / "drafter.jsonl"
    requests = setup_tracing("test", None, tmp_path / "requests.jsonl")
    spans = [requests.start(SPAN_DRAFT) for _ in range(2)]
    async with serving_drafter(ngram(), tmp_path, setup_tracing("drafter", None, file)) as served:
        stream = served.stream()
        await stream.step(opened(1), opened(2), opened(3))
        items = [draft(i, 0, [1, 2, 1], pending=2, count=i) for i in (1, 2, 3)]
        items[0].traceparent = spans[0].traceparent
        items[1].traceparent = "not a traceparent"
        items[2].traceparent = spans[1].traceparent
        await stream.step(*items)
    requests.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    by_parent = {line["parent_id"]: line for line in lines}
    assert [line["name"] for line in lines] == [SPAN_DRAFTER_STEP] * 2
    for span, other, count in ((spans[0], spans[1], 1), (spans[1], spans[0], 3)):
        _, trace_id, span_id, _ = span.traceparent.split("-")
        line = by_parent[span_id]
        assert line["trace_id"] == trace_id
        assert line["service"] == "drafter"
        assert line["attributes"]["splitspec.draft_token_count"] == count
        assert line["attributes"]["splitspec.step.device_seconds"] > 0
        assert [link["span_id"] for link in line["links"]] == [other.traceparent.split("-")[2]]
        assert line["end_ns"] >= line["start_ns"]
