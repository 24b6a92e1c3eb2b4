"""What the drafter reports besides what every model service does."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter

from drafter_service.engine import StepResult
from splitspec.metrics import ModelServiceMetrics


class DrafterMetrics:
    """Counters of one drafter process. Label children are looked up once: a step is short."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._service = ModelServiceMetrics(registry)
        self._passes = Counter(
            "draft_passes", "Draft passes; none where no model drafts.", registry=registry
        )
        self._phases = [self._service.step_seconds.labels(phase) for phase in ("queue", "device")]

    def watch_slots(self, used_count: Callable[[], int]) -> None:
        """Report `used_count()` whenever slots_in_use is scraped."""
        self._service.slots_in_use.set_function(used_count)

    def count(self, actions: Iterable[str], step: StepResult, queue_ns: int) -> None:
        """Count one answered step; `actions` are those of its items."""
        self._service.steps.inc()
        self._passes.inc(step.pass_count)
        for phase, spent in zip(self._phases, (queue_ns, step.device_ns), strict=True):
            phase.observe(spent / 1e9)
        for action, count in Counts(actions).items():
            self._service.step_items.labels(action).inc(count)
        for result in step.results:
            if result.error is not None:
                self._service.item_errors.labels(result.error.reason).inc()
