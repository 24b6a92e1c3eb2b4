"""What the verifier reports besides what every model service does."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from splitspec.metrics import ModelServiceMetrics
from verifier_service.steps import Item, StepResult, VerifyItem, VerifyOutcome

_WINDOW_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)


class VerifierMetrics:
    """Counters of one verifier process. Label children are looked up once: a step is short."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._service = ModelServiceMetrics(registry)
        self._passes = Counter(
            "target_passes", "Target passes; one a step with model items (L5).", registry=registry
        )
        self._row_bytes = Counter(
            "committed_row_bytes",
            "Rows copied to the host: committed ones (L6).",
            registry=registry,
        )
        self._window_rows = Histogram(
            "window_rows",
            "Rows of a verified window: the pending token and its draft tokens (L5).",
            buckets=_WINDOW_ROWS,
            registry=registry,
        )
        wire = Counter(
            "wire_bytes", "Serialized step bytes.", labelnames=["kind"], registry=registry
        )
        self._requests = wire.labels("verify_request")
        self._responses = wire.labels("verify_response")
        self._phases = [
            self._service.step_seconds.labels(phase) for phase in ("queue", "device", "copy")
        ]

    def watch_slots(self, used_count: Callable[[], int]) -> None:
        """Report `used_count()` whenever slots_in_use is scraped."""
        self._service.slots_in_use.set_function(used_count)

    def count(
        self, items: Sequence[Item], step: StepResult, queue_ns: int, wire_bytes: tuple[int, int]
    ) -> None:
        """Count one answered step; `wire_bytes` are the request's and the response's."""
        self._service.steps.inc()
        self._passes.inc(step.pass_count)
        self._row_bytes.inc(step.row_bytes)
        self._requests.inc(wire_bytes[0])
        self._responses.inc(wire_bytes[1])
        nanoseconds = (queue_ns, step.device_ns, step.copy_ns)
        for phase, spent in zip(self._phases, nanoseconds, strict=True):
            phase.observe(spent / 1e9)
        for action, count in collections.Counter(item.action for item in items).items():
            self._service.step_items.labels(action).inc(count)
        for item, result in zip(items, step.results, strict=True):
            if isinstance(item, VerifyItem) and isinstance(result.outcome, VerifyOutcome):
                self._window_rows.observe(len(item.draft_token_ids) + 1)
            if result.error is not None:
                self._service.item_errors.labels(result.error.reason).inc()
