"""Traces: span names, attribute keys, and what a process calls to make spans.

One trace a request: `splitspec.generate` holds `queue`, `prefill` and, per round, `draft` and
`verify`; inside those the services' own `drafter.step` and `verifier.step`. The context crosses the
wire as one W3C traceparent an item. With tracing off nothing is imported and no span object exists:
`OFF.start` returns the one `NO_SPAN`, whose traceparent is the empty string of an untraced item.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

SPAN_GENERATE: Final = "splitspec.generate"
SPAN_QUEUE: Final = "queue"
SPAN_PREFILL: Final = "prefill"
SPAN_DRAFT: Final = "draft"
SPAN_VERIFY: Final = "verify"
SPAN_DRAFTER_STEP: Final = "drafter.step"
SPAN_VERIFIER_STEP: Final = "verifier.step"

# Our own keys. Any span of a round or a step:
KEY_SESSION: Final = "splitspec.session"
KEY_STEP: Final = "splitspec.step"
KEY_ACTION: Final = "splitspec.action"
KEY_ITEM_COUNT: Final = "splitspec.step.item_count"
KEY_QUEUE_SECONDS: Final = "splitspec.step.queue_seconds"
KEY_DEVICE_SECONDS: Final = "splitspec.step.device_seconds"
KEY_COPY_SECONDS: Final = "splitspec.step.copy_seconds"
KEY_COMMITTED_LENGTH: Final = "splitspec.committed_length"
KEY_CONTEXT_LENGTH: Final = "splitspec.context_length"
KEY_DRAFT_COUNT: Final = "splitspec.draft_token_count"
KEY_ACCEPTED_COUNT: Final = "splitspec.accepted_token_count"
KEY_ERROR_REASON: Final = "error.type"
# On splitspec.generate:
KEY_ROUND_COUNT: Final = "splitspec.round_count"
KEY_REPLAY_COUNT: Final = "splitspec.replay_count"
KEY_DRAFT_METHOD: Final = "splitspec.draft_method"
KEY_MEAN_ACCEPTANCE_LENGTH: Final = "splitspec.mean_acceptance_length"

# OpenTelemetry's GenAI semantic conventions, on splitspec.generate.
GEN_AI_OPERATION: Final = "gen_ai.operation.name"
"""OPERATION_CHAT for a conversation, OPERATION_TEXT for text or token ids."""
OPERATION_CHAT: Final = "chat"
OPERATION_TEXT: Final = "text_completion"
GEN_AI_PROVIDER: Final = "gen_ai.provider.name"
PROVIDER: Final = "splitspec"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
"""NOTE: an attribute is a signed 64-bit integer; seeds of 2**63 and above are set as a string."""
GEN_AI_REQUEST_STOP: Final = "gen_ai.request.stop_sequences"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
"""Seconds, float."""
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[int]
Attributes = Mapping[str, AttributeValue]

TRACEPARENT_KEY: Final = "traceparent"
"""Metadata key of a user's own trace context on Generation.Generate."""
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def parse_traceparent(value: str) -> tuple[int, int, int] | None:
    """Return (trace id, span id, flags) of a W3C traceparent; None when it is empty or malformed.

    A peer's malformed context is ignored, as the W3C recommendation asks: it only costs a trace.
    """
    match = _TRACEPARENT.fullmatch(value) if value else None
    if match is None or match[1] == "ff":
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    return (trace_id, span_id, int(match[4], 16)) if trace_id and span_id else None


def format_traceparent(trace_id: int, span_id: int, flags: int) -> str:
    """Return the W3C traceparent (version 00) of a span."""
    return f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"


class Span:
    """One span. This one is the span that does not exist: everything is a no-op."""

    traceparent: str = ""
    """Context to put into an item that this span covers, or to give as `parent`."""

    def set(self, key: str, value: AttributeValue) -> None:
        """Set an attribute."""

    def fail(self, reason: str, message: str) -> None:
        """Mark the span as failed; `reason` is a SplitspecError's."""

    def end(self) -> None:
        """End the span now."""


NO_SPAN: Final = Span()


class Tracing:
    """What makes a process's spans. This one is off."""

    enabled: bool = False
    """Guard with it what is only computed for spans."""

    def start(
        self,
        name: str,
        *,
        parent: str = "",
        attributes: Attributes | None = None,
    ) -> Span:
        """Start a span under the traceparent `parent`; empty: the root of a new trace."""
        del name, parent, attributes
        return NO_SPAN

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
        """Record a span that is already over; `links` are traceparents."""

    def record_step(
        self,
        name: str,
        *,
        parents: Sequence[str],
        start_ns: int,
        end_ns: int,
        attributes: Sequence[Attributes],
    ) -> None:
        """Record a packed step: one span in the trace of each item that is traced.

        `parents` and `attributes` go by item. The first traced item's span links the other
        requests that the step served and they link it, so every request is one or two links from
        its step mates at 2 N links a step instead of N * N.
        """
        traced = [i for i, parent in enumerate(parents) if parse_traceparent(parent)]
        for i in traced:
            others = traced[1:] if i == traced[0] else traced[:1]
            self.record(
                name,
                parent=parents[i],
                start_ns=start_ns,
                end_ns=end_ns,
                attributes=attributes[i],
                links=[parents[j] for j in others],
            )

    def close(self) -> None:
        """Write out what is buffered."""


OFF: Final = Tracing()


def setup_tracing(service_name: str, otlp_endpoint: str | None, trace_file: Path | None) -> Tracing:
    """Return the process's tracing: `OFF` unless spans have somewhere to go.

    Raises:
        UserError: `trace_file` cannot be written.
    """
    if otlp_endpoint is None and trace_file is None:
        return OFF
    from splitspec.tracing_sdk import SdkTracing  # the SDK is imported only where tracing is on

    return SdkTracing(service_name, otlp_endpoint, trace_file)
