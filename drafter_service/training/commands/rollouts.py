"""`splitspec train rollouts`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drafter_service.training.rollouts_config import RolloutsConfig
from splitspec.commands import flag

CONFIG = RolloutsConfig()


def rollouts(
    target: Annotated[
        str, flag("target", "A pulled model's name, or an HF-layout folder.")
    ] = CONFIG.target,
    out: Annotated[Path, flag("out", "Folder that is written, or continued.")] = CONFIG.out,
    passes: Annotated[int, flag("passes", "Passes that the folder shall hold.")] = CONFIG.passes,
    rows: Annotated[int, flag("rows", "Rows of a pass, written at once.")] = CONFIG.rows,
    length: Annotated[int, flag("length", "Tokens of a row.")] = CONFIG.length,
    seed: Annotated[int, flag("seed", "Of everything random.")] = CONFIG.seed,
    device: Annotated[str, flag("device", "cpu, cuda or cuda:N.")] = CONFIG.device,
    precision: Annotated[
        str | None,
        flag("precision", "bf16 (cuda), fp32 (cpu), or 8da8w as the program computes it."),
    ] = None,
    seeds: Annotated[
        Path | None, flag("seeds", "File of instructions, one a line; else the built-in ones.")
    ] = None,
    seeded_share: Annotated[
        float, flag("seeded-share", "Of rows that begin with an instruction.")
    ] = CONFIG.seeded_share,
    cache_dir: Annotated[
        Path, flag("cache-dir", "Where models and programs are kept.")
    ] = CONFIG.cache_dir,
) -> None:
    """Let the target write prompts and answers, the text that drafts are trained on."""
    config = RolloutsConfig(
        target=target,
        out=out,
        passes=passes,
        rows=rows,
        length=length,
        seed=seed,
        device=device,
        precision=precision,
        seeds=seeds,
        seeded_share=seeded_share,
        cache_dir=cache_dir,
    )
    from drafter_service.training.rollouts import write_rollouts

    written = write_rollouts(config)
    for name, count in written.counts.items():
        typer.echo(f"{name:>14} {count}")
