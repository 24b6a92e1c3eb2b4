"""What answers yield a round (tau), by class of prompt and without those that loop.

And the files of prompts that they answer. No torch: benchmarks of running services count the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitspec.errors import UserError

LOOP_LENGTH = 8
"""Tokens of a gram that makes a loop when it comes again."""
MAX_LOOP_SHARE = 0.1
"""An answer with this share of its positions in repeated grams, or more, loops."""
NO_CLASS = "none"
"""Class of a prompt whose line names none."""
_TOKEN_ID_LIMIT = 2**32


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One line of a file of prompts."""

    seed: int
    """Its place among the prompts, from 0: the key of the noise of a sampled answer."""
    line: int
    """Its line in the file, from 1."""
    prompt_class: str
    text: str | None
    """A user's message for the model's chat template; None where token ids are given."""
    token_ids: tuple[int, ...]
    """The prompt as it is; empty where a text is given."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer, as far as tau wants to know."""

    prompt_class: str
    token_ids: Sequence[int]
    """Everything emitted up to its end, the prefill bonus and the end token included."""
    round_count: int

    @property
    def loops(self) -> bool:
        """Return whether it is one of those that flatter tau."""
        return loop_share(self.token_ids) >= MAX_LOOP_SHARE


def read_prompts(file: Path, count: int | None = None) -> list[Prompt]:
    """Read a JSONL file with `prompt` or `prompt_ids`, and `class` if it likes, on each line.

    Args:
        file: UTF-8; blank lines and other keys are passed over; `prompt_ids` wins.
        count: take this many from the beginning; None: all.

    Raises:
        UserError: the file cannot be read or has no prompt, or a line is wrong: names the line.
    """
    try:
        lines = file.expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompts of {file}: {error}") from error
    numbered = [(n, line) for n, line in enumerate(lines, start=1) if line.strip()][:count]
    if not numbered:
        raise UserError(f"{file} has no prompt")
    return [_read_line(f"{file}:{n}", line, n, seed) for seed, (n, line) in enumerate(numbered)]


def _read_line(place: str, line: str, number: int, seed: int) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise UserError(f"{place} is not a JSON object")
    prompt_class = entry.get("class", NO_CLASS)
    if not isinstance(prompt_class, str):
        raise UserError(f"{place}: class is {prompt_class!r}; expected a word")
    if "prompt_ids" in entry:
        text, token_ids = None, _token_ids(place, entry["prompt_ids"])
    else:
        text, token_ids = _text(place, entry), ()
    return Prompt(seed=seed, line=number, prompt_class=prompt_class, text=text, token_ids=token_ids)


def _text(place: str, entry: dict[str, Any]) -> str:
    text = entry.get("prompt")
    if "prompt" not in entry:
        raise UserError(f"{place} has neither prompt nor prompt_ids")
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{place}: prompt is {text!r}; expected a text")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of an escaped pair, which no tokenizer takes
        raise UserError(f"{place}: prompt is no Unicode text") from None
    return text


def _token_ids(place: str, value: object) -> tuple[int, ...]:
    if isinstance(value, list) and value and all(map(_is_token_id, value)):
        return tuple(value)
    raise UserError(f"{place}: prompt_ids is {str(value)[:60]}; expected a list of token ids")


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value < _TOKEN_ID_LIMIT


def loop_share(token_ids: Sequence[int]) -> float:
    """Return the share of an answer's positions that sit in a repeated 8-gram.

    A gram is repeated if the same 8 tokens stand at another place of the answer too, which may
    overlap it; all of its occurrences count, the first one as well. 0 for fewer than 9 tokens.
    """
    starts = range(len(token_ids) - LOOP_LENGTH + 1)
    grams = [tuple(token_ids[start : start + LOOP_LENGTH]) for start in starts]
    counts = Counter(grams)
    looping = 0
    end = 0  # positions before it are counted
    for start, gram in enumerate(grams):
        if counts[gram] > 1:
            looping += start + LOOP_LENGTH - max(start, end)
            end = start + LOOP_LENGTH
    return looping / len(token_ids) if token_ids else 0.0


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return tau and what it is made of.

    tau is the tokens after each answer's first over the rounds, pooled: the prefill bonus is free,
    and an answer that ends with it has neither. None where there was no round.
    """
    rounds = sum(answer.round_count for answer in answers)
    after_first = sum(len(answer.token_ids) - 1 for answer in answers)
    return {
        "answers": len(answers),
        "tau": round(after_first / rounds, 3) if rounds else None,
        "tokens_after_first": after_first,
        "rounds": rounds,
    }


def report(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the figures of all answers, those without loops, and both by class of prompt."""
    classes = list(dict.fromkeys(answer.prompt_class for answer in answers))
    by_class = {
        name: _with_and_without_loops([a for a in answers if a.prompt_class == name])
        for name in classes
    }
    return {**_with_and_without_loops(answers), "by_class": by_class}


def _with_and_without_loops(answers: Sequence[Answer]) -> dict[str, Any]:
    steady = [answer for answer in answers if not answer.loops]
    return {**figures(answers), "no_loop": figures(steady)}


def report_row(content: dict[str, Any]) -> dict[str, str]:
    """Return a `report` as the cells of one row of a table for people: tau, and without loops."""
    cells = {"answers": str(content["answers"]), "tau": _cell(content["tau"])}
    steady = content["no_loop"]
    cells["no loop"] = f"{_cell(steady['tau'])} ({steady['answers']})"
    return cells | {name: _cell(own["tau"]) for name, own in content["by_class"].items()}


def print_results(results: Sequence[dict[str, Any]]) -> None:
    """Print tables for people: tau, tau without answers that loop, and acceptance by position.

    Args:
        results: one for each temperature and K: both, a `report`, and `acceptance`, the shares of
            draft tokens that stood by position, which may be fewer than K.
    """
    rows = [{"T": f"{one['temperature']:g}", "K": str(one["draft_count"])} for one in results]
    print_table([row | report_row(one) for row, one in zip(rows, results, strict=True)])
    print("\nwithout answers that loop")
    print_table([row | _steady_row(one) for row, one in zip(rows, results, strict=True)])
    print("\nacceptance by position, given that those before it were accepted")
    positions = range(max(one["draft_count"] for one in results))
    print_table(
        [
            row | {str(n + 1): _cell(dict(enumerate(one["acceptance"])).get(n)) for n in positions}
            for row, one in zip(rows, results, strict=True)
        ]
    )


def _steady_row(content: dict[str, Any]) -> dict[str, str]:
    steady = {name: own["no_loop"] for name, own in content["by_class"].items()}
    all_steady = content["no_loop"]
    cells = {"answers": str(all_steady["answers"]), "tau": _cell(all_steady["tau"])}
    return cells | {name: f"{_cell(own['tau'])} ({own['answers']})" for name, own in steady.items()}


def print_table(rows: Sequence[dict[str, str]]) -> None:
    """Print rows that have the same keys, their columns as wide as what is in them."""
    columns = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    print("  ".join(f"{name:>{width}}" for name, width in columns.items()))
    for row in rows:
        print("  ".join(f"{row[name]:>{width}}" for name, width in columns.items()))


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
