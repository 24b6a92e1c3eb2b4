"""`splitspec train evaluate`: the acceptance of a draft, as it is served, on a file of prompts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from drafter_service.training.answers import print_results
from drafter_service.training.evaluate_config import (
    EvaluateConfig,
    parse_counts,
    parse_temperatures,
)
from graph_runtime.model_files import named_model_hash
from splitspec.commands import flag
from splitspec.drafts import AUTO, MODEL_METHODS, find_draft
from splitspec.errors import UserError
from splitspec.folders import DEFAULT_CACHE_DIR

CONFIG = EvaluateConfig


def evaluate(
    prompts: Annotated[
        Path, flag("prompts", "JSONL with prompt or prompt_ids, and maybe class, a line.")
    ],
    draft: Annotated[
        str,
        flag(
            "draft",
            "eagle3 or dflash: the trained draft that ships for the target; auto: the better one "
            "of them; or a draft's folder.",
        ),
    ] = AUTO,
    draft_model: Annotated[
        Path | None, flag("draft-model", "A draft's folder, in place of one that ships.")
    ] = None,
    target: Annotated[
        str, flag("target", "A pulled model's name, or an HF-layout folder.")
    ] = CONFIG.target,
    prompt_count: Annotated[int | None, flag("prompt-count", "The first ones only.")] = None,
    draft_counts: Annotated[str, flag("draft-counts", "K, with commas.")] = "3,5,7",
    temperatures: Annotated[str, flag("temperatures", "With commas; 0 is greedy.")] = "0,0.7",
    max_tokens: Annotated[int, flag("max-tokens", "Of an answer.")] = CONFIG.max_tokens,
    sessions: Annotated[int, flag("sessions", "Answers packed together.")] = CONFIG.sessions,
    max_context_length: Annotated[
        int, flag("max-context-length", "Most tokens of one prompt and its answer.")
    ] = CONFIG.max_context_length,
    runtime: Annotated[str, flag("runtime", "The target's: executorch or torch.")] = CONFIG.runtime,
    precision: Annotated[
        str | None, flag("precision", "The target's; the runtime's default is the served one.")
    ] = None,
    device: Annotated[str, flag("device", "--runtime torch: cpu or cuda.")] = CONFIG.device,
    draft_runtime: Annotated[
        str, flag("draft-runtime", "The draft's: executorch or torch.")
    ] = CONFIG.draft_runtime,
    draft_precision: Annotated[str | None, flag("draft-precision", "The draft's.")] = None,
    draft_device: Annotated[
        str, flag("draft-device", "--draft-runtime torch: cpu or cuda.")
    ] = CONFIG.draft_device,
    draft_sampling: Annotated[
        str | None, flag("draft-sampling", "argmax or coupled; else the method's default.")
    ] = None,
    threads: Annotated[int | None, flag("threads", "Compute threads.")] = None,
    out: Annotated[Path | None, flag("out", "JSON file that gets the figures.")] = None,
    cache_dir: Annotated[
        Path, flag("cache-dir", "Where models and programs are kept.")
    ] = DEFAULT_CACHE_DIR,
) -> None:
    """Measure how many draft tokens stand: tau by temperature, K and class, loops counted apart.

    In one process, with the target, the drafter and the rule that are served. Prints tables, then
    one JSON line.
    """
    config = EvaluateConfig(
        draft_model=_folder(draft, draft_model, target, cache_dir),
        prompts=prompts,
        target=target,
        prompt_count=prompt_count,
        draft_counts=parse_counts(draft_counts),
        temperatures=parse_temperatures(temperatures),
        max_tokens=max_tokens,
        sessions=sessions,
        max_context_length=max_context_length,
        runtime=runtime,
        precision=precision,
        device=device,
        draft_runtime=draft_runtime,
        draft_precision=draft_precision,
        draft_device=draft_device,
        draft_sampling=draft_sampling,
        threads=threads,
        out=out,
        cache_dir=cache_dir,
    )
    from drafter_service.training.evaluate import evaluate as measure

    result = measure(config)
    print_results(result["results"])
    typer.echo(json.dumps(result))
    if config.out is not None:
        config.out.expanduser().write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _folder(draft: str, draft_model: Path | None, target: str, cache_dir: Path) -> Path:
    """Return the checkpoint's folder that `--draft` and `--draft-model` mean.

    Raises:
        UserError: they mean none, or a method that has none.
    """
    if draft == AUTO and draft_model is not None:
        return draft_model  # its tensors tell its method, where config.json does not
    target_hash = partial(named_model_hash, target, cache_dir)
    named = find_draft(draft, draft_model, target=target, target_hash=target_hash)
    if named.folder is None or named.method not in MODEL_METHODS:
        raise UserError(
            f"--draft {draft} is {named.method} for {target!r}, which has no checkpoint to "
            "evaluate; name a draft's folder"
        )
    return named.folder
