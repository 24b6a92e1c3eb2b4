"""The Generation service by real calls: answers, the error table, the queue, health, drain."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from coordinator.text import ModelText
from splitspec.errors import NoFreeSlot, UserError
from splitspec.v1 import generation_pb2 as pb
from tests.coordinator.fakes.drafter import FakeDrafter
from tests.coordinator.fakes.stand import PROMPT, Stand, request, stand
from tests.coordinator.fakes.target import continuation


async def _refused(s: Stand, **fields: Any) -> tuple[grpc.StatusCode, str, str, set[str]]:
    """Return code, reason, message and the kinds of detail of a refusal."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await s.generate(**fields)
    return _status(caught.value)


def _status(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str, str, set[str]]:
    metadata = {k: v for k, v in error.trailing_metadata() or ()}
    status = rpc_status.status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    kinds = {detail.TypeName().rpartition(".")[2] for detail in status.details}
    return error.code(), info.reason, error.details() or "", kinds


# The error table.


async def test_a_bad_parameter_is_invalid_argument_and_names_the_field() -> None:
    async with stand() as s:
        for fields, named in (
            ({"sampling": {"temperature": -1.0}}, "temperature"),
            ({"sampling": {"min_tokens": 1}}, "min_tokens"),
            ({"prompt": [5, 300]}, "token_ids"),
            ({"prompt": []}, "token_ids"),
            ({"stop": [""]}, "stop"),
            ({"draft_count": 8}, "draft_count"),
            ({"conversation": {"messages": [{"role": "robot"}]}}, "role"),
        ):
            code, reason, message, _ = await _refused(s, **fields)
            assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
            assert named in message


async def test_a_prompt_without_room_is_context_full() -> None:
    async with stand() as s:
        code, reason, message, _ = await _refused(s, prompt=[5] * 128)
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_FULL")
        assert "128" in message


async def test_a_full_queue_is_resource_exhausted_and_says_when_to_retry(
    unused_tcp_port: int,
) -> None:
    metrics = f"127.0.0.1:{unused_tcp_port}"
    async with stand(verifier_model={"slot_count": 1}, queue_limit=1, metrics_address=metrics) as s:
        s.verifier.gate.clear()
        running = asyncio.create_task(s.generate(max_tokens=50, draft_count=0))
        await s.wait_metric("num_requests_running", 1)
        waiting = asyncio.create_task(s.generate(max_tokens=2))
        await s.wait_metric("num_requests_waiting", 1)
        code, reason, _, kinds = await _refused(s, max_tokens=2)
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert "RetryInfo" in kinds
        s.verifier.gate.set()
        assert (await running).token_ids == continuation(PROMPT, None, 50)
        assert (await waiting).token_ids == continuation(PROMPT, None, 2)


async def test_a_slot_that_another_coordinator_holds_is_waited_for_then_refused() -> None:
    async with stand(queue_seconds=2.0) as s:
        busy = range(s.verifier.step_count + 1, s.verifier.step_count + 1000)
        honest = s.verifier._run_item

        def no_slot(sessions: Any, item: Any, result: Any) -> None:
            if item.HasField("open") and s.verifier.step_count in busy:
                raise NoFreeSlot("every slot is taken")
            honest(sessions, item, result)

        s.verifier._run_item = no_slot  # type: ignore[method-assign]
        code, reason, _, kinds = await _refused(s, max_tokens=2)
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_FREE_SLOT")
        assert "RetryInfo" in kinds
        busy = range(s.verifier.step_count + 1, s.verifier.step_count + 4)
        assert (await s.generate(max_tokens=2)).token_ids == continuation(PROMPT, None, 2)


async def test_a_pair_that_does_not_fit_refuses_to_start() -> None:
    with pytest.raises(UserError, match=r"vocab_size: the drafter has 301.*300"):
        async with stand(drafter_model={"vocab_size": 301}):
            pass
    with pytest.raises(UserError, match=r"tokenizer_hash: the verifier has other"):
        async with stand(verifier_model={"tokenizer_hash": "other"}):
            pass


