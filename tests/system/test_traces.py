"""One trace a request across the three processes, written to JSON-lines files (design 10)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.system.cluster import Cluster


def _spans(*files: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_one_request_is_one_trace_over_three_processes(
    tmp_path: Path, tiny_model: Path, program_cache: Path
) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("verifier", "ngram", "coordinator")}
    flags = ["--runtime", "torch", "--precision", "fp32", "--max-context-length", "256"]
    flags += ["--trace-file", str(files["verifier"])]
    cluster = Cluster(tmp_path, tiny_model, flags, program_cache)
    try:
        cluster.start_verifier()
        cluster.start_ngram("ngram", "--trace-file", str(files["ngram"]))
        name = cluster.start_coordinator("ngram", "--trace-file", str(files["coordinator"]))
        answers = [
            cluster.generate(name, text=text, max_tokens=12, ignore_eos=True, draft_count=3)
            for text in ("a b a b a b", "c d c d c d")
        ]
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
