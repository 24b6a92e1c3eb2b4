"""The drafter's commands: `python -m drafter_service serve`, `export ...`, `train ...`.

The environment is read only here.
"""

from __future__ import annotations

import importlib
import logging
import threading
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from drafter_service.config import METHODS, DrafterConfig
from drafter_service.server import serve_drafter
from drafter_service.training.commands import build_app as build_training
from graph_runtime.model_files import named_model_hash
from splitspec.commands import flag, parse_tap_layers, run_app
from splitspec.drafts import NamedDraft, find_draft
from splitspec.errors import UserError
from splitspec.serving import run_service

logger = logging.getLogger("drafter_service")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
export = typer.Typer(help="Lower a draft to an ExecuTorch program.")
app.add_typer(export, name="export")
app.add_typer(build_training(), name="train")
CONFIG = DrafterConfig()

DraftModel = Annotated[
    Path | None,
    flag("draft-model", "eagle3, dflash: the checkpoint's folder; else one that ships."),
]
Target = Annotated[
    str | None, flag("target", "eagle3, dflash: a pulled model's name, or an HF-layout folder.")
]
Precision = Annotated[str | None, flag("precision", "fp32, 8da8w, 8da4w, bf16; by runtime.")]
ContextLength = Annotated[
    int | None, flag("max-context-length", "Longest context of one session, in tokens; by method.")
]
SlotCount = Annotated[
    int | None, flag("slot-count", "Sessions that can be open at once; by method.")
]
TapLayers = Annotated[
    str | None,
    flag("tap-layers", "eagle3, dflash: layers of a row, like 1,14,26; else the checkpoint's."),
]
Embeddings = Annotated[str, flag("embeddings", "eagle3, dflash: whose, auto, own or target.")]
BlockLength = Annotated[
    int | None,
    flag("block-length", "dflash: slots of a block, the pending token's with it; else as trained."),
]
Feedback = Annotated[
    str, flag("feedback", "eagle3: what a step is fed, auto, pre-norm or post-norm.")
]
OwnDraft = Annotated[
    # No variable: SPLITSPEC_DRAFT is the method that is served.
    str | None, typer.Option("--draft", help="A draft's folder; else what ships for the target.")
]
CacheDir = Annotated[Path, flag("cache-dir", "Where models and programs are kept.")]


@app.callback()
def commands() -> None:
    """Propose tokens for a target that another process runs."""


@app.command()
def serve(
    draft: Annotated[
        str,
        flag(
            "draft",
            "ngram; eagle3 or dflash: the trained draft that ships for the target; auto: the "
            "better one of them, else ngram; or a draft's folder.",
        ),
    ] = CONFIG.draft,
    address: Annotated[str, flag("address", "host:port or unix:/path.")] = CONFIG.address,
    metrics_address: Annotated[
        str | None, flag("metrics-address", "host:port of the Prometheus endpoint.")
    ] = None,
    slot_count: SlotCount = None,
    max_context_length: ContextLength = None,
    max_draft_count: Annotated[
        int | None, flag("max-draft-count", "Most draft tokens a round; by method.")
    ] = None,
    ngram_max: Annotated[
        int, flag("ngram-max", "ngram: longest suffix that is looked up.")
    ] = CONFIG.ngram_max,
    ngram_min: Annotated[
        int, flag("ngram-min", "ngram: shortest suffix that is looked up.")
    ] = CONFIG.ngram_min,
    draft_model: DraftModel = None,
    block_length: BlockLength = None,
    target: Target = None,
    runtime: Annotated[
        str, flag("runtime", "eagle3, dflash: executorch or torch.")
    ] = CONFIG.runtime,
    precision: Precision = None,
    threads: Annotated[int | None, flag("threads", "eagle3, dflash: compute threads.")] = None,
    device: Annotated[str, flag("device", "--runtime torch: cpu or cuda.")] = CONFIG.device,
    rows: Annotated[
        str, flag("rows", "eagle3, dflash: rows that are wanted, raw or fused.")
    ] = CONFIG.rows,
    row_dtype: Annotated[
        str, flag("row-dtype", "eagle3, dflash: float32, bfloat16 or float16.")
    ] = CONFIG.row_dtype,
    draft_sampling: Annotated[
        str | None,
        flag(
            "draft-sampling",
            "eagle3 (coupled), dflash (argmax): argmax or coupled, where a session does not say.",
        ),
    ] = None,
    tap_layers: TapLayers = None,
    embeddings: Embeddings = CONFIG.embeddings,
    feedback: Feedback = CONFIG.feedback,
    cache_dir: CacheDir = CONFIG.cache_dir,
    otlp_endpoint: Annotated[
        str | None, flag("otlp-endpoint", "OTLP gRPC endpoint that gets the spans.")
    ] = None,
    trace_file: Annotated[
        Path | None, flag("trace-file", "File that gets one JSON line a span.")
    ] = None,
) -> None:
    """Serve the Drafter service until SIGTERM."""
    named = _named_draft(draft, draft_model, target, cache_dir)
    config = DrafterConfig(
        draft=named.method,
        address=address,
        metrics_address=metrics_address,
        slot_count=slot_count,
        max_context_length=max_context_length,
        max_draft_count=max_draft_count,
        ngram_max=ngram_max,
        ngram_min=ngram_min,
        draft_model=named.folder,
        block_length=block_length,
        target=target,
        runtime=runtime,
        precision=precision,
        threads=threads,
        device=device,
        rows=rows,
        row_dtype=row_dtype,
        draft_sampling=draft_sampling,
        tap_layers=parse_tap_layers(tap_layers),
        embeddings=embeddings,
        feedback=feedback,
        cache_dir=cache_dir,
        otlp_endpoint=otlp_endpoint,
        trace_file=trace_file,
    )
    logger.info("%s", config)
    method = importlib.import_module(METHODS[config.draft])
    stop = threading.Event()
    run_service(serve_drafter(config, partial(method.load, config, stop), on_stop=stop.set))


