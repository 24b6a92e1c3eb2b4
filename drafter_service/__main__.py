"""The drafter's commands: `python -m drafter_service serve`. The environment is read only here."""

from __future__ import annotations

import importlib
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from drafter_service.config import METHODS, DrafterConfig
from drafter_service.server import serve_drafter
from splitspec.errors import EngineFailed, UserError
from splitspec.serving import run_service

logger = logging.getLogger("drafter_service")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
DEFAULTS = DrafterConfig()


def _flag(name: str, text: str) -> typer.models.OptionInfo:
    variable = "SPLITSPEC_" + name.upper().replace("-", "_")
    option: typer.models.OptionInfo = typer.Option(f"--{name}", help=text, envvar=variable)
    return option


@app.callback()
def commands() -> None:
    """Propose tokens for a target that another process runs."""


@app.command()
def serve(
    draft: Annotated[str, _flag("draft", "Drafting method: ngram.")] = DEFAULTS.draft,
    address: Annotated[str, _flag("address", "host:port or unix:/path.")] = DEFAULTS.address,
    metrics_address: Annotated[
        str | None, _flag("metrics-address", "host:port of the Prometheus endpoint.")
    ] = DEFAULTS.metrics_address,
    slot_count: Annotated[
        int, _flag("slot-count", "Sessions that can be open at once.")
    ] = DEFAULTS.slot_count,
    max_context_length: Annotated[
        int, _flag("max-context-length", "Longest context of one session, in tokens.")
    ] = DEFAULTS.max_context_length,
    max_draft_count: Annotated[
        int, _flag("max-draft-count", "Most draft tokens a round.")
    ] = DEFAULTS.max_draft_count,
    ngram_max: Annotated[
        int, _flag("ngram-max", "Longest suffix that is looked up.")
    ] = DEFAULTS.ngram_max,
    ngram_min: Annotated[
        int, _flag("ngram-min", "Shortest suffix that is looked up.")
    ] = DEFAULTS.ngram_min,
    otlp_endpoint: Annotated[
        str | None, _flag("otlp-endpoint", "OTLP gRPC endpoint that gets the spans.")
    ] = DEFAULTS.otlp_endpoint,
    trace_file: Annotated[
        Path | None, _flag("trace-file", "File that gets one JSON line a span.")
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
    """Run the command line: a user's mistake is one line and exit code 2, a fault is 1."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s drafter %(levelname)s %(message)s")
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except EngineFailed as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
