"""The verifier's commands: `python -m verifier_service serve` and `export target`.

The environment is read only here.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from graph_runtime.load import load_target, needing_executorch
from graph_runtime.model_files import named_model_hash
from splitspec.commands import flag, parse_tap_layers, run_app
from splitspec.drafts import find_folder
from splitspec.folders import DEFAULT_CACHE_DIR, model_folder
from splitspec.serving import run_service
from verifier_service.config import VerifierConfig
from verifier_service.engine import Engine
from verifier_service.fusion import load_draft_fusion
from verifier_service.server import serve_verifier

logger = logging.getLogger("verifier_service")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
export = typer.Typer(help="Lower a model to an ExecuTorch program.")
app.add_typer(export, name="export")

Model = Annotated[str, flag("model", "A pulled model's name, or an HF-layout folder.")]
Precision = Annotated[str | None, flag("precision", "fp32, bf16, 8da8w, ...; by runtime.")]
CacheDir = Annotated[Path, flag("cache-dir", "Where models and programs are kept.")]
SlotCount = Annotated[int, flag("slot-count", "Sessions that can be open at once.")]
ContextLength = Annotated[int, flag("max-context-length", "Most tokens of one session.")]
PrefillChunk = Annotated[int, flag("max-prefill-chunk", "Most tokens of one prefill item.")]
TapLayers = Annotated[str | None, flag("tap-layers", "Layers of a row, like 1,14,26.")]
FuseFor = Annotated[
    str | None,
    flag(
        "fuse-for",
        "Draft whose fc is applied here, for rows of one width: eagle3, dflash or auto, those that "
        "ship for the model; a draft's folder; ngram, none: no draft's.",
    ),
]
Threads = Annotated[int | None, flag("threads", "Compute threads.")]


@app.callback()
def commands() -> None:
    """Run the target and decide which draft tokens stand."""


@app.command()
def serve(
    model: Model,
    runtime: Annotated[str, flag("runtime", "executorch or torch.")] = VerifierConfig.runtime,
    precision: Precision = None,
    device: Annotated[str, flag("device", "torch: cpu or cuda.")] = VerifierConfig.device,
    address: Annotated[str, flag("address", "host:port or unix:/path.")] = VerifierConfig.address,
    metrics_address: Annotated[
        str | None, flag("metrics-address", "host:port of the Prometheus endpoint.")
    ] = None,
    cache_dir: CacheDir = DEFAULT_CACHE_DIR,
    slot_count: SlotCount = VerifierConfig.slot_count,
    max_context_length: ContextLength = VerifierConfig.max_context_length,
    max_prefill_chunk: PrefillChunk = VerifierConfig.max_prefill_chunk,
    max_draft_count: Annotated[
        int, flag("max-draft-count", "Most draft tokens of one window.")
    ] = VerifierConfig.max_draft_count,
    tap_layers: TapLayers = None,
    fuse_for: FuseFor = None,
    threads: Threads = None,
    otlp_endpoint: Annotated[
        str | None, flag("otlp-endpoint", "OTLP gRPC endpoint that gets the spans.")
    ] = None,
    trace_file: Annotated[
        Path | None, flag("trace-file", "File that gets one JSON line a span.")
    ] = None,
) -> None:
    """Serve the Verifier service until SIGTERM."""
    config = VerifierConfig(
        model=model,
        runtime=runtime,
        precision=precision,
        device=device,
        address=address,
        metrics_address=metrics_address,
        cache_dir=cache_dir,
        slot_count=slot_count,
        max_context_length=max_context_length,
        max_prefill_chunk=max_prefill_chunk,
        max_draft_count=max_draft_count,
        tap_layers=parse_tap_layers(tap_layers),
        fuse_for=_fused_draft(fuse_for, model, cache_dir),
        threads=threads,
        otlp_endpoint=otlp_endpoint,
        trace_file=trace_file,
    )
    logger.info("%s", config)
    folder = model_folder(config.model, config.cache_dir)
    stop = threading.Event()
    run_service(
        serve_verifier(config, partial(load_engine, config, folder, stop), on_stop=stop.set)
    )


@export.command("target")
def export_target(
    model: Model,
    precision: Precision = None,
    cache_dir: CacheDir = DEFAULT_CACHE_DIR,
    max_context_length: ContextLength = VerifierConfig.max_context_length,
    max_prefill_chunk: PrefillChunk = VerifierConfig.max_prefill_chunk,
    tap_layers: TapLayers = None,
    fuse_for: FuseFor = None,
) -> None:
    """Lower the target to a program in the cache, unless it is there, and print its path.

    `serve` with the same flags does so by itself.
    """
    config = VerifierConfig(
        model=model,
        precision=precision,
        cache_dir=cache_dir,
        max_context_length=max_context_length,
        max_prefill_chunk=max_prefill_chunk,
        tap_layers=parse_tap_layers(tap_layers),
        fuse_for=_fused_draft(fuse_for, model, cache_dir),
    )
    folder = model_folder(config.model, config.cache_dir)
    fusion = load_draft_fusion(config, folder)
    with needing_executorch():
        from graph_runtime.programs import check_digest, ensure_program
    path = ensure_program(
        folder=folder,
        precision=config.chosen_precision,
        cache_dir=config.cache_dir.expanduser(),
        tap_layers=config.tap_layers if fusion is None else fusion.tap_layers,
        max_context_length=config.max_context_length,
        max_prefill_chunk=config.max_prefill_chunk,
    )
    check_digest(path)
    typer.echo(path)


def _fused_draft(fuse_for: str | None, model: str, cache_dir: Path) -> Path | None:
    """Return the folder of the draft that `--fuse-for` means; None: nothing is fused.

    Raises:
        UserError: it is no draft, or none ships for the model.
    """
    if fuse_for is None:
        return None
    target_hash = partial(named_model_hash, model, cache_dir)
    return find_folder(fuse_for, target=model, target_hash=target_hash, flag="--fuse-for")


def load_engine(config: VerifierConfig, folder: Path, stop: threading.Event) -> Engine:
    """Load and warm up what `config` says, on the engine's thread; `stop` ends an export."""
    fusion = load_draft_fusion(config, folder)
    target = load_target(
        folder=folder,
        model_id=config.model_id,
        runtime=config.runtime,
        precision=config.chosen_precision,
        cache_dir=config.cache_dir.expanduser(),
        tap_layers=config.tap_layers if fusion is None else fusion.tap_layers,
        max_context_length=config.max_context_length,
        slot_count=config.slot_count,
        max_prefill_chunk=config.max_prefill_chunk,
        threads=config.threads,
        device=config.device,
        stop=stop,
    )
    engine = Engine(target, max_draft_count=config.max_draft_count, fusion=fusion)
    engine.warm_up()
    return engine


def main() -> None:
    """Run the command line."""
    run_app(app, "verifier")


if __name__ == "__main__":
    main()
