"""Tracing that is on: the OpenTelemetry SDK behind `telemetry.Tracing`, and its file exporter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import DEFAULT_ON
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from splitspec.errors import UserError
from splitspec.telemetry import (
    KEY_ERROR_REASON,
    Attributes,
    AttributeValue,
    Span,
    Tracing,
    format_traceparent,
    parse_traceparent,
)

FILE_DELAY_MS = 200
"""A person tails the file: spans may lag that much. OTLP keeps the SDK's own five seconds."""
OTLP_TIMEOUT_SECONDS = 2
"""One export's limit, retries included: a collector that is gone must not hold up a process's exit
(6.9 s with the SDK's default of ten)."""


class _SdkSpan(Span):
    def __init__(self, span: trace.Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = format_traceparent(
            context.trace_id, context.span_id, context.trace_flags
        )

    def set(self, key: str, value: AttributeValue) -> None:
        self._span.set_attribute(key, value)

    def fail(self, reason: str, message: str) -> None:
        self._span.set_attribute(KEY_ERROR_REASON, reason)
        self._span.set_status(Status(StatusCode.ERROR, message))

    def end(self) -> None:
        self._span.end()


class SdkTracing(Tracing):
    """Spans to an OTLP endpoint, to a JSON-lines file, or to both."""

    enabled = True

    def __init__(
        self, service_name: str, otlp_endpoint: str | None, trace_file: Path | None
    ) -> None:
        resource = Resource.create({SERVICE_NAME: service_name})
        # DEFAULT_ON: a parent that was not sampled keeps its trace unsampled here too.
        self._provider = TracerProvider(resource=resource, sampler=DEFAULT_ON)
        if otlp_endpoint is not None:
            insecure = not otlp_endpoint.startswith("https://")
            exporter = OTLPSpanExporter(
                endpoint=otlp_endpoint, insecure=insecure, timeout=OTLP_TIMEOUT_SECONDS
            )
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        if trace_file is not None:
            self._provider.add_span_processor(
                BatchSpanProcessor(
                    JsonLinesExporter(trace_file), schedule_delay_millis=FILE_DELAY_MS
                )
            )
        self._tracer = self._provider.get_tracer("splitspec")

    def start(
        self,
        name: str,
        *,
        parent: str = "",
        attributes: Attributes | None = None,
    ) -> Span:
        span = self._tracer.start_span(name, context=_context(parent), attributes=attributes)
        return _SdkSpan(span)

    def record(
        self,
        name: str,
        *,
        parent: str,
        start_ns: int,
        end_ns: int,
        attributes: Attributes | None = None,
        links: Sequence[str] = (),
    ) -> None:
        linked = [Link(context) for link in links if (context := _span_context(link))]
        span = self._tracer.start_span(
            name,
            context=_context(parent),
            attributes=attributes,
            links=linked,
            start_time=start_ns,
        )
        span.end(end_ns)

    def close(self) -> None:
        self._provider.shutdown()


def _span_context(traceparent: str) -> SpanContext | None:
    parsed = parse_traceparent(traceparent)
    if parsed is None:
        return None
    trace_id, span_id, flags = parsed
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))


def _context(traceparent: str) -> Context:
    """Return a context that holds the parent and nothing of the caller's ambient context."""
    parent = _span_context(traceparent)
    if parent is None:
        return Context()
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


class JsonLinesExporter(SpanExporter):
    """Append one JSON object a finished span to a file."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write trace file {path}: {error.strerror}") from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write and flush `spans`."""
        try:
            self._file.writelines(json.dumps(span_object(span)) + "\n" for span in spans)
            self._file.flush()
        except OSError:  # a full disk loses traces, never answers
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        self._file.close()


def span_object(span: ReadableSpan) -> dict[str, Any]:
    """Return what one line of a trace file holds: ids in lower-case hex, times in Unix ns."""
    context = span.get_span_context()
    assert context is not None
    record = {
        "name": span.name,
        "service": span.resource.attributes[SERVICE_NAME],
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else None,
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "attributes": dict(span.attributes or {}),
        "links": [
            {"trace_id": f"{link.context.trace_id:032x}", "span_id": f"{link.context.span_id:016x}"}
            for link in span.links
        ],
    }
    if span.status.status_code is StatusCode.ERROR:
        record["error"] = span.status.description
    return record
