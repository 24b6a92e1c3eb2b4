"""One trace a request across the three processes, written to JSON-lines files (design 10)."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.system.cluster import Cluster, free_address, scrape, wait_until


def _spans(*files: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_each_of_two_requests_at_once_is_one_trace_over_three_processes_and_shared_steps_link(
    tmp_path: Path, tiny_model: Path, program_cache: Path
) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("verifier", "ngram", "coordinator")}
    flags = ["--runtime", "torch", "--precision", "fp32", "--max-context-length", "256"]
    flags += ["--trace-file", str(files["verifier"])]
    cluster = Cluster(tmp_path, tiny_model, flags, program_cache, gated=True)
    metrics = free_address()
    try:
        cluster.start_verifier()
        cluster.start_ngram("ngram", "--trace-file", str(files["ngram"]))
        name = cluster.start_coordinator(
            "ngram", "--trace-file", str(files["coordinator"]), "--metrics-address", metrics
        )
        request: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
        # The first request's pass is held until the second one is there. The second one is
        # target-only: it is ready again at once, so what the first one sends shares its steps.
        with (
            ThreadPoolExecutor(1) as pool,
            cluster.answering(name, 12, text="a b a b a b", draft_count=3, **request) as running,
        ):
            second = pool.submit(
                cluster.generate, name, text="c d c d c d", draft_count=0, **request
            )
            wait_until(lambda: scrape(metrics)["num_requests_running"] == 2, "two requests run")
            cluster.gate.open()
            second.result()
        answers = [running.result, second.result()]
        rounds = sum(answer.finish.statistics.round_count for answer in answers)
        limit = time.monotonic() + 10
        while time.monotonic() < limit:
            spans = _spans(*files.values())
            done = [s for s in spans if s["name"] == "splitspec.generate"]
            if len(done) == 2 and sum(s["name"] == "verifier.step" for s in spans) >= rounds:
                break
            time.sleep(0.1)
    finally:
        cluster.close()
    roots = {span["trace_id"]: span for span in spans if span["name"] == "splitspec.generate"}
    assert len(roots) == 2
    ids = {span["span_id"]: span for span in spans}
    names = {span["name"] for span in spans}
    assert names >= {"queue", "prefill", "draft", "verify", "drafter.step", "verifier.step"}
    for span in spans:
        if span["name"] in ("queue", "prefill", "draft", "verify"):
            assert ids[span["parent_id"]]["name"] == "splitspec.generate"
            assert span["trace_id"] in roots
        if span["name"] == "verifier.step":
            assert ids[span["parent_id"]]["name"] in ("prefill", "verify")
            assert ids[span["parent_id"]]["trace_id"] == span["trace_id"]
        if span["name"] == "drafter.step":
            assert ids[span["parent_id"]]["name"] in ("prefill", "draft")
    verifies = [span for span in spans if span["name"] == "verify"]
    assert len(verifies) == rounds
    _check_device_seconds(spans, verifies)
    _check_links(spans, ids, set(roots))


def _check_device_seconds(spans: list[dict[str, Any]], verifies: list[dict[str, Any]]) -> None:
    """Every verify has one server-side child, which says what the device did for it."""
    steps = [span for span in spans if span["name"] == "verifier.step"]
    for verify in verifies:
        (step,) = [s for s in steps if s["parent_id"] == verify["span_id"]]
        assert step["attributes"]["splitspec.action"] == "verify"
        device_seconds = step["attributes"]["splitspec.step.device_seconds"]
        assert 0 < device_seconds <= (verify["end_ns"] - verify["start_ns"]) / 1e9


def _check_links(
    spans: list[dict[str, Any]], ids: dict[str, dict[str, Any]], traces: set[str]
) -> None:
    """Two requests that a step served link each other: their spans, in the other's trace."""
    shared: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for span in spans:
        if span["name"] == "verifier.step":
            shared[span["attributes"]["splitspec.step"]].append(span)
    both = [step for step in shared.values() if {s["trace_id"] for s in step} == traces]
    assert len(both) > 5
    for step in both:
        linked: dict[str, set[str]] = defaultdict(set)
        for span in step:
            linked[span["trace_id"]] |= {link["trace_id"] for link in span["links"]}
        for trace_id in traces:
            assert traces - {trace_id} <= linked[trace_id]
        for span in step:
            for link in span["links"]:
                assert ids[link["span_id"]]["trace_id"] == link["trace_id"]
    alone = [step for step in shared.values() if len({s["trace_id"] for s in step}) == 1]
    for step in alone:
        assert all({link["trace_id"] for link in s["links"]} <= {s["trace_id"]} for s in step)
