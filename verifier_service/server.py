"""The Verifier service: decode, call the engine, encode. Holds no tensors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from graph_runtime.engine_thread import EngineThread
from splitspec import ITEMS_A_SLOT, serving, telemetry
from splitspec.channels import MAX_MESSAGE_BYTES
from splitspec.checks import check_step
from splitspec.errors import EngineFailed, UserError
from splitspec.metrics import new_registry
from splitspec.serving import Lifecycle, ServiceEntry
from splitspec.v1 import verifier_pb2 as pb
from splitspec.v1 import verifier_pb2_grpc
from verifier_service.config import VerifierConfig
from verifier_service.decoding import decode_items, encode_model, encode_results
from verifier_service.engine import Engine
from verifier_service.metrics import VerifierMetrics
from verifier_service.sessions import StreamSessions
from verifier_service.steps import EngineModel, Item, ItemResult, StepResult, VerifyOutcome

logger = logging.getLogger(__name__)

SERVICE_NAME = "splitspec.v1.Verifier"
_CLOSE_SECONDS = 5.0


class VerifierServicer(verifier_pb2_grpc.VerifierServicer):
    """Serves one engine to any number of coordinators, one stream each."""

    def __init__(
        self, lifecycle: Lifecycle, tracing: telemetry.Tracing, registry: CollectorRegistry
    ) -> None:
        self._lifecycle = lifecycle
        self._tracing = tracing
        self._metrics = VerifierMetrics(registry)
        self._thread = EngineThread()
        self._engine: Engine | None = None
        self._model: EngineModel | None = None

    async def load(self, load: Callable[[], Engine]) -> None:
        """Load the engine on its own thread; calls are NOT_READY until then.

        Raises:
            UserError: what is wrong with the model or a flag.
        """
        engine = await self._thread.call(load)
        self._model = engine.model
        _check_message_size(self._model)
        self._metrics.watch_slots(lambda: engine.used_slot_count)
        self._engine = engine

    def close(self) -> None:
        """End the engine's thread."""
        self._thread.close(_CLOSE_SECONDS)

    async def GetModel(
        self, request: pb.VerifierGetModelRequest, context: Any
    ) -> pb.VerifierGetModelResponse:
        """Answer the handshake."""
        del request, context
        self._lifecycle.require_serving()
        assert self._model is not None
        return encode_model(self._model)

    async def RunSteps(self, request_iterator: Any, context: Any) -> None:
        """Answer each step of one stream, in order; at its end its slots are free (law L7)."""
        del request_iterator  # read through the lifecycle, which ends idle streams at a drain
        self._lifecycle.require_serving()
        engine, model = self._engine, self._model
        assert engine is not None and model is not None  # noqa: PT018
        stream = StreamSessions()
        last_step = 0
        try:
            while True:
                request = await self._lifecycle.next_request(context, idle=not len(stream))
                if request is None:
                    return
                check_step(request, last_step, ITEMS_A_SLOT * model.slot_count)
                last_step = request.step
                await context.write(await self._run(engine, stream, request))
        finally:
            # Not awaited: this call may be cancelled already. Steps that wait are dropped, and the
            # one in flight ends before its slots are free.
            stream.ended = True
            self._thread.post(partial(engine.release_all, stream))

    async def _run(
        self,
        engine: Engine,
        stream: StreamSessions,
        request: pb.VerifierRunStepsRequest,
    ) -> pb.VerifierRunStepsResponse:
        arrived_ns = time.perf_counter_ns()
        items = decode_items(request.items)
        started_ns, step = await self._call(engine, stream, items)
        queue_ns = started_ns - arrived_ns
        encoding_ns = time.perf_counter_ns()
        response = pb.VerifierRunStepsResponse(step=request.step)
        encode_results(response, step.results)
        step.copy_ns += time.perf_counter_ns() - encoding_ns
        response.timings.queue.FromNanoseconds(queue_ns)
        response.timings.device.FromNanoseconds(step.device_ns)
        response.timings.copy.FromNanoseconds(step.copy_ns)
        self._metrics.count(items, step, queue_ns, (request.ByteSize(), response.ByteSize()))
        if self._tracing.enabled:
            self._trace(request, step, queue_ns)
        return response

    async def _call(
        self, engine: Engine, stream: StreamSessions, items: Sequence[Item]
    ) -> tuple[int, StepResult]:
        """Run a step on the engine's thread; return when it started, and its result.

        Raises:
            EngineFailed: the engine failed, now or before; the process is on its way out.
        """
        draining = self._lifecycle.draining
        try:
            return await self._thread.call(partial(_run_step, engine, stream, items, draining))
        except EngineFailed as failure:
            self._lifecycle.fail(failure)
            raise

    def _trace(self, request: pb.VerifierRunStepsRequest, step: StepResult, queue_ns: int) -> None:
        ended_ns = time.time_ns()
        spent: dict[str, telemetry.AttributeValue] = {
            # NOTE: attributes are signed 64-bit; a peer's number may not fit one.
            telemetry.KEY_STEP: str(request.step),
            telemetry.KEY_ITEM_COUNT: len(request.items),
            telemetry.KEY_QUEUE_SECONDS: queue_ns / 1e9,
            telemetry.KEY_DEVICE_SECONDS: step.device_ns / 1e9,
            telemetry.KEY_COPY_SECONDS: step.copy_ns / 1e9,
        }
        self._tracing.record_step(
            telemetry.SPAN_VERIFIER_STEP,
            parents=[item.traceparent for item in request.items],
            start_ns=ended_ns - queue_ns - step.device_ns - step.copy_ns,
            end_ns=ended_ns,
            attributes=[
                {**spent, **_attributes(item, result)}
                for item, result in zip(request.items, step.results, strict=True)
            ],
        )


