"""The drafter's commands: `python -m drafter_service serve`. The environment is read only here."""

from __future__ import annotations

import importlib
import logging
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from drafter_service.config import METHODS, DrafterConfig
from drafter_service.server import serve_drafter
from splitspec.commands import flag, run_app
from splitspec.serving import run_service

logger = logging.getLogger("drafter_service")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
DEFAULTS = DrafterConfig()


@app.callback()
def commands() -> None:
    """Propose tokens for a target that another process runs."""


@app.command()
def serve(
    draft: Annotated[str, flag("draft", "Drafting method: ngram.")] = DEFAULTS.draft,
    address: Annotated[str, flag("address", "host:port or unix:/path.")] = DEFAULTS.address,
    metrics_address: Annotated[
        str | None, flag("metrics-address", "host:port of the Prometheus endpoint.")
    ] = DEFAULTS.metrics_address,
    slot_count: Annotated[
        int, flag("slot-count", "Sessions that can be open at once.")
    ] = DEFAULTS.slot_count,
    max_context_length: Annotated[
        int, flag("max-context-length", "Longest context of one session, in tokens.")
    ] = DEFAULTS.max_context_length,
    max_draft_count: Annotated[
        int, flag("max-draft-count", "Most draft tokens a round.")
    ] = DEFAULTS.max_draft_count,
    ngram_max: Annotated[
        int, flag("ngram-max", "Longest suffix that is looked up.")
    ] = DEFAULTS.ngram_max,
    ngram_min: Annotated[
        int, flag("ngram-min", "Shortest suffix that is looked up.")
    ] = DEFAULTS.ngram_min,
    otlp_endpoint: Annotated[
        str | None, flag("otlp-endpoint", "OTLP gRPC endpoint that gets the spans.")
    ] = DEFAULTS.otlp_endpoint,
    trace_file: Annotated[
        Path | None, flag("trace-file", "File that gets one JSON line a span.")
    ] = DEFAULTS.trace_file,
) -> None:
    """Serve the Drafter service until SIGTERM."""
    config = DrafterConfig(
        draft=draft,
        address=address,
        metrics_address=metrics_address,
        slot_count=slot_count,
        max_context_length=max_context_length,
        max_draft_count=max_draft_count,
        ngram_max=ngram_max,
        ngram_min=ngram_min,
        otlp_endpoint=otlp_endpoint,
        trace_file=trace_file,
    )
    logger.info("%s", config)
    method = importlib.import_module(METHODS[config.draft])
    run_service(serve_drafter(config, partial(method.load, config)))


def main() -> None:
    """Run the command line."""
    run_app(app, "drafter")


if __name__ == "__main__":
    main()
