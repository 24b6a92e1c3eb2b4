"""Measure a draft's acceptance on a file of prompts, with the pair that is served: no services.

Each prompt is answered once for every temperature and K; its place in the file is its seed. The
text may not depend on K (law L4), which is asserted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from tqdm import tqdm

from drafter_service.config import METHODS, DrafterConfig
from drafter_service.drafter import Drafter, DraftSampling
from drafter_service.training.answers import Prompt, read_prompts, report
from drafter_service.training.chain import Chain, Outcome, Question
from drafter_service.training.chat_text import ChatText
from drafter_service.training.evaluate_config import EvaluateConfig
from graph_runtime.checkpoint import stored_tensors
from graph_runtime.choice import Sampling
from graph_runtime.config_values import read_config_object
from graph_runtime.dflash.layouts import is_dflash
from graph_runtime.load import load_target
from graph_runtime.target import Target, TargetInfo
from splitspec.errors import UserError
from splitspec.folders import model_folder

MAX_PREFILL_CHUNK = 128
"""As a verifier's: it is part of what a program is, so that the served one is found."""


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Return the acceptance of one draft, for each temperature and K, as it goes into `--out`.

    Raises:
        UserError: what is wrong with a flag, the prompts, the target or the draft, or that the two
            do not fit.
    """
    prompts = read_prompts(config.prompts, config.prompt_count)
    folder = model_folder(config.target, config.cache_dir)
    method = draft_method(config.draft_model.expanduser())
    served = _drafter_config(config, method, folder)
    drafter: Drafter = importlib.import_module(METHODS[method]).load(served)
    for draft_count in config.draft_counts:
        if draft_count > drafter.info.max_draft_count:
            most = drafter.info.max_draft_count
            raise UserError(f"--draft-counts {draft_count}: this draft drafts {most} at most")
    target = _load_target(config, folder, drafter)
    check_pair(target.info, drafter)
    text = ChatText.load(folder)
    asked = [
        (prompt, _prompt_ids(f"{config.prompts}:{prompt.line}", prompt, text, target.info))
        for prompt in prompts
    ]
    chain = Chain(target, drafter, stop_token_ids=text.stop_token_ids)
    results: list[dict[str, Any]] = []
    total = len(config.temperatures) * len(config.draft_counts) * len(asked)
    with tqdm(total=total, unit="answer", dynamic_ncols=True) as bar:
        for temperature in config.temperatures:
            questions = [_question(config, *one, temperature, target.info) for one in asked]
            results += measure(
                chain,
                questions,
                draft_counts=config.draft_counts,
                session_count=config.sessions,
                on_outcome=lambda _outcome: bar.update(),
            )
    settings = _settings(config, served, drafter, target.info)
    return {**settings, "prompts": len(prompts), "results": results}


def measure(
    chain: Chain,
    questions: Sequence[Question],
    *,
    draft_counts: Sequence[int],
    session_count: int,
    on_outcome: Callable[[Outcome], object] = lambda _outcome: None,
) -> list[dict[str, Any]]:
    """Answer `questions`, which share a temperature, once for each K; return what each K gave."""
    results = []
    texts: list[Sequence[int]] | None = None
    for draft_count in draft_counts:
        started = perf_counter()
        outcomes = chain.answer(
            [replace(question, draft_count=draft_count) for question in questions],
            session_count=session_count,
            on_outcome=on_outcome,
        )
        own = [outcome.answer.token_ids for outcome in outcomes]
        assert texts is None or own == texts, "law L4: the text does not depend on K"
        texts = own
        results.append(
            {
                "temperature": questions[0].sampling.temperature,
                "draft_count": draft_count,
                "seconds": round(perf_counter() - started, 1),
                **report([outcome.answer for outcome in outcomes]),
                "acceptance": acceptance_by_position(outcomes, draft_count),
            }
        )
    return results


def acceptance_by_position(outcomes: Sequence[Outcome], draft_count: int) -> list[float | None]:
    """Return how often the draft token at each position stood, given that those before it did.

    Of position j: the rounds that accepted j tokens or more, over those that accepted j - 1 or more
    and drafted j. None where no round came so far.
    """
    rounds = [one for outcome in outcomes for one in outcome.rounds]
    shares: list[float | None] = []
    for position in range(1, draft_count + 1):
        came = sum(drafted >= position and accepted >= position - 1 for drafted, accepted in rounds)
        stood = sum(accepted >= position for _, accepted in rounds)
        shares.append(round(stood / came, 4) if came else None)
    return shares


def draft_method(folder: Path) -> str:
    """Return "dflash" or "eagle3": what the checkpoint in `folder` says that it is.

    Raises:
        UserError: there is no checkpoint.
    """
    if not folder.is_dir():
        raise UserError(f"--draft-model {str(folder)!r} is not a folder")
    content = read_config_object(folder / "config.json")
    return "dflash" if is_dflash(content, stored_tensors(folder)) else "eagle3"


def check_pair(info: TargetInfo, drafter: Drafter) -> None:
    """Refuse a draft of another target, as a coordinator's handshake does.

    Raises:
        UserError: names the field and both values.
    """
    own = drafter.info
    for name, theirs, ours in (
        ("tokenizer hash", own.tokenizer_hash, info.tokenizer_hash),
        ("vocabulary size", own.vocab_size, info.vocab_size),
        ("row width", own.row_format.width, info.row_width),
    ):
        if theirs is not None and theirs != ours:
            raise UserError(f"the draft's {name} is {theirs}; the target's is {ours}")


def _drafter_config(config: EvaluateConfig, method: str, target: Path) -> DrafterConfig:
    """Return what `serve` would be told; raw rows need no fusion by the target."""
    return DrafterConfig(
        draft=method,
        draft_model=config.draft_model,
        target=str(target),
        runtime=config.draft_runtime,
        precision=config.draft_precision,
        device=config.draft_device,
        threads=config.threads,
        draft_sampling=config.draft_sampling,
        slot_count=config.sessions,
        max_context_length=config.max_context_length,
        rows="raw",
        row_dtype="float32",
        cache_dir=config.cache_dir,
    )


def _load_target(config: EvaluateConfig, folder: Path, drafter: Drafter) -> Target:
    return load_target(
        folder=folder,
        model_id=Path(config.target).name,
        runtime=config.runtime,
        precision=config.chosen_precision,
        cache_dir=config.cache_dir.expanduser(),
        tap_layers=drafter.info.tap_layers,
        max_context_length=config.max_context_length,
        slot_count=config.sessions,
        max_prefill_chunk=MAX_PREFILL_CHUNK,
        threads=config.threads,
        device=config.device,
    )


def _prompt_ids(place: str, prompt: Prompt, text: ChatText, info: TargetInfo) -> Sequence[int]:
    """Return a prompt's tokens.

    Raises:
        UserError: they are no tokens of the target, or leave no room for an answer.
    """
    token_ids = prompt.token_ids if prompt.text is None else text.user_turn(prompt.text)
    if max(token_ids) >= info.vocab_size:
        raise UserError(f"{place}: token {max(token_ids)} is not below {info.vocab_size}")
    if len(token_ids) >= info.max_context_length:
        raise UserError(
            f"{place}: the prompt has {len(token_ids)} tokens; --max-context-length is "
            f"{info.max_context_length}, one of them for the answer"
        )
    return token_ids


def _question(
    config: EvaluateConfig,
    prompt: Prompt,
    prompt_ids: Sequence[int],
    temperature: float,
    info: TargetInfo,
) -> Question:
    return Question(
        prompt_class=prompt.prompt_class,
        prompt_ids=prompt_ids,
        sampling=Sampling(temperature=temperature, seed=prompt.seed),
        draft_sampling=DraftSampling.METHOD_DEFAULT,
        draft_count=max(config.draft_counts),
        output_limit=min(config.max_tokens, info.max_context_length - len(prompt_ids)),
    )


def _settings(
    config: EvaluateConfig, served: DrafterConfig, drafter: Drafter, info: TargetInfo
) -> dict[str, Any]:
    """Return what the figures belong to."""
    return {
        "evaluation": "acceptance",
        "method": served.draft,
        "draft_model": drafter.info.model_id,
        "draft_model_hash": drafter.info.model_hash,
        "draft_runtime": served.runtime,
        "draft_precision": served.chosen_precision,
        "draft_sampling": served.chosen_draft_sampling,
        "target": info.model_id,
        "target_model_hash": info.model_hash,
        "runtime": info.runtime,
        "precision": info.precision,
        "prompt_file": config.prompts.name,
        "max_tokens": config.max_tokens,
        "sessions": config.sessions,
    }
