"""The service over a real unix socket: every error by a real call, and who frees which slot."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitspec.serving import error_from_rpc
from splitspec.v1 import rows_pb2
from splitspec.v1 import verifier_pb2 as pb
from tests.fakes import FakeTarget
from tests.verifier_service.service import (
    Service,
    Stream,
    opening,
    prefill,
    release,
    serving,
    stream_of,
    window,
)
from tests.verifier_service.test_engine import continuation
from verifier_service.engine import Engine

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def reason_of(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return error_from_rpc(raised.value).reason


async def test_the_handshake_tells_the_model_its_rows_and_its_limits(tmp_path: Path) -> None:
    async with serving(tmp_path) as service, stream_of(service):
        model = await service.stub.GetModel(pb.VerifierGetModelRequest())
    assert (model.protocol_version, model.model_id, model.vocab_size) == (1, "fake", 50)
    assert (model.slot_count, model.max_context_length, model.max_draft_count) == (4, 64, 7)
    assert (model.min_prefill_chunk, model.max_prefill_chunk) == (1, 16)
    assert [(form.kind, form.width, form.dtype) for form in model.row_layouts] == [
        (rows_pb2.ROW_KIND_NONE, 0, rows_pb2.ROW_DTYPE_UNSPECIFIED),
        (rows_pb2.ROW_KIND_RAW_TAPS, 4, rows_pb2.ROW_DTYPE_FLOAT32),
    ]


async def test_rounds_over_the_wire_emit_the_targets_own_tokens(tmp_path: Path) -> None:
    async with serving(tmp_path) as service, stream_of(service) as stream:
        prompt = [4, 2, 4]
        truth = continuation(service.target, prompt, 12)
        emitted = [await stream.start(1, prompt)]
        while len(emitted) < 10:
            drafts = [*truth[len(emitted) :][:2], 0]
            committed = len(prompt) + len(emitted) - 1
            (result,) = await stream.run(window(1, committed, emitted[-1], drafts))
            count = result.verify.accepted_count + 1
            assert result.verify.rows.count == count  # L3
            assert result.verify.rows.start == committed
            assert result.committed_length == committed + count
            emitted += [*drafts[: count - 1], result.verify.bonus_token_id]
        assert emitted == truth[: len(emitted)]


async def test_NOT_READY_while_loading_health_answers_and_then_it_serves(tmp_path: Path) -> None:
    gate = threading.Event()

    def load(engine: Engine) -> Engine:
        assert gate.wait(20)
        engine.warm_up()
        return engine

    async with serving(tmp_path, load=load) as service:
        assert await service.health() == NOT_SERVING
        assert await reason_of(service.stub.GetModel(pb.VerifierGetModelRequest())) == "NOT_READY"
        assert await reason_of(service.stub.RunSteps().read()) == "NOT_READY"
        gate.set()
        async with stream_of(service) as stream:
            assert await service.health() == SERVING
            await stream.start(1, [1])


@pytest.mark.parametrize(
    ("item", "code", "reason"),
    [
        (window(1, 2, 50), 3, "INVALID_ARGUMENT"),
        (window(1, 1, 0), 9, "COMMITTED_LENGTH_MISMATCH"),
        (window(7, 0, 0), 5, "SESSION_NOT_FOUND"),
        (prefill(1, 2, [0] * 17), 3, "INVALID_ARGUMENT"),
        (opening(1), 3, "INVALID_ARGUMENT"),
        (opening(7, rows_pb2.ROW_KIND_FUSED), 3, "INVALID_ARGUMENT"),
        (opening(7, temperature=1.0), 3, "INVALID_ARGUMENT"),
        (opening(7, min_tokens=3), 3, "INVALID_ARGUMENT"),
    ],
)
async def test_an_item_error_has_its_code_and_reason_and_the_stream_goes_on(
    tmp_path: Path, item: pb.VerifyItem, code: int, reason: str
) -> None:
    async with serving(tmp_path) as service, stream_of(service) as stream:
        bonus = await stream.start(1, [1, 2])
        bad, good = await stream.run(item, window(1, 2, bonus))
        assert (bad.error.code, bad.error.reason) == (code, reason)
        assert good.verify.bonus_token_id == continuation(service.target, [1, 2], 2)[1]


async def test_CONTEXT_FULL_and_NO_FREE_SLOT_are_item_errors(tmp_path: Path) -> None:
    target = FakeTarget(max_context_length=4, slot_count=1)
    async with serving(tmp_path, target) as service, stream_of(service) as stream:
        bonus = await stream.start(1, [1, 2, 3])
        full, none = await stream.run(window(1, 3, bonus, [1, 2]), opening(2))
        assert (full.error.code, full.error.reason) == (3, "CONTEXT_FULL")
        assert (none.error.code, none.error.reason) == (8, "NO_FREE_SLOT")


@pytest.mark.parametrize(
    "request_message",
    [
        pb.VerifierRunStepsRequest(step=1),  # a step that was already run
        pb.VerifierRunStepsRequest(step=0),
        pb.VerifierRunStepsRequest(step=2, items=[release(9)] * 17),
        pb.VerifierRunStepsRequest.FromString(b"\x08\x02\x9a\x3f\x01x"),
    ],
)
async def test_a_step_that_no_item_can_be_blamed_for_ends_its_own_stream_only(
    tmp_path: Path, request_message: pb.VerifierRunStepsRequest
) -> None:
    async with serving(tmp_path) as service, stream_of(service) as other:
        bonus = await other.start(1, [1, 2])
        async with stream_of(service) as stream:
            await stream.start(1, [5])
            await stream.call.write(request_message)
            assert await reason_of(stream.call.read()) == "INVALID_ARGUMENT"
            assert await stream.status() == grpc.StatusCode.INVALID_ARGUMENT
            await service.until_slots(1)
        (result,) = await other.run(window(1, 2, bonus))
        assert result.verify.bonus_token_id == continuation(service.target, [1, 2], 2)[1]


@pytest.mark.parametrize("ending", ["cancel", "half-close", "channel"])
async def test_L7_slots_are_free_within_a_second_however_the_stream_ends(
    tmp_path: Path, ending: str
) -> None:
    async with serving(tmp_path) as service, stream_of(service) as other:
        await other.start(1, [1])
        async with stream_of(service) as first:
            await first.start(1, [1])
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.aio.insecure_channel(service.address, options=options)
            stub = type(service.stub)(channel)
            stream = Stream(stub.RunSteps())
            await stream.start(1, [2, 3])
            assert service.engine.used_slot_count == 3
            if ending == "cancel":
                stream.call.cancel()
            elif ending == "half-close":
                await stream.call.done_writing()
            else:
                await channel.close()
            await service.until_slots(2)
            await channel.close()
        await service.until_slots(1)


async def test_L7_a_cancel_in_the_middle_of_a_pass_frees_the_slots_and_drops_what_waits(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as service, stream_of(service) as other:
        mine = await other.start(1, [1, 2])
        gate = service.target.gate = threading.Event()
        async with stream_of(service) as stream:
            await stream.send(opening(1), prefill(1, 0, [5, 6]))
            await asyncio.sleep(0.05)  # its pass is at the gate
            waiting = asyncio.create_task(other.run(window(1, 2, mine)))
            async with stream_of(service) as dropped:
                await dropped.send(opening(1), prefill(1, 0, [7]))
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)
        passes = len(service.target.passes)
        gate.set()
        (result,) = await waiting
        assert result.verify.bonus_token_id == continuation(service.target, [1, 2], 2)[1]
        await service.until_slots(1)
        # The pass in flight and the other stream's; nothing for the stream that only waited.
        assert len(service.target.passes) == passes + 2


async def test_several_streams_are_independent(tmp_path: Path) -> None:
    async def generate(service: Service, prompt: list[int]) -> bool:
        async with stream_of(service) as stream:
            emitted = [await stream.start(1, prompt)]
            for _ in range(10):
                committed = len(prompt) + len(emitted) - 1
                (result,) = await stream.run(window(1, committed, emitted[-1], [0, 1]))
                count = result.verify.accepted_count
                emitted += [*[0, 1][:count], result.verify.bonus_token_id]
            return emitted == continuation(service.target, prompt, len(emitted))

    async with serving(tmp_path) as service:
        prompts = [[1], [2, 2], [3, 3, 3], [4]]
        assert all(await asyncio.gather(*(generate(service, p) for p in prompts)))
        await service.until_slots(0)


async def test_ENGINE_FAILED_ends_every_stream_health_and_the_process(tmp_path: Path) -> None:
    async with serving(tmp_path) as service, stream_of(service) as other:
        await other.start(1, [1])
        watch = health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        async with stream_of(service) as stream:
            bonus = await stream.start(1, [1, 2])
            service.target.fault = RuntimeError("device lost")
            await stream.send(window(1, 2, bonus))
            assert await reason_of(stream.call.read()) == "ENGINE_FAILED"
            assert await stream.status() == grpc.StatusCode.INTERNAL
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        assert await other.status() != grpc.StatusCode.OK
        assert service.lifecycle.failure is not None
        async with asyncio.timeout(5):
            await asyncio.wait([service.task])
        assert service.task.exception() is service.lifecycle.failure


async def test_NON_FINITE_LOGITS_fail_the_item_and_neither_its_stream_nor_the_process(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as service, stream_of(service) as stream:
        bonus = await stream.start(1, [1, 2])
        service.target.nan = True
        (bad,) = await stream.run(window(1, 2, bonus))
        assert (bad.error.code, bad.error.reason) == (13, "NON_FINITE_LOGITS")
        assert bad.committed_length == 2
        service.target.nan = False
        (good,) = await stream.run(window(1, 2, bonus))
        assert good.verify.bonus_token_id == continuation(service.target, [1, 2], 2)[1]
        assert await service.health() == SERVING


async def test_DRAINING_refuses_opens_and_finishes_what_is_open(tmp_path: Path) -> None:
    async with serving(tmp_path) as service, stream_of(service) as stream:
        bonus = await stream.start(1, [1, 2])
        service.lifecycle.drain()
        refused, good = await stream.run(opening(2), window(1, 2, bonus))
        assert (refused.error.code, refused.error.reason) == (14, "DRAINING")
        assert good.verify.bonus_token_id == continuation(service.target, [1, 2], 2)[1]
        await stream.run(release(1))
        await stream.call.done_writing()
        async with asyncio.timeout(5):
            await service.task


async def test_replies_carry_timings_and_metrics_count_passes_bytes_and_slots(
    tmp_path: Path, free_port: int
) -> None:
    address = f"127.0.0.1:{free_port}"
    async with (
        serving(tmp_path, metrics_address=address) as service,
        stream_of(service) as stream,
    ):
        bonus = await stream.start(1, [1, 2])
        await stream.send(window(1, 2, bonus, [0, 0, 0]), window(9, 0, 1))
        reply = await stream.call.read()
        assert reply.timings.device.ToNanoseconds() > 0
        assert reply.timings.copy.ToNanoseconds() > 0
        assert reply.timings.queue.ToNanoseconds() >= 0

        def scrape() -> str:
            return urllib.request.urlopen(f"http://{address}/metrics", timeout=5).read().decode()

        text = await asyncio.to_thread(scrape)
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines["slots_in_use"]) == 1
    assert float(lines["steps_total"]) == 2
    assert float(lines["target_passes_total"]) == 2
    assert float(lines["committed_row_bytes_total"]) == 3 * 16  # L6: two rows, then one
    # L5: a window of four rows in one pass, none of one; the one that was refused does not count.
    assert float(lines["window_rows_count"]) == 1
    assert float(lines['window_rows_bucket{le="3.0"}']) == 0
    assert float(lines['window_rows_bucket{le="4.0"}']) == 1
    assert float(lines['step_items_total{action="verify"}']) == 2
    assert float(lines['item_errors_total{reason="SESSION_NOT_FOUND"}']) == 1
    assert float(lines['wire_bytes_total{kind="verify_response"}']) > 3 * 16


async def test_a_traced_item_gets_a_span_with_device_time_in_its_own_trace(tmp_path: Path) -> None:
    file = Path(tmp_path) / "spans.jsonl"
    async with serving(tmp_path, trace_file=file) as service, stream_of(service) as stream:
        bonuses = [await stream.start(number, [number]) for number in (1, 2, 3)]
        items = [window(number, 1, bonuses[number - 1]) for number in (1, 2, 3)]
        items[0].traceparent, items[1].traceparent = (f"00-{n:032x}-{n:016x}-01" for n in (1, 2))
        items[2].traceparent = "nonsense"
        await stream.run(*items)
    spans = [json.loads(line) for line in file.read_text().splitlines()]
    assert [span["name"] for span in spans] == ["verifier.step"] * 2
    assert [span["trace_id"] for span in spans] == [f"{n:032x}" for n in (1, 2)]
    assert [span["parent_id"] for span in spans] == [f"{n:016x}" for n in (1, 2)]
    # One step served both: each links the other's request.
    assert [span["links"] for span in spans] == [
        [{"trace_id": f"{n:032x}", "span_id": f"{n:016x}"}] for n in (2, 1)
    ]
    for number, span in enumerate(spans, start=1):
        attributes = span["attributes"]
        assert attributes["splitspec.action"] == "verify"
        assert attributes["splitspec.session"] == str(number)
        assert attributes["splitspec.step.item_count"] == 3
        device_seconds = attributes["splitspec.step.device_seconds"]
        assert 0 < device_seconds <= (span["end_ns"] - span["start_ns"]) / 1e9 + 1e-6
