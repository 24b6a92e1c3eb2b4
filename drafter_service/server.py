"""The Drafter service: decode, call the engine, encode. Holds no tensors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from drafter_service.config import DrafterConfig
from drafter_service.decoding import decode_items, encode_info, encode_results
from drafter_service.drafter import Drafter
from drafter_service.engine import (
    DraftItem,
    Engine,
    Item,
    ItemResult,
    OpenItem,
    RefusedItem,
    ReleaseItem,
    StepResult,
)
from drafter_service.metrics import DrafterMetrics
from drafter_service.sessions import StreamSessions
from graph_runtime.engine_thread import EngineThread
from splitspec import ITEMS_A_SLOT, serving, telemetry
from splitspec.checks import check_step
from splitspec.errors import Draining, EngineFailed
from splitspec.metrics import new_registry
from splitspec.serving import Lifecycle, ServiceEntry
from splitspec.v1 import drafter_pb2 as pb
from splitspec.v1 import drafter_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE_NAME = "splitspec.v1.Drafter"
_CLOSE_SECONDS = 5.0


class DrafterServicer(drafter_pb2_grpc.DrafterServicer):
    """Serves one engine to any number of coordinators, one stream each."""

    def __init__(
        self, lifecycle: Lifecycle, tracing: telemetry.Tracing, registry: CollectorRegistry
    ) -> None:
        self._lifecycle = lifecycle
        self._tracing = tracing
        self._metrics = DrafterMetrics(registry)
        self._thread = EngineThread()
        self._engine: Engine | None = None

    async def load(self, load: Callable[[], Drafter]) -> None:
        """Load the drafter on the engine's thread; calls are NOT_READY until then.

        Raises:
            UserError: what is wrong with the draft model or a flag.
        """
        engine = Engine(await self._thread.call(load))
        self._metrics.watch_slots(lambda: engine.used_slot_count)
        self._engine = engine

    def close(self) -> None:
        """End the engine's thread."""
        self._thread.close(_CLOSE_SECONDS)

    async def GetModel(
        self, request: pb.DrafterGetModelRequest, context: Any
    ) -> pb.DrafterGetModelResponse:
        """Answer the handshake."""
        del request, context
        return encode_info(self._ready_engine().info)

    async def RunSteps(self, request_iterator: Any, context: Any) -> None:
        """Answer each step of one stream, in order; at its end its slots are free (law L7)."""
        del request_iterator  # read through the lifecycle, which ends idle streams at a drain
        engine = self._ready_engine()
        stream = StreamSessions()
        last_step = 0
        try:
            while True:
                request = await self._lifecycle.next_request(context, idle=not len(stream))
                if request is None:
                    return
                check_step(request, last_step, ITEMS_A_SLOT * engine.info.slot_count)
                last_step = request.step
                await context.write(await self._run(engine, stream, request))
        finally:
            self._release_all(engine, stream)

    def _ready_engine(self) -> Engine:
        self._lifecycle.require_serving()
        assert self._engine is not None
        return self._engine

    async def _run(
        self, engine: Engine, stream: StreamSessions, request: pb.DrafterRunStepsRequest
    ) -> pb.DrafterRunStepsResponse:
        began, began_ns = time.perf_counter_ns(), time.time_ns()
        items = decode_items(request.items, engine.info)
        if self._lifecycle.draining:
            items = [_refuse_open(item) for item in items]
        step = await self._call(engine, stream, items)
        response = pb.DrafterRunStepsResponse(
            step=request.step, results=encode_results(step.results)
        )
        queue_ns = time.perf_counter_ns() - began - step.device_ns
        response.timings.queue.FromNanoseconds(queue_ns)
        response.timings.device.FromNanoseconds(step.device_ns)
        response.timings.copy.FromNanoseconds(0)
        self._metrics.count(map(_action, items), step, queue_ns)
        if self._tracing.enabled:
            self._trace(request, step, began_ns, queue_ns)
        return response

    async def _call(
        self, engine: Engine, stream: StreamSessions, items: Sequence[Item]
    ) -> StepResult:
        """Run a step where the drafter wants to run; anything it raises is a fault of the engine.

        Raises:
            EngineFailed: the engine failed, now or before; the process is on its way out.
        """
        if self._lifecycle.failure is not None:
            raise self._lifecycle.failure
        try:
            if engine.info.instant:
                return engine.run(stream, items)
            return await self._thread.call(partial(engine.run, stream, items))
        except Exception as error:
            logger.error("the drafter failed", exc_info=error)
            failure = EngineFailed(f"the drafter failed: {type(error).__name__}: {error}"[:500])
            self._lifecycle.fail(failure)
            raise failure from error

    def _release_all(self, engine: Engine, stream: StreamSessions) -> None:
        if not len(stream) and engine.info.instant:
            return
        if engine.info.instant:
            engine.release_all(stream)
            return
        # Not awaited: this call may be cancelled already. The thread runs it after the step that
        # may still be in flight, so nothing writes to a slot that is free.
        self._thread.post(partial(engine.release_all, stream))

    def _trace(
        self,
        request: pb.DrafterRunStepsRequest,
        step: StepResult,
        began_ns: int,
        queue_ns: int,
    ) -> None:
        self._tracing.record_step(
            telemetry.SPAN_DRAFTER_STEP,
            parents=[item.traceparent for item in request.items],
            start_ns=began_ns,
            end_ns=began_ns + queue_ns + step.device_ns,
            attributes=[
                _attributes(request, item, result, step.device_ns, queue_ns)
                for item, result in zip(request.items, step.results, strict=True)
            ],
        )