async def test_a_drafter_that_comes_late_and_does_not_fit_is_done_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stand(late_drafter=True, drafter_model={"vocab_size": 301}) as s:
        assert s.drafter is not None
        handshakes = _count_handshakes(s.drafter)
        await s.drafter.start()
        async with asyncio.timeout(10):
            while len(handshakes) < 3:  # it is tried again and again
                await asyncio.sleep(0.01)
        answer = await s.generate(max_tokens=30)
        assert answer.token_ids == continuation(PROMPT, None, 30)
        assert answer.statistics.target_only_round_count == answer.statistics.round_count
        assert await s.serves()
        lines = [r.getMessage() for r in caplog.records if "vocab_size" in r.getMessage()]
        assert len(lines) == 1
        assert "vocab_size: the drafter has 301, the verifier 300" in lines[0]
        s.drafter.model.vocab_size = 300
        await _until_drafts(s)


async def test_a_drafter_that_comes_back_and_does_not_fit_any_more_is_done_without() -> None:
    async with stand() as s:
        assert s.drafter is not None
        await _until_drafts(s)
        s.drafter.model.tokenizer_hash = "other"
        handshakes = _count_handshakes(s.drafter)
        s.drafter.die()
        async with asyncio.timeout(10):
            while not handshakes:
                await asyncio.sleep(0.01)
        answer = await s.generate(max_tokens=30)
        assert answer.token_ids == continuation(PROMPT, None, 30)
        assert answer.statistics.draft_token_count == 0
        assert await s.serves()
        s.drafter.model.ClearField("tokenizer_hash")
        await _until_drafts(s)


def _count_handshakes(drafter: FakeDrafter) -> list[object]:
    """Return a list that grows with every handshake of `drafter` from its next start on."""
    handshakes: list[object] = []
    honest = drafter.GetModel

    async def get_model(request: Any, context: Any) -> Any:
        handshakes.append(request)
        return await honest(request, context)

    drafter.GetModel = get_model  # type: ignore[method-assign]
    return handshakes


async def _until_drafts(s: Stand) -> None:
    async with asyncio.timeout(10):
        while not (await s.generate(max_tokens=9)).statistics.draft_token_count:
            await asyncio.sleep(0.01)


async def test_without_a_verifier_calls_are_unavailable_and_health_says_so() -> None:
    async with stand(reconnect_seconds=0.2) as s:
        assert await s.serves()
        await s.verifier.kill()
        await s.wait_serving(False)
        code, reason, _, _ = await _refused(s)
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")
        await s.verifier.start()
        await s.wait_serving()
        assert len((await s.generate(max_tokens=3)).token_ids) == 3


async def test_a_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    async with stand() as s:
        begun = asyncio.Event()

        def hold(_: int) -> None:
            if not begun.is_set():
                s.verifier.gate.clear()
                begun.set()

        running = asyncio.create_task(s.generate(hold, max_tokens=60, draft_count=0))
        await asyncio.wait_for(begun.wait(), 10)
        s.lifecycle.drain()
        code, reason, _, _ = await _refused(s, max_tokens=1)
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        s.verifier.gate.set()
        assert (await running).token_ids == continuation(PROMPT, None, 60)
        await asyncio.wait_for(s.serving, 5)


# Answers.


async def test_get_model_says_what_is_served() -> None:
    async with stand() as s:
        model = await s.stub.GetModel(pb.GenerationGetModelRequest())
        assert model == pb.GenerationGetModelResponse(
            protocol_version=1,
            model_id="hash",
            model_hash="h1",
            max_context_length=128,
            vocab_size=300,
            draft_method="right",
            max_draft_count=7,
            precision="fp32",
            slot_count=8,
        )
        assert s.drafter is not None
        await s.drafter.kill()
        async with asyncio.timeout(5):
            while (await s.stub.GetModel(pb.GenerationGetModelRequest())).draft_method:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("count", [0, 1, 4, 7])
async def test_stop_tokens_end_the_answer_inside_a_window(count: int) -> None:
    async with stand() as s:
        tokens = continuation(PROMPT, None, 60)
        stop = next(t for i, t in enumerate(tokens) if i > 10 and tokens.index(t) == i)
        end = tokens.index(stop)
        answer = await s.generate(stop_token_ids=[stop], draft_count=count, max_tokens=60)
        assert answer.token_ids == tokens[: end + 1]
        assert answer.finish.reason == pb.FINISH_REASON_STOP
        assert answer.text == _text(s).tokenizer.decode(tokens[:end])
        assert answer.statistics.output_token_count == end + 1
        await s.settle()