@export.command("eagle3")
def export_eagle3(
    draft: OwnDraft = None,
    draft_model: DraftModel = None,
    target: Target = None,
    precision: Precision = None,
    max_context_length: ContextLength = None,
    tap_layers: TapLayers = None,
    embeddings: Embeddings = CONFIG.embeddings,
    feedback: Feedback = CONFIG.feedback,
    cache_dir: CacheDir = CONFIG.cache_dir,
) -> None:
    """Lower an EAGLE-3 draft to a program in the cache, unless it is there, and print its path.

    `serve` with the same flags does so by itself.
    """
    _export(
        "eagle3",
        draft,
        draft_model=draft_model,
        target=target,
        precision=precision,
        max_context_length=max_context_length,
        tap_layers=parse_tap_layers(tap_layers),
        embeddings=embeddings,
        feedback=feedback,
        cache_dir=cache_dir,
    )


@export.command("dflash")
def export_dflash(
    draft: OwnDraft = None,
    draft_model: DraftModel = None,
    block_length: BlockLength = None,
    target: Target = None,
    precision: Precision = None,
    max_context_length: ContextLength = None,
    tap_layers: TapLayers = None,
    embeddings: Embeddings = CONFIG.embeddings,
    cache_dir: CacheDir = CONFIG.cache_dir,
) -> None:
    """Lower a DFlash draft to a program in the cache, unless it is there, and print its path.

    `serve` with the same flags does so by itself.
    """
    _export(
        "dflash",
        draft,
        draft_model=draft_model,
        target=target,
        block_length=block_length,
        precision=precision,
        max_context_length=max_context_length,
        tap_layers=parse_tap_layers(tap_layers),
        embeddings=embeddings,
        cache_dir=cache_dir,
    )


def _export(
    method: str,
    draft: str | None,
    *,
    draft_model: Path | None,
    target: str | None,
    cache_dir: Path,
    **fields: Any,
) -> None:
    """Export the draft that the flags name, with the other fields of a configuration, and print
    its program's path.

    Raises:
        UserError: it is another method's.
    """
    named = _named_draft(draft or method, draft_model, target, cache_dir)
    if named.method != method:
        raise UserError(f"--draft {draft} is no {method} draft, but {named.method}")
    config = DrafterConfig(
        draft=method, draft_model=named.folder, target=target, cache_dir=cache_dir, **fields
    )
    module = importlib.import_module(METHODS[method])  # ngram is served without torch
    typer.echo(module.ensure_program(config))


def _named_draft(
    draft: str, draft_model: Path | None, target: str | None, cache_dir: Path
) -> NamedDraft:
    """Return what `--draft` and `--draft-model` mean for the target.

    Raises:
        UserError: see `find_draft`.
    """
    target_hash = None if target is None else partial(named_model_hash, target, cache_dir)
    return find_draft(draft, draft_model, target=target, target_hash=target_hash)


def main() -> None:
    """Run the command line."""
    run_app(app, "drafter")


if __name__ == "__main__":
    main()
