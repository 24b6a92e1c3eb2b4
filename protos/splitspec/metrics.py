"""Prometheus metrics: their names, which service reports which, and the HTTP endpoint.

Names that users of inference servers know, base units, `_total` counters (the client library adds
the suffix). One registry a process, made by `new_registry`; nothing is global.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)

from splitspec.errors import UserError

ROUND_PHASES = ("draft", "verify", "wire", "coordinator")
STEP_PHASES = ("queue", "device", "copy")
WIRE_KINDS = ("draft_request", "draft_response", "verify_request", "verify_response")
REPLAY_CAUSES = ("verifier_lost", "verifier_length", "drafter_back")

_FAST = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_SLOW = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)


def new_registry() -> CollectorRegistry:
    """Return a registry that reports the process itself (CPU, memory, files) already."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


class CoordinatorMetrics:
    """What the coordinator reports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self.drafts = counter("spec_decode_num_drafts", "Rounds that verified a draft token.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.accepted_tokens = counter(
            "spec_decode_num_accepted_tokens", "Draft tokens that stood; bonus tokens not counted."
        )
        self.accepted_tokens_per_pos = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Rounds in which the draft token at this position (0-based) stood.",
            "position",
        )
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _SLOW
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Round time divided by the tokens it emitted.", _FAST
        )
        self.request_latency = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", _SLOW
        )
        self.requests = counter(
            "requests", "Requests by how they ended: a finish reason or an error's.", "outcome"
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that started.")
        self.generation_tokens = counter("generation_tokens", "Tokens emitted.")
        self.requests_running = Gauge(
            "num_requests_running", "Requests that hold a slot.", registry=registry
        )
        self.requests_waiting = Gauge(
            "num_requests_waiting", "Requests in the queue.", registry=registry
        )
        self.wire_bytes = counter(
            "wire_bytes", f"Serialized step bytes, by {', '.join(WIRE_KINDS)}.", "kind"
        )
        self.round_seconds = histogram(
            "round_seconds", f"Time of a round in {', '.join(ROUND_PHASES)}.", _FAST, "phase"
        )
        self.draft_tokens_chosen = histogram(
            "draft_tokens_chosen", "Draft tokens in one window.", tuple(map(float, range(17)))
        )
        self.slots_in_use = Gauge("slots_in_use", "Sessions open now.", registry=registry)
        self.replays = counter(
            "replays", f"Sessions replayed from tokens, by {', '.join(REPLAY_CAUSES)}.", "cause"
        )


class ModelServiceMetrics:
    """What a verifier or a drafter reports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.slots_in_use = Gauge("slots_in_use", "Slots held by sessions.", registry=registry)
        self.steps = Counter("steps", "Steps answered.", registry=registry)
        self.step_items = Counter(
            "step_items", "Items run, by action.", ["action"], registry=registry
        )
        self.item_errors = Counter(
            "item_errors", "Items that failed, by reason.", ["reason"], registry=registry
        )
        self.step_seconds = Histogram(
            "step_seconds",
            f"Time of a step in {', '.join(STEP_PHASES)}.",
            ["phase"],
            buckets=_FAST,
            registry=registry,
        )


@contextlib.contextmanager
def serving_metrics(address: str | None, registry: CollectorRegistry | None) -> Iterator[None]:
    """Serve `registry` over HTTP at `address` (host:port) while the block runs; None: do not.

    Raises:
        UserError: the address is malformed or cannot be bound.
    """
    if address is None or registry is None:
        yield
        return
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise UserError(f"metrics address {address!r} is not host:port")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise UserError(f"cannot serve metrics on {address}: {error.strerror}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
