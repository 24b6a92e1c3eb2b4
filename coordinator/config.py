"""The coordinator process's configuration: one frozen object, validated at birth, logged once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from splitspec.commands import check_range
from splitspec.folders import DEFAULT_CACHE_DIR


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """What `python -m coordinator serve` takes; the flags have the same names and defaults.

    Raises:
        UserError: a value is out of its range; names the flag and the range.
    """

    model: str
    """Folder or name of the model: tokenizer, chat template and end tokens are read from it."""
    verifier: str = "127.0.0.1:7101"
    drafter: str | None = None
    """None: every request is target-only."""
    address: str = "127.0.0.1:7100"
    metrics_address: str | None = None
    cache_dir: Path = DEFAULT_CACHE_DIR
    draft_count: int = 7
    """Draft tokens a round where a request does not say; less where the verifier allows less."""
    queue_limit: int = 64
    queue_seconds: float = 60.0
    prefill_budget: int = 256
    """Prompt tokens in one step at most, all sessions together."""
    step_seconds: float = 30.0
    draft_seconds: float = 1.0
    reconnect_seconds: float = 30.0
    otlp_endpoint: str | None = None
    trace_file: Path | None = None

    def __post_init__(self) -> None:
        check_range("--draft-count", self.draft_count, 0, 1024)
        check_range("--queue-limit", self.queue_limit, 0, 100_000)
        check_range("--prefill-budget", self.prefill_budget, 1, 1_000_000)
        for flag, value in (
            ("--queue-seconds", self.queue_seconds),
            ("--step-seconds", self.step_seconds),
            ("--draft-seconds", self.draft_seconds),
            ("--reconnect-seconds", self.reconnect_seconds),
        ):
            check_range(flag, value, 0.001, 86_400)
