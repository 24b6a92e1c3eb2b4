"""Commands: `python -m graph_runtime model|export|speculate`."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from graph_runtime.model_files import named_model_hash
from graph_runtime.model_report import list_lines
from graph_runtime.model_report import show as report
from graph_runtime.model_store import pull_model
from splitspec.commands import parse_tap_layers, run_command_line
from splitspec.drafts import find_draft
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
    """List models, pulled and known ones, and the trained drafts that ship for them."""
    for line in list_lines(cache_dir):
        typer.echo(line)


@model_app.command()
def show(
    name: Annotated[str, typer.Argument(help="A pulled model, an HF-layout folder or a draft's.")],
    cache_dir: CacheDir = DEFAULT_CACHE_DIR,
) -> None:
    """Show a model's shape, hashes, licence and trained drafts; or what a draft's files say."""
    typer.echo(json.dumps(report(model_folder(name, cache_dir), cache_dir), indent=2))


@export_app.callback()
def programs() -> None:
    """Programs that no service runs."""


@export_app.command(name="speculator")
def export_speculator(
    draft: Annotated[str, typer.Option(help="EAGLE-3 draft: eagle3, which ships, or a folder.")] = (
        "eagle3"
    ),
    draft_model: Annotated[
        str | None, typer.Option(help="EAGLE-3 draft: a pulled model, or a folder.")
    ] = None,
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
        folder=_eagle3_folder(draft, draft_model, model, cache_dir),
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


def _eagle3_folder(draft: str, draft_model: str | None, model: str, cache_dir: Path) -> Path:
    """Return the folder of the draft that the flags name.

    Raises:
        UserError: there is none, or it is another method's.
    """
    named = find_draft(
        draft,
        None if draft_model is None else model_folder(draft_model, cache_dir),
        target=model,
        target_hash=partial(named_model_hash, model, cache_dir),
    )
    if named.method != "eagle3":
        raise UserError(f"--draft {draft} is {named.method}; a speculator drafts with eagle3")
    assert named.folder is not None, named
    return named.folder


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
