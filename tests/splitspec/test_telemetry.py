"""Traces: the W3C context, the file, and nothing at all when tracing is off."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from splitspec import telemetry as t
from splitspec.errors import UserError

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_traceparent_reads_as_the_library_reads_it() -> None:
    context = TraceContextTextMapPropagator().extract({"traceparent": GOOD})
    (span,) = context.values()
    theirs = span.get_span_context()  # type: ignore[attr-defined]
    ours = t.parse_traceparent(GOOD)
    assert ours == (theirs.trace_id, theirs.span_id, theirs.trace_flags)
    assert t.format_traceparent(*ours) == GOOD


@pytest.mark.parametrize(
    "value",
    [
        "",
        "nonsense",
        GOOD[:-1],
        GOOD.upper(),
        "ff" + GOOD[2:],
        GOOD + "-extra",
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
    ],
)
def test_a_malformed_traceparent_is_no_context(value: str) -> None:
    assert t.parse_traceparent(value) is None


def test_spans_of_one_request_share_a_trace_and_name_their_parents(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "trace.jsonl"
    tracing = t.setup_tracing("coordinator", None, file)
    assert tracing.enabled
    root = tracing.start(t.SPAN_GENERATE, attributes={t.GEN_AI_REQUEST_MODEL: "tiny"})
    child = tracing.start(t.SPAN_VERIFY, parent=root.traceparent)
    child.set(t.KEY_ACCEPTED_COUNT, 3)
    tracing.record(
        t.SPAN_VERIFIER_STEP, parent=child.traceparent, start_ns=1_000, end_ns=5_000, links=[GOOD]
    )
    child.fail("NOT_READY", "the verifier is gone")
    child.end()
    root.end()
    tracing.close()
    step, verify, generate = lines(file)
    assert [span["name"] for span in (step, verify, generate)] == [
        "verifier.step",
        "verify",
        "splitspec.generate",
    ]
    assert {span["trace_id"] for span in (step, verify, generate)} == {generate["trace_id"]}
    assert generate["parent_id"] is None
    assert verify["parent_id"] == generate["span_id"]
    assert step["parent_id"] == verify["span_id"]
    assert (step["start_ns"], step["end_ns"]) == (1_000, 5_000)
    assert step["links"] == [
        {"trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331"}
    ]
    assert verify["attributes"] == {t.KEY_ACCEPTED_COUNT: 3, t.KEY_ERROR_REASON: "NOT_READY"}
    assert verify["error"] == "the verifier is gone"
    assert generate["attributes"] == {"gen_ai.request.model": "tiny"}
    assert generate["service"] == "coordinator"
    trace_id, span_id, flags = t.parse_traceparent(root.traceparent) or (0, 0, 0)
    assert f"{trace_id:032x}" == generate["trace_id"]
    assert f"{span_id:016x}" == generate["span_id"]
    assert flags & 1, "sampled"


def test_spans_reach_the_file_while_the_process_runs(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    tracing = t.setup_tracing("drafter", None, file)
    tracing.start(t.SPAN_QUEUE).end()
    limit = time.monotonic() + 20
    while not file.read_text() and time.monotonic() < limit:
        time.sleep(0.02)
    assert lines(file)[0]["name"] == "queue"
    tracing.close()


def test_a_packed_step_links_the_requests_it_served(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    tracing = t.setup_tracing("drafter", None, file)
    parents = [f"00-{i:032x}-{i:016x}-01" for i in (1, 2, 3)]
    parents[2:2] = ["", "malformed"]
    attributes: list[t.Attributes] = [{"item": i} for i in range(5)]
    tracing.record_step(
        t.SPAN_DRAFTER_STEP, parents=parents, start_ns=1, end_ns=2, attributes=attributes
    )
    tracing.close()
    by_trace = {int(line["trace_id"], 16): line for line in lines(file)}
    assert {trace: line["attributes"]["item"] for trace, line in by_trace.items()} == {
        1: 0,
        2: 1,
        3: 4,
    }
    links = {
        trace: sorted(int(link["trace_id"], 16) for link in line["links"])
        for trace, line in by_trace.items()
    }
    assert links == {1: [2, 3], 2: [1], 3: [1]}


def test_a_trace_that_its_caller_does_not_sample_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    tracing = t.setup_tracing("coordinator", None, file)
    span = tracing.start(t.SPAN_GENERATE, parent=GOOD[:-2] + "00")
    parsed = t.parse_traceparent(span.traceparent)
    assert parsed is not None
    assert not parsed[2] & 1, "sampled"
    span.end()
    tracing.close()
    assert lines(file) == []


def test_tracing_that_is_off_makes_no_span_and_imports_no_sdk() -> None:
    tracing = t.setup_tracing("coordinator", None, None)
    assert tracing is t.OFF
    assert not tracing.enabled
    span = tracing.start(t.SPAN_GENERATE, parent=GOOD)
    assert span is t.NO_SPAN
    assert span.traceparent == ""
    span.set("key", 1)
    span.fail("NOT_READY", "no")
    span.end()
    tracing.close()
    script = "import sys, splitspec.telemetry as t; t.setup_tracing('x', None, None); "
    script += "assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_trace_file_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write trace file"):
        t.setup_tracing("x", None, tmp_path)


class Collector(otlp_grpc.TraceServiceServicer):
    """An OTLP endpoint that keeps what it gets."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def Export(
        self, request: otlp.ExportTraceServiceRequest, context: Any
    ) -> otlp.ExportTraceServiceResponse:
        del context
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.names.extend(span.name for span in scope.spans)
        return otlp.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[str, Collector]]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = Collector()
    otlp_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", servicer
    server.stop(0).wait()


def test_spans_go_to_an_otlp_endpoint_where_one_is_set(collector: tuple[str, Collector]) -> None:
    endpoint, servicer = collector
    tracing = t.setup_tracing("verifier", endpoint, None)
    tracing.start(t.SPAN_VERIFIER_STEP, parent=GOOD).end()
    tracing.close()
    assert servicer.names == ["verifier.step"]
