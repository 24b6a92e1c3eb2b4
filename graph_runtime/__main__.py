"""Commands: `python -m graph_runtime model pull|list|show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from graph_runtime.architecture import read_config
from graph_runtime.model_files import model_hash, tokenizer_hash, weight_files
from graph_runtime.model_store import KNOWN_MODELS, pull_model, pulled_models
from splitspec.commands import run_command_line
from splitspec.folders import DEFAULT_CACHE_DIR, model_folder

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
model_app = typer.Typer(no_args_is_help=True, help="Prepare and inspect models.")
app.add_typer(model_app, name="model")

CacheDir = Annotated[
    Path, typer.Option(envvar="SPLITSPEC_CACHE_DIR", help="Where prepared models live.")
]


@app.callback()
def graphs() -> None:
    """Models that the services run."""


@model_app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A known name, a .gguf file or a hub name org/name.")],
    cache_dir: CacheDir = DEFAULT_CACHE_DIR,
) -> None:
    """Download and convert a model into the cache; prints its folder, and that alone."""
    typer.echo(str(pull_model(name, cache_dir)))


@model_app.command(name="list")
def list_models(cache_dir: CacheDir = DEFAULT_CACHE_DIR) -> None:
    """List the pulled models, and the names that can be pulled."""
    pulled = pulled_models(cache_dir)
    for folder in pulled:
        typer.echo(f"{folder.name.replace('--', '/')}\t{folder}")
    for name in sorted(set(KNOWN_MODELS) - {folder.name for folder in pulled}):
        typer.echo(f"{name}\tnot pulled")


@model_app.command()
def show(
    name: Annotated[str, typer.Argument(help="A pulled model or an HF-layout folder.")],
    cache_dir: CacheDir = DEFAULT_CACHE_DIR,
) -> None:
    """Show a model's shape and hashes."""
    folder = model_folder(name, cache_dir)
    config = read_config(folder)
    shown = {
        "folder": str(folder),
        "architecture": config.architecture,
        "vocab_size": config.vocab_size,
        "n_layers": config.n_layers,
        "hidden_size": config.hidden_size,
        "max_context_length": config.max_position_embeddings,
        "weight_bytes": sum(path.stat().st_size for path in weight_files(folder)),
        "model_hash": model_hash(folder, cache_dir),
        "tokenizer_hash": tokenizer_hash(folder),
    }
    typer.echo(json.dumps(shown, indent=2))


def main() -> None:
    """Run the command line; a user's mistake is one line and exit code 2."""
    run_command_line(app)


if __name__ == "__main__":
    main()
