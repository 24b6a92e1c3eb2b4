"""2,000 seeded malformed or hostile messages: the service stays healthy, others notice nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from splitspec.v1 import rows_pb2, sampling_pb2
from splitspec.v1 import verifier_pb2 as pb
from tests.verifier_service.service import Service, Stream, serving, stream_of, window
from tests.verifier_service.test_engine import continuation

MESSAGES = 2_000
METHOD = "/splitspec.v1.Verifier/RunSteps"
NUMBERS = (0, 1, 2, 3, 49, 50, 63, 64, 2**31 - 1, 2**31, 2**32 - 1)
SESSIONS = (0, 1, 1, 1, 2, 2, 3, 4, 2**63, 2**64 - 1)
DOUBLES = (0.0, -1.0, 0.5, 1.0, 1e308, float("nan"), float("inf"), -0.0, 100.0, 5e-324)
COUNTS = (0, 1, 2, 7, 8, 16, 17, 5_000)


def number(r: random.Random) -> int:
    return r.choice(NUMBERS)


def ids(r: random.Random) -> list[int]:
    count = r.choice(COUNTS)
    return [number(r) if r.random() < 0.3 else r.randrange(50) for _ in range(count)]


def sampling(r: random.Random) -> sampling_pb2.SamplingParameters:
    message = sampling_pb2.SamplingParameters()
    for field in ("temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty"):
        if r.random() < 0.3:
            setattr(message, field, r.choice(DOUBLES))
    if r.random() < 0.3:
        message.top_k = number(r)
    if r.random() < 0.5:
        message.seed = r.choice((0, 2**64 - 1))
    if r.random() < 0.05:
        message.grammar = "x" * r.choice((0, 100_000))
    if r.random() < 0.05:
        message.logit_bias[number(r)] = r.choice(DOUBLES)
    return message


def opened(r: random.Random) -> pb.OpenSession:
    # Proto3 enums are open: any int32 travels.
    kind: Any = r.choice((rows_pb2.ROW_KIND_RAW_TAPS, rows_pb2.ROW_KIND_NONE, 0, 3, 4, 77, -1))
    return pb.OpenSession(sampling=sampling(r) if r.random() < 0.6 else None, row_kind=kind)


def item(r: random.Random) -> pb.VerifyItem:
    message = pb.VerifyItem(session=r.choice(SESSIONS))
    if r.random() < 0.8:
        message.committed_length = r.choice((0, 0, 0, 1, 2, 16, *NUMBERS))
    if r.random() < 0.2:
        message.traceparent = r.choice(("x", "00-0-0-0", "é" * 1000, "z" * 300_000))
    match r.randrange(7):
        case 0:
            message.open.CopyFrom(opened(r))
        case 1:
            message.prefill.CopyFrom(pb.PrefillChunk(token_ids=ids(r), final=r.random() < 0.5))
        case 2 | 3:
            message.verify.draft_token_ids.extend(ids(r))
            if r.random() < 0.8:
                message.verify.pending_token_id = number(r)
            message.verify.SetInParent()
        case 4:
            fork = pb.ForkSession(source_session=r.choice(SESSIONS), open=opened(r))
            if r.random() < 0.8:
                fork.length = number(r)
            message.fork.CopyFrom(fork)
        case 5:
            message.release.SetInParent()
    return message


def structured(r: random.Random, step: int) -> bytes:
    """Return a well-formed message with hostile values."""
    count = r.choice((0, 1, 1, 2, 3, 8, 40))
    step = r.choice((step, step, step, step, step, step, 0, 1, 2**64 - 1))
    return pb.VerifierRunStepsRequest(
        step=step, items=[item(r) for _ in range(count)]
    ).SerializeToString()


def truncated(r: random.Random, step: int) -> bytes:
    data = structured(r, step)
    return data[: r.randrange(len(data) + 1)]


def flipped(r: random.Random, step: int) -> bytes:
    data = bytearray(structured(r, step)[:2_000])
    for _ in range(r.choice((1, 3, 20))):
        if data:
            data[r.randrange(len(data))] = r.randrange(256)
    return bytes(data)


def noise(r: random.Random, step: int) -> bytes:
    del step
    return r.randbytes(r.choice((0, 1, 10, 1_000, 50_000)))


def unknown_fields(r: random.Random, step: int) -> bytes:
    inner = pb.VerifyItem(session=1, committed_length=0)
    inner.MergeFromString(r.choice((b"\xf8\x07\x05", b"\x9a\x3f\x01x", b"\xc0\x3e\x00")))
    message = pb.VerifierRunStepsRequest(step=step, items=[inner])
    return message.SerializeToString() + r.choice((b"", b"\xf8\x07\x05"))


def deep(r: random.Random, step: int) -> bytes:
    """Return groups inside groups: a classic against recursive parsers."""
    del step
    depth = r.choice((10, 99, 101, 5_000))
    return b"\x1b" * depth + b"\x1c" * depth


KINDS: tuple[Callable[[random.Random, int], bytes], ...] = (
    *(structured,) * 6,
    truncated,
    flipped,
    noise,
    unknown_fields,
    deep,
)


class Attacker:
    """Sends bytes on streams of its own; opens the next one when the service ends one."""

    def __init__(self, service: Service) -> None:
        self._call_of = service.channel.stream_stream(
            METHOD, response_deserializer=pb.VerifierRunStepsResponse.FromString
        )
        self._call: Any = None
        self._step = 0
        self.answered = 0
        self.ended = 0

    @property
    def step(self) -> int:
        """Return the number that the service expects next, or a higher one."""
        return self._step + 1

    async def send(self, data: bytes) -> None:
        """Send one message and wait for its answer or the stream's end; neither may hang."""
        if self._call is None:
            self._call, self._step = self._call_of(), 0
        self._step += 1
        try:
            async with asyncio.timeout(10):
                await self._call.write(data)
                answer = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            answer = grpc.aio.EOF
        if answer is grpc.aio.EOF:
            self._call, self.ended = None, self.ended + 1
        else:
            self.answered += 1
            assert all(
                result.WhichOneof("result") != "verify" or result.verify.rows.count <= 8
                for result in answer.results
            )

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()


