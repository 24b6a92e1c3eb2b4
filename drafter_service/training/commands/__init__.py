"""The commands of `splitspec train`. A command imports torch only once it runs."""

from __future__ import annotations

import importlib

import typer

COMMANDS = ("rollouts", "eagle3", "dflash", "evaluate", "plot")
"""Each is the function of its name in the module of its name here."""


def build_app() -> typer.Typer:
    """Return the `train` group."""
    app = typer.Typer(help="Train drafts on the target's own text, and measure them.")
    for name in COMMANDS:
        module = importlib.import_module(f"{__name__}.{name}")
        app.command(name)(getattr(module, name))
    return app
