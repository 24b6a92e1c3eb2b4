"""The coordinator's command: `python -m coordinator serve`. The environment is read only here."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from coordinator.config import CoordinatorConfig
from coordinator.server import serve_coordinator
from splitspec.commands import flag, run_app
from splitspec.serving import Lifecycle, run_service

logger = logging.getLogger("coordinator")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
DEFAULTS = CoordinatorConfig(model="")


@app.callback()
def commands() -> None:
    """Stream answers from a verifier and a drafter that other processes run."""


@app.command()
def serve(
    model: Annotated[str, flag("model", "Model folder, or the name of a pulled model.")],
    verifier: Annotated[str, flag("verifier", "The verifier's address.")] = DEFAULTS.verifier,
    drafter: Annotated[
        str | None, flag("drafter", "The drafter's address; none: target-only.")
    ] = DEFAULTS.drafter,
    address: Annotated[str, flag("address", "host:port or unix:/path.")] = DEFAULTS.address,
    metrics_address: Annotated[
        str | None, flag("metrics-address", "host:port of the Prometheus endpoint.")
    ] = DEFAULTS.metrics_address,
    cache_dir: Annotated[Path, flag("cache-dir", "Where pulled models are.")] = DEFAULTS.cache_dir,
    draft_count: Annotated[
        int, flag("draft-count", "Draft tokens a round where a request does not say.")
    ] = DEFAULTS.draft_count,
    queue_limit: Annotated[
        int, flag("queue-limit", "Requests that may wait for a slot.")
    ] = DEFAULTS.queue_limit,
    queue_seconds: Annotated[
        float, flag("queue-seconds", "Longest wait for a slot.")
    ] = DEFAULTS.queue_seconds,
    prefill_budget: Annotated[
        int, flag("prefill-budget", "Prompt tokens in one step at most.")
    ] = DEFAULTS.prefill_budget,
    step_seconds: Annotated[
        float, flag("step-seconds", "Longest wait for the verifier's answer to a step.")
    ] = DEFAULTS.step_seconds,
    draft_seconds: Annotated[
        float, flag("draft-seconds", "Longest wait of a round for drafts.")
    ] = DEFAULTS.draft_seconds,
    reconnect_seconds: Annotated[
        float, flag("reconnect-seconds", "Longest wait for a verifier that was lost.")
    ] = DEFAULTS.reconnect_seconds,
    otlp_endpoint: Annotated[
        str | None, flag("otlp-endpoint", "OTLP gRPC endpoint that gets the spans.")
    ] = DEFAULTS.otlp_endpoint,
    trace_file: Annotated[
        Path | None, flag("trace-file", "File that gets one JSON line a span.")
    ] = DEFAULTS.trace_file,
) -> None:
    """Serve the Generation service until SIGTERM."""
    config = CoordinatorConfig(
        model=model,
        verifier=verifier,
        drafter=drafter,
        address=address,
        metrics_address=metrics_address,
        cache_dir=cache_dir,
        draft_count=draft_count,
        queue_limit=queue_limit,
        queue_seconds=queue_seconds,
        prefill_budget=prefill_budget,
        step_seconds=step_seconds,
        draft_seconds=draft_seconds,
        reconnect_seconds=reconnect_seconds,
        otlp_endpoint=otlp_endpoint,
        trace_file=trace_file,
    )
    logger.info("%s", config)
    run_service(serve_coordinator(config, Lifecycle()))


def main() -> None:
    """Run the command line."""
    run_app(app, "coordinator")


if __name__ == "__main__":
    main()
