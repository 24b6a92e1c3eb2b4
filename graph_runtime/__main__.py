"""Commands: `python -m graph_runtime model|export|speculate`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from graph_runtime.architecture import read_config
from graph_runtime.model_files import model_hash, tokenizer_hash, weight_files
from graph_runtime.model_store import KNOWN_MODELS, pull_model, pulled_models
from splitspec.commands import parse_tap_layers, run_command_line
from splitspec.errors import UserError
from splitspec.folders import DEFAULT_CACHE_DIR, model_folder

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
model_app = typer.Typer(no_args_is_help=True, help="Prepare and inspect models.")
app.add_typer(model_app, name="model")
export_app = typer.Typer(no_args_is_help=True, help="Export programs of several models.")
app.add_typer(export_app, name="export")

MODEL = "smollm2-135m"
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


@export_app.callback()
def programs() -> None:
    """Programs that no service runs."""


@export_app.command(name="speculator")
def export_speculator(
    draft_model: Annotated[str, typer.Option(help="EAGLE-3 draft: a pulled model, or a folder.")],
    model: Annotated[str, typer.Option(help="Target: a pulled model, or a folder.")] = MODEL,
    chain: Annotated[int, typer.Option(help="Draft tokens a round, 1 to 7.")] = 3,
    precision: Annotated[str, typer.Option(help="Precision of the target.")] = "8da8w",
    draft_precision: Annotated[str, typer.Option(help="Precision of the draft.")] = "8da8w",
    max_context_length: Annotated[int, typer.Option(help="Prompt and answer, in tokens.")] = 1024,
    max_prefill_chunk: Annotated[int, typer.Option(help="Longest prompt, in tokens.")] = 512,
    tap_layers: Annotated[str | None, typer.Option(help="In place of the draft's: 1,14,26")] = None,
    embeddings: Annotated[str, typer.Option(help="auto, own or target.")] = "auto",
    feedback: Annotated[str, typer.Option(help="auto, pre-norm or post-norm.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="A copy of the program goes here.")] = None,
    cache_dir: CacheDir = DEFAULT_CACHE_DIR,
) -> None:
    """Lower a target and its draft to one program of one session, and print its path."""
    from graph_runtime.eagle3.checkpoint import Eagle3Source
    from graph_runtime.load import needing_executorch

    with needing_executorch():
        from graph_runtime.programs import check_digest
        from graph_runtime.programs.speculator_export import ensure_speculator
    source = Eagle3Source(
        folder=model_folder(draft_model, cache_dir),
        target=model_folder(model, cache_dir),
        tap_layers=parse_tap_layers(tap_layers),
        embeddings=embeddings,
        feedback=feedback,
    )
    path = ensure_speculator(
        source,
        precision=precision,
        draft_precision=draft_precision,
        chain=chain,
        cache_dir=cache_dir.expanduser(),
        max_context_length=max_context_length,
        max_prefill_chunk=max_prefill_chunk,
    )
    check_digest(path)
    typer.echo(path if output is None else _copied(path, output.expanduser()))


@app.command()
def speculate(
    program: Annotated[Path, typer.Argument(help="What `export speculator` wrote.")],
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Compute threads.")] = None,
) -> None:
    """Answer one request of a parent process, as JSON lines; see graph_runtime/speculate.py."""
    from graph_runtime.speculate import speculate as answer

    answer(program, threads)


def _copied(path: Path, output: Path) -> Path:
    """Copy a program and its digest, by which a damaged copy is known."""
    if output.suffix == ".sha256":
        raise UserError(f"--output {output}: a program's digest is called so; expected x.pte")
    for source, copy in ((path, output), (_digest(path), _digest(output))):
        partial = copy.with_name(f"{copy.name}.partial")
        try:
            shutil.copyfile(source, partial)
            partial.replace(copy)
        except OSError as error:
            raise UserError(f"cannot write program {copy}: {error.strerror or error}") from error
        finally:
            partial.unlink(missing_ok=True)
    return output


def _digest(program: Path) -> Path:
    return program.with_suffix(".sha256")


def main() -> None:
    """Run the command line; a user's mistake is one line and exit code 2."""
    run_command_line(app)


if __name__ == "__main__":
    main()
