"""Fixtures of the system tests: clusters of real processes on tiny seeded models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.cluster import ROOT, Cluster, running_cluster
from tests.tiny import write_tiny_model

RUNTIMES = {
    "torch": ["--runtime", "torch", "--precision", "fp32"],
    "executorch": ["--runtime", "executorch", "--precision", "8da8w"],
}
EAGLE3_VERIFIER = [*RUNTIMES["torch"], "--slot-count", "18"]
EAGLE3_VERIFIER += ["--max-context-length", "128", "--max-prefill-chunk", "32"]
EAGLE3_FLAGS = [*RUNTIMES["torch"], "--slot-count", "10", "--max-context-length", "128"]
EAGLE3_FLAGS += ["--draft-sampling", "coupled"]
DFLASH_VERIFIER = EAGLE3_VERIFIER
DFLASH_FLAGS = EAGLE3_FLAGS


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one tiny llama with random weights."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, family="llama", seed=7)
    return folder


@pytest.fixture(scope="module", params=list(RUNTIMES))
def cluster(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    program_cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """Run a verifier (each runtime in turn) and the ngram drafter."""
    folder = tmp_path_factory.mktemp("c")
    flags = [*RUNTIMES[request.param], "--slot-count", "8", "--max-context-length", "256"]
    yield from running_cluster(folder, tiny_model, flags, program_cache)


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Return the short prompts that ship with the benchmarks."""
    lines = (ROOT / "benchmarks" / "prompts" / "short.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]