async def advance(stream: Stream, tokens: list[int], prompt_length: int, truth: list[int]) -> None:
    """Run one round of the innocent session and check it."""
    done = len(tokens) - prompt_length
    drafts = [truth[done], (truth[done + 1] + 1) % 50]
    (result,) = await stream.run(window(1, len(tokens) - 1, tokens[-1], drafts))
    assert result.verify.accepted_count == 1
    tokens += [truth[done], result.verify.bonus_token_id]
    assert tokens[prompt_length:] == truth[: done + 2]


async def test_2000_hostile_messages_leave_the_service_healthy_and_other_sessions_unchanged(
    tmp_path: Path,
) -> None:
    r = random.Random(20_261_201)
    prompt = [9, 9, 9]
    async with serving(tmp_path) as service, stream_of(service) as innocent:
        truth = continuation(service.target, prompt, 60)
        tokens = [*prompt, await innocent.start(1, prompt)]
        attacker = Attacker(service)
        for index in range(MESSAGES):
            await attacker.send(r.choice(KINDS)(r, attacker.step))
            if index % 100 == 99:
                await advance(innocent, tokens, len(prompt), truth)
        attacker.close()
        assert attacker.answered > 500
        assert attacker.ended > 100
        await service.until_slots(1)
        assert await service.health() == health_pb2.HealthCheckResponse.SERVING
        async with stream_of(service) as fresh:
            assert [await fresh.start(1, [5])] == continuation(service.target, [5], 1)


async def test_bytes_that_are_no_message_end_their_stream_with_INVALID_ARGUMENT(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as service, stream_of(service):
        call = service.channel.stream_stream(METHOD)()
        await call.write(b"\x12\xff")
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