def _text(s: Stand) -> ModelText:
    return ModelText.load(s.folder)


@pytest.mark.parametrize("count", [0, 1, 4, 7])
async def test_stop_strings_end_the_text_before_them_whatever_k_is(count: int) -> None:
    async with stand() as s:
        tokens = continuation(PROMPT, None, 60)
        decode = _text(s).tokenizer.decode
        whole = decode(tokens)
        stop = next(
            whole[i : i + 3]
            for i in range(15, 60)
            if whole.find(whole[i : i + 3]) == i and "\ufffd" not in whole[i : i + 3]
        )
        end = next(n for n in range(60) if stop in decode(tokens[:n]))
        answer = await s.generate(stop=["never there", stop], draft_count=count, max_tokens=60)
        assert answer.text == whole[: whole.find(stop)]
        assert answer.token_ids == tokens[:end]
        assert answer.finish.reason == pb.FINISH_REASON_STOP


async def test_a_conversation_is_rendered_with_the_models_template() -> None:
    async with stand() as s:
        answer = await s.generate(
            conversation={"messages": [{"role": "user", "content": "hi"}]}, max_tokens=5
        )
        prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        ids = _text(s).tokenizer.encode(prompt, add_special_tokens=False).ids
        assert answer.token_ids == continuation(ids, None, 5)


async def test_text_and_ids_add_up_and_a_slow_reader_holds_no_slot() -> None:
    async with stand() as s:
        call = s.stub.Generate(request(max_tokens=100, draft_count=7))
        replies = aiter(call)
        first = await anext(replies)
        await s.settle(5)  # the answer is not read, and its session is over
        ids, text = list(first.token_ids), first.text_delta
        async for reply in replies:
            ids += reply.token_ids
            text += reply.text_delta
        assert ids == continuation(PROMPT, None, 100)
        assert text == _text(s).tokenizer.decode(ids)


async def test_waiting_requests_that_are_cancelled_leave_the_queue(unused_tcp_port: int) -> None:
    metrics = f"127.0.0.1:{unused_tcp_port}"
    async with stand(verifier_model={"slot_count": 1}, queue_limit=2, metrics_address=metrics) as s:
        s.verifier.gate.clear()
        running = asyncio.create_task(s.generate(max_tokens=60, draft_count=0))
        await s.wait_metric("num_requests_running", 1)
        calls = [s.stub.Generate(request(max_tokens=2)) for _ in range(2)]
        await s.wait_metric("num_requests_waiting", 2)
        for call in calls:
            call.cancel()
        await s.wait_metric("num_requests_waiting", 0)
        again = [asyncio.create_task(s.generate(max_tokens=2)) for _ in range(2)]
        await s.wait_metric("num_requests_waiting", 2)
        s.verifier.gate.set()
        for task in again:
            assert (await task).token_ids == continuation(PROMPT, None, 2)
        await running
        await s.settle()


# Hostile clients.


async def test_two_thousand_hostile_requests_leave_it_healthy() -> None:
    async with stand(drafter="coin-flip") as s:
        raw = s.channel.unary_stream("/splitspec.v1.Generation/Generate")
        chance = random.Random(1)
        over = asyncio.Event()
        good = asyncio.create_task(_keep_generating(s, over))
        outcomes: set[grpc.StatusCode] = set()
        for _ in range(40):
            work = [_send(raw, _hostile(chance)) for _ in range(50)]
            outcomes.update(await asyncio.gather(*work))
        assert outcomes <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OK}
        assert grpc.StatusCode.INVALID_ARGUMENT in outcomes
        over.set()
        assert await good > 1
        assert await s.serves()
        await s.settle()


async def _keep_generating(s: Stand, over: asyncio.Event) -> int:
    """Generate beside the hostile calls until they are over; the answers must not change."""
    expected = continuation(PROMPT, 3, 40)
    count = 0
    while not over.is_set():
        answer = await s.generate(max_tokens=40, sampling={"temperature": 1.0, "seed": 3})
        assert answer.token_ids == expected
        count += 1
    return count


