"""`splitspec train rollouts`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drafter_service.training.rollouts_config import RolloutsConfig, RowFilters
from splitspec.commands import flag

CONFIG = RolloutsConfig()
FILTERS = CONFIG.filters


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
    min_answer_tokens: Annotated[
        int, flag("min-answer-tokens", "Rows with fewer tokens in answers are not used.")
    ] = FILTERS.min_answer_tokens,
    max_loop_share: Annotated[
        float, flag("max-loop-share", "Nor are rows that repeat more of their answers.")
    ] = FILTERS.max_loop_share,
    held_out_share: Annotated[
        float, flag("held-out-share", "Of first user turns that no training sees.")
    ] = FILTERS.held_out_share,
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
        filters=RowFilters(
            min_answer_tokens=min_answer_tokens,
            max_loop_share=max_loop_share,
            held_out_share=held_out_share,
        ),
        cache_dir=cache_dir,
    )
    from drafter_service.training.rollouts import write_rollouts

    written = write_rollouts(config)
    for name, count in written.counts.items():
        typer.echo(f"{name:>14} {count}")
