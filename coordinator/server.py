"""The Generation service: check the request, run its rounds, stream what they emit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from coordinator import rounds
from coordinator.config import CoordinatorConfig
from coordinator.links import Links, ended
from coordinator.output import Output
from coordinator.requests import Plan, plan_request
from coordinator.sessions import Admission, Session
from coordinator.statistics import (
    Meters,
    RequestClock,
    describe_finish,
    finish_message,
    request_attributes,
)
from coordinator.template import ChatTemplate
from coordinator.text import ModelText
from splitspec import PROTOCOL_VERSION, serving, telemetry
from splitspec.checks import refuse_unknown_within
from splitspec.errors import ModelMismatch, SplitspecError, UserError
from splitspec.folders import model_folder
from splitspec.metrics import CoordinatorMetrics, new_registry
from splitspec.serving import Lifecycle, ServiceEntry
from splitspec.v1 import generation_pb2 as pb
from splitspec.v1 import generation_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE_NAME = "splitspec.v1.Generation"
LONG_REQUEST_BYTES = 16 * 1024
WRITE_DELAY_SECONDS = 0.001
"""A response costs about as much as a step. After the first one they wait until the services are
busy with the next round; rounds shorter than this share a response."""


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Serves any number of clients from one verifier and at most one drafter."""

    def __init__(
        self,
        config: CoordinatorConfig,
        text: ModelText,
        lifecycle: Lifecycle,
        tracing: telemetry.Tracing,
        registry: CollectorRegistry,
    ) -> None:
        self._config = config
        self._text = text
        self._template = ChatTemplate(text)
        self._lifecycle = lifecycle
        self._tracing = tracing
        self._admission = Admission(
            queue_limit=config.queue_limit, wait_seconds=config.queue_seconds
        )
        metrics = CoordinatorMetrics(registry)
        metrics.requests_running.set_function(lambda: self._admission.running_count)
        metrics.requests_waiting.set_function(lambda: self._admission.waiting_count)
        metrics.slots_in_use.set_function(lambda: self._admission.running_count)
        self._meters = Meters(metrics)
        self._health: asyncio.Task[None] | None = None
        self._calls: set[_Answer] = set()
        self._call_ended = asyncio.Event()
        self.links = Links(
            config,
            tokenizer_hash=text.tokenizer_hash,
            on_change=self._links_changed,
            on_step=self._meters.step,
        )

    async def connect(self) -> None:
        """Wait for the verifier, and a moment for the drafter.

        Raises:
            UserError: a peer that is there does not fit; names the field and both values.
        """
        try:
            await self.links.connect()
        except ModelMismatch as error:
            raise UserError(error.message) from error

    async def finish(self) -> None:
        """Return when no call is in flight."""
        while self._calls:
            self._call_ended.clear()
            await self._call_ended.wait()

    async def GetModel(
        self, request: pb.GenerationGetModelRequest, context: Any
    ) -> pb.GenerationGetModelResponse:
        """Say what is being served."""
        del context
        refuse_unknown_within("request", request)
        self._lifecycle.require_serving()
        target = self.links.target
        return pb.GenerationGetModelResponse(
            protocol_version=PROTOCOL_VERSION,
            model_id=target.model_id,
            model_hash=target.model_hash,
            max_context_length=target.max_context_length,
            vocab_size=target.vocab_size,
            draft_method=self.links.draft_method,
            max_draft_count=target.max_draft_count,
            precision=target.precision,
            slot_count=target.slot_count,
        )

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Generate one answer. A client that goes away ends its session at once (law L7)."""
        clock = RequestClock()
        self._lifecycle.require_serving()
        plan = await self._plan(request)
        answer = _Answer(plan, self._text, clock)
        self._calls.add(answer)
        span = self._start_span(plan, context)
        work = asyncio.create_task(self._run(plan, answer, span))
        try:
            while (response := await answer.next_response()) is not None:
                yield response
            finish = work.result()
            yield pb.GenerateResponse(finish=finish)
            self._meters.finished(finish)
            describe_finish(span, finish, self.links.target.model_id)
        except SplitspecError as error:
            self._meters.failed(error.reason.lower())
            span.fail(error.reason, error.message)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._meters.failed("cancelled")
            span.fail("CANCELLED", "the client went away")
            raise
        finally:
            await ended(work)
            span.end()
            self._calls.remove(answer)
            self._call_ended.set()

    async def _plan(self, request: pb.GenerateRequest) -> Plan:
        plan = partial(
            plan_request,
            request,
            text=self._text,
            template=self._template,
            limits=self.links.limits(),
        )
        # A long prompt takes long to tokenize; the tokenizer lets go of the interpreter.
        return await asyncio.to_thread(plan) if request.ByteSize() > LONG_REQUEST_BYTES else plan()

    def _start_span(self, plan: Plan, context: Any) -> telemetry.Span:
        if not self._tracing.enabled:
            return telemetry.NO_SPAN
        metadata = dict(context.invocation_metadata() or ())
        parent = metadata.get(telemetry.TRACEPARENT_KEY, "")
        return self._tracing.start(
            telemetry.SPAN_GENERATE,
            parent=parent if telemetry.parse_traceparent(parent) else "",
            attributes=request_attributes(plan, self.links.target.model_id),
        )

    async def _run(self, plan: Plan, answer: _Answer, span: telemetry.Span) -> pb.Finish:
        try:
            queue = self._tracing.start(telemetry.SPAN_QUEUE, parent=span.traceparent)
            async with self._admission.slot(queue.end):
                return await self._generate(plan, answer, span)
        finally:
            answer.close()

    async def _generate(self, plan: Plan, answer: _Answer, span: telemetry.Span) -> pb.Finish:
        session = Session(
            tokens=list(plan.prompt_ids),
            prompt_length=len(plan.prompt_ids),
            output_limit=plan.output_limit,
            draft_count=plan.draft_count,
            sampling=plan.sampling,
            tracing=self._tracing,
            span=span,
        )
        method = self.links.draft_method
        emit: rounds.Emit = answer.emit
        if self._config.metrics_address is not None:
            emit = self._meters.round_meter(session, emit)
        try:
            with self.links.lanes(plan.draft_count) as (verifier, drafter):
                reason = await rounds.generate(session, verifier, drafter, emit)
        finally:
            self._meters.session_ended(session, answer.output.count)
        method = self.links.draft_method or method
        return finish_message(session, answer.clock, answer.output.count, reason, method)

    def _links_changed(self) -> None:
        """Follow the verifier: its slots, and health that says SERVING only while it is there."""
        link = self.links.verifier
        if link.connected:
            self._admission.resize(link.model.slot_count)
        if self._lifecycle.set_health is not None and not self._lifecycle.draining:
            self._health = asyncio.create_task(_report(self._lifecycle, link))


async def _report(lifecycle: Lifecycle, link: Any) -> None:
    if lifecycle.set_health is not None:
        await lifecycle.set_health(link.connected)


class _Answer:
    """Between a request's rounds, which never wait for the client, and its stream."""

    def __init__(self, plan: Plan, text: ModelText, clock: RequestClock) -> None:
        self.output = Output(
            text,
            limit=plan.output_limit,
            stop_token_ids=plan.stop_token_ids,
            stops=plan.stops,
        )
        self.clock = clock
        self._changed = asyncio.Event()
        self._closed = False
        self._begun = False

    def emit(self, ids: Sequence[int]) -> pb.FinishReason | None:
        """Take a round's tokens."""
        if ids:
            self.clock.token()
        finish = self.output.push(ids)
        self._changed.set()
        return finish

    def close(self) -> None:
        """Say that no more comes."""
        self._closed = True
        self._changed.set()

    async def next_response(self) -> pb.GenerateResponse | None:
        """Return what has come since the last call; None at the end."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not self._closed:
                await asyncio.sleep(WRITE_DELAY_SECONDS if self._begun else 0)
            self._begun = True
            ids, text = self.output.take()
            if self._closed:
                self._changed.set()
            if ids or text:
                return pb.GenerateResponse(token_ids=ids, text_delta=text)
            if self._closed:
                return None


async def serve_coordinator(
    config: CoordinatorConfig,
    lifecycle: Lifecycle,
    *,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve Generation until the process is told to stop.

    Raises:
        UserError: the model folder, an address or a peer that is there at start does not fit.
    """
    text = ModelText.load(model_folder(config.model, config.cache_dir))
    registry = new_registry()
    tracing = telemetry.setup_tracing("coordinator", config.otlp_endpoint, config.trace_file)
    servicer = GenerationServicer(config, text, lifecycle, tracing, registry)
    register = partial(generation_pb2_grpc.add_GenerationServicer_to_server, servicer)
    try:
        await serving.serve(
            address=config.address,
            services=[ServiceEntry(name=SERVICE_NAME, register=register)],
            lifecycle=lifecycle,
            prepare=servicer.connect,
            finish=servicer.finish,
            on_ready=on_ready,
            metrics_address=config.metrics_address,
            registry=registry,
        )
    finally:
        await servicer.links.close()
        tracing.close()