async def _send(raw: Any, data: bytes) -> grpc.StatusCode:
    call = raw(data, timeout=30)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def _hostile(chance: random.Random) -> bytes:
    """Return a request that is malformed, out of range, oversized or random."""
    big = 2**32 - 1
    doubles = [float("nan"), float("inf"), -1.0, 1e308, -0.0]
    made = [
        lambda: chance.randbytes(chance.randrange(1, 60)),
        lambda: request(prompt=[chance.choice([big, 300, 5]) for _ in range(3)]),
        lambda: request(prompt=[5] * chance.choice([128, 5000])),
        lambda: request(prompt=[]),
        lambda: request(sampling={"temperature": chance.choice(doubles)}, max_tokens=2),
        lambda: request(sampling={"top_p": chance.choice(doubles)}, max_tokens=2),
        lambda: request(sampling={"min_p": chance.choice(doubles)}, max_tokens=2),
        lambda: request(sampling={"logit_bias": {big: 1.0}}),
        lambda: request(stop=["x" * chance.choice([0, 5000])]),
        lambda: request(stop=["x"] * 1000),
        lambda: request(stop_token_ids=[big]),
        lambda: request(draft_count=big),
        lambda: request(max_tokens=0),
        lambda: request(text="a" * chance.choice([0, 100_000])),
        lambda: request(text="\0\ufffd\U0010ffff" * 3, max_tokens=1),
        lambda: request(conversation={}),
        lambda: request(conversation={"messages": [{"role": "x" * 1000, "content": "a"}]}),
        lambda: pb.GenerateRequest(),
        lambda: request(max_tokens=1).SerializeToString() + bytes([0xF8, 0x3F, 0x01]),
        lambda: request(max_tokens=1).SerializeToString()[: chance.randrange(1, 12)],
    ]
    message = chance.choice(made)()
    return message if isinstance(message, bytes) else message.SerializeToString()


# What it tells operators.


async def test_one_request_is_one_trace(tmp_path: Any) -> None:
    file = tmp_path / "trace.jsonl"
    async with stand(trace_file=file) as s:
        metadata = (("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01"),)
        call = s.stub.Generate(
            request(max_tokens=9, draft_count=3, sampling={"temperature": 0.5, "seed": 2**64 - 1}),
            metadata=metadata,
        )
        replies = [reply async for reply in call]
        rounds = replies[-1].finish.statistics.round_count
    spans = [json.loads(line) for line in file.read_text().splitlines()]
    assert {span["trace_id"] for span in spans} == {"ab" * 16}
    (root,) = [span for span in spans if span["name"] == "splitspec.generate"]
    assert root["parent_id"] == "cd" * 8
    names = [s["name"] for s in spans if s["parent_id"] == root["span_id"]]
    assert sorted(set(names)) == ["draft", "prefill", "queue", "verify"]
    assert names.count("verify") == names.count("draft") == rounds
    attributes = root["attributes"]
    assert attributes["gen_ai.request.seed"] == str(2**64 - 1)
    assert attributes["gen_ai.usage.output_tokens"] == 9
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["splitspec.round_count"] == rounds


async def test_metrics_count_rounds_drafts_and_bytes(unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    async with stand(metrics_address=address) as s:
        answer = await s.generate(max_tokens=30, draft_count=3)
        await _refused(s, prompt=[])
        url = f"http://{address}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    statistics = answer.statistics
    drafted = statistics.round_count - statistics.target_only_round_count
    assert float(values["spec_decode_num_drafts_total"]) == drafted
    assert float(values["spec_decode_num_draft_tokens_total"]) == statistics.draft_token_count
    accepted = float(values["spec_decode_num_accepted_tokens_total"])
    assert accepted == statistics.accepted_token_count
    position = 'spec_decode_num_accepted_tokens_per_pos_total{position="0"}'
    assert float(values[position]) == drafted  # a right drafter
    assert float(values["generation_tokens_total"]) == 30
    assert float(values['requests_total{outcome="length"}']) == 1
    assert float(values['wire_bytes_total{kind="verify_request"}']) > 0
    assert float(values['round_seconds_count{phase="wire"}']) == statistics.round_count
