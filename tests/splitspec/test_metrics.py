"""Metrics: the names that users know, and the page that shows them."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from splitspec.errors import UserError
from splitspec.metrics import (
    REPLAY_CAUSES,
    CoordinatorMetrics,
    ModelServiceMetrics,
    new_registry,
    serving_metrics,
)


def names(registry: CollectorRegistry) -> set[str]:
    text = generate_latest(registry).decode()
    families = text_string_to_metric_families(text)
    return {sample.name for family in families for sample in family.samples}


def test_the_coordinator_reports_speculation_under_known_names() -> None:
    registry = new_registry()
    metrics = CoordinatorMetrics(registry)
    metrics.accepted_tokens_per_pos.labels(0).inc()
    metrics.wire_bytes.labels("draft_request").inc(10)
    metrics.round_seconds.labels("verify").observe(0.01)
    metrics.replays.labels(REPLAY_CAUSES[0]).inc()
    metrics.requests.labels("stop").inc()
    assert names(registry) >= {
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "wire_bytes_total",
        "round_seconds_bucket",
        "draft_tokens_chosen_bucket",
        "slots_in_use",
        "replays_total",
        "requests_total",
        "process_cpu_seconds_total",
    }
    page = generate_latest(registry).decode()
    assert 'spec_decode_num_accepted_tokens_per_pos_total{position="0"} 1.0' in page
    assert 'wire_bytes_total{kind="draft_request"} 10.0' in page
    assert 'round_seconds_bucket{le="0.01",phase="verify"} 1.0' in page


def test_every_process_counts_for_itself() -> None:
    registries = [new_registry(), new_registry()]
    metrics = [ModelServiceMetrics(registry) for registry in registries]
    metrics[0].steps.inc()
    pages = [generate_latest(registry).decode() for registry in registries]
    assert "steps_total 1.0" in pages[0]
    assert "steps_total 0.0" in pages[1]


def test_the_page_is_served_while_the_block_runs_and_no_longer() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    registry = new_registry()
    ModelServiceMetrics(registry).slots_in_use.set(3)
    with serving_metrics(address, registry):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
            assert page.headers["content-type"].startswith("text/plain")
            assert "slots_in_use 3.0" in page.read().decode()
        with (
            pytest.raises(UserError, match="Address already in use"),
            serving_metrics(address, registry),
        ):
            pass
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=10)


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000"])
def test_a_metrics_address_that_is_none_is_the_users_mistake(address: str) -> None:
    with (
        pytest.raises(UserError, match="is not host:port"),
        serving_metrics(address, new_registry()),
    ):
        pass


def test_without_an_address_nothing_is_served() -> None:
    with serving_metrics(None, new_registry()):
        pass