def _run_step(
    engine: Engine, stream: StreamSessions, items: Sequence[Item], draining: bool
) -> tuple[int, StepResult]:
    """Run on the engine's thread; a stream that has ended has nobody left to answer."""
    started_ns = time.perf_counter_ns()
    return started_ns, engine.run_step(stream, () if stream.ended else items, draining=draining)


def _check_message_size(model: EngineModel) -> None:
    """Refuse limits under which a step's rows could outgrow a message.

    Raises:
        UserError: names the flags and the sizes.
    """
    rows = model.slot_count * max(model.max_prefill_chunk, model.max_draft_count + 1)
    size = rows * max(row_format.row_bytes for row_format in model.row_formats)
    if size > MAX_MESSAGE_BYTES * 15 // 16:
        raise UserError(
            f"--max-prefill-chunk {model.max_prefill_chunk} of {model.slot_count} slots is "
            f"{size} bytes of rows a step; a message holds {MAX_MESSAGE_BYTES}"
        )


def _attributes(item: pb.VerifyItem, result: ItemResult) -> dict[str, telemetry.AttributeValue]:
    attributes: dict[str, telemetry.AttributeValue] = {
        telemetry.KEY_SESSION: str(item.session),
        telemetry.KEY_ACTION: item.WhichOneof("action") or "none",
        telemetry.KEY_COMMITTED_LENGTH: result.committed_length,
    }
    if isinstance(result.outcome, VerifyOutcome):
        attributes[telemetry.KEY_DRAFT_COUNT] = len(item.verify.draft_token_ids)
        attributes[telemetry.KEY_ACCEPTED_COUNT] = result.outcome.accepted_count
    if result.error is not None:
        attributes[telemetry.KEY_ERROR_REASON] = result.error.reason
    return attributes


async def serve_verifier(
    config: VerifierConfig,
    load: Callable[[], Engine],
    *,
    on_ready: Callable[[str], None] | None = None,
    on_stop: Callable[[], None] = lambda: None,
    lifecycle: Lifecycle | None = None,
) -> None:
    """Serve the Verifier service until SIGTERM or a fault; errors as `serving.serve`.

    `on_stop` is called before the engine's thread is waited for: it ends a `load` that takes long.
    """
    lifecycle = lifecycle or Lifecycle()
    registry = new_registry()
    tracing = telemetry.setup_tracing("verifier", config.otlp_endpoint, config.trace_file)
    servicer = VerifierServicer(lifecycle, tracing, registry)
    register = partial(verifier_pb2_grpc.add_VerifierServicer_to_server, servicer)
    try:
        await serving.serve(
            address=config.address,
            services=[ServiceEntry(name=SERVICE_NAME, register=register)],
            lifecycle=lifecycle,
            prepare=partial(servicer.load, load),
            on_ready=on_ready,
            metrics_address=config.metrics_address,
            registry=registry,
        )
    finally:
        on_stop()
        servicer.close()
        tracing.close()