def _attributes(
    request: pb.DrafterRunStepsRequest,
    item: pb.DraftItem,
    result: ItemResult,
    device_ns: int,
    queue_ns: int,
) -> dict[str, telemetry.AttributeValue]:
    attributes: dict[str, telemetry.AttributeValue] = {
        # NOTE: attributes are signed 64-bit; a peer's number may not fit one.
        telemetry.KEY_STEP: str(request.step),
        telemetry.KEY_SESSION: str(item.session),
        telemetry.KEY_ITEM_COUNT: len(request.items),
        telemetry.KEY_ACTION: item.WhichOneof("action") or "none",
        telemetry.KEY_CONTEXT_LENGTH: result.context_length,
        telemetry.KEY_DRAFT_COUNT: len(result.draft_token_ids or ()),
        telemetry.KEY_QUEUE_SECONDS: queue_ns / 1e9,
        telemetry.KEY_DEVICE_SECONDS: device_ns / 1e9,
        telemetry.KEY_COPY_SECONDS: 0.0,
    }
    if result.error is not None:
        attributes[telemetry.KEY_ERROR_REASON] = result.error.reason
    return attributes


def _action(item: Item) -> str:
    match item:
        case DraftItem():
            return "draft"
        case OpenItem():
            return "open"
        case ReleaseItem():
            return "release"
    return "refused"


def _refuse_open(item: Item) -> Item:
    if not isinstance(item, OpenItem):
        return item
    error = Draining("the drafter is shutting down: it opens no session")
    return RefusedItem(session_id=item.session_id, error=error)


async def serve_drafter(
    config: DrafterConfig,
    load: Callable[[], Drafter],
    *,
    on_ready: Callable[[str], None] | None = None,
    on_stop: Callable[[], None] = lambda: None,
) -> None:
    """Serve the drafter that `load` returns until the process is told to stop.

    `on_stop` is called before the engine's thread is waited for: it ends a `load` that takes long.

    Raises:
        UserError: an address or a file that `config` names cannot be used.
        EngineFailed: the drafter failed.
    """
    lifecycle = Lifecycle()
    registry = new_registry()
    tracing = telemetry.setup_tracing("drafter", config.otlp_endpoint, config.trace_file)
    servicer = DrafterServicer(lifecycle, tracing, registry)
    register = partial(drafter_pb2_grpc.add_DrafterServicer_to_server, servicer)
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
