"""`splitspec train plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splitspec.errors import UserError


def plot(
    run: Annotated[Path, typer.Argument(help="Folder of the run, which metrics.jsonl is in.")],
) -> None:
    """Draw a run's loss, accuracy and tau into metrics.png."""
    from drafter_service.training.plot import plot_run

    try:
        path = plot_run(run.expanduser())
    except ImportError as error:
        raise UserError(f"train plot needs matplotlib: pip install matplotlib ({error})") from error
    typer.echo(path)
