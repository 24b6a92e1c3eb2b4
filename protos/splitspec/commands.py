"""How every process is started: flags, the variables they are also read from, one way to end.

A flag `--slot-count` is also the variable `SPLITSPEC_SLOT_COUNT`. A user's mistake is one line on
stderr and exit code 2, a fault one line and exit code 1.
"""

from __future__ import annotations

import logging
import sys

import typer

from splitspec.errors import EngineFailed, UserError


def flag(name: str, text: str) -> typer.models.OptionInfo:
    """Return the option `--name` with the help `text` and its variable."""
    variable = "SPLITSPEC_" + name.upper().replace("-", "_")
    option: typer.models.OptionInfo = typer.Option(f"--{name}", help=text, envvar=variable)
    return option


def check_range(name: str, value: float, least: float, most: float) -> None:
    """Check a flag's value; NaN is in no range.

    Raises:
        UserError: names the flag, the value and the range.
    """
    if not least <= value <= most:
        raise UserError(f"{name} {value} is not in {least}..{most}")


def run_app(app: typer.Typer, process: str) -> None:
    """Run a process's command line; its log lines carry the name `process`."""
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {process} %(levelname)s %(message)s"
    )
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except EngineFailed as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(1)
