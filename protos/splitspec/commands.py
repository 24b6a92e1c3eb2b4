"""How every process is started: flags, the variables they are also read from, one way to end.

A flag `--slot-count` is also the variable `SPLITSPEC_SLOT_COUNT`. A user's mistake is one line on
stderr and exit code 2, a fault one line and exit code 1. So is a wrong command line.
"""

from __future__ import annotations

import difflib
import logging
import sys
from typing import Any, NoReturn

import typer

from splitspec.errors import EngineFailed, UserError

CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
"""ClickException, of the click inside typer or of the one beside it: typer's versions differ."""


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


def parse_tap_layers(value: str | None) -> tuple[int, ...] | None:
    """Return the layers of a flag like "1,14,26".

    Raises:
        UserError: it is no such list.
    """
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= 9 for part in parts):
        raise UserError(f"--tap-layers {value!r} is not a list like 1,14,26")
    return tuple(int(part) for part in parts)


def run_app(app: typer.Typer, process: str) -> None:
    """Run a process's command line; its log lines carry the name `process`."""
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {process} %(levelname)s %(message)s"
    )
    run_command_line(app)


def run_command_line(app: typer.Typer) -> NoReturn:
    """Run a command line and exit with its code; leaves logging as it is."""
    try:
        code = app(standalone_mode=False)
    except UserError as error:
        _end(str(error), 2)
    except EngineFailed as error:
        _end(error.message, 1)
    except CLICK_ERROR as error:
        told = usage_mistake(error)
        if told:
            _end(told, 2)
        sys.exit(2)  # no command at all: the help has been shown
    except typer.Abort:
        _end("aborted", 1)
    sys.exit(code if isinstance(code, int) else 0)


def usage_mistake(error: Any) -> str:
    """Return a wrong command line as one line; empty where nothing was asked for."""
    option, possibilities = getattr(error, "option_name", ""), getattr(error, "possibilities", None)
    if hasattr(error, "possibilities"):  # an option that does not exist
        close = difflib.get_close_matches(option, possibilities or (), n=1)
        return f"no such option {option}" + (f" (did you mean {close[0]}?)" if close else "")
    line = " ".join(error.format_message().split())
    if not line:  # rich has shown the help already
        return ""
    if line.startswith("Usage: "):
        print(error.format_message(), file=sys.stderr)
        return ""
    return line[0].lower() + line[1:].rstrip(".")


def _end(line: str, code: int) -> NoReturn:
    print(f"error: {line}", file=sys.stderr)
    sys.exit(code)
