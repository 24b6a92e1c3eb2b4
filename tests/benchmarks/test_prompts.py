"""The held-out prompts: enough of each class, and nothing that training or a sweep has seen."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from drafter_service.training.answers import read_prompts
from drafter_service.training.seeds import built_in_seeds

FOLDER = Path(__file__).parents[2] / "benchmarks" / "prompts"
CLASSES = ("writing", "reasoning", "code", "extraction", "maths", "chat")
SHARED_WORDS = 5
"""A prompt has no run of so many words in common with a text of the other kind."""


def texts(name: str) -> list[str]:
    found = [prompt.text for prompt in read_prompts(FOLDER / name)]
    assert None not in found, "every prompt is a text"
    return [text for text in found if text is not None]


def runs(text: str) -> set[tuple[str, ...]]:
    """Return every run of SHARED_WORDS words."""
    words = re.findall(r"\w+", text.lower())
    return {
        tuple(words[i : i + SHARED_WORDS]) for i in range(max(1, len(words) - SHARED_WORDS + 1))
    }


def test_there_are_at_least_twelve_held_out_prompts_of_each_class_in_turn() -> None:
    classes = [prompt.prompt_class for prompt in read_prompts(FOLDER / "held_out.jsonl")]
    assert min(Counter(classes)[name] for name in CLASSES) >= 12
    assert classes == [CLASSES[i % len(CLASSES)] for i in range(len(classes))]


def test_held_out_prompts_are_distinct_and_vary_in_length() -> None:
    held_out = texts("held_out.jsonl")
    assert len(set(held_out)) == len(held_out)
    lengths = sorted(map(len, held_out))
    assert lengths[0] < 50 < 300 < lengths[-1]


def test_no_held_out_prompt_can_come_from_a_training_seed() -> None:
    """The templates' fillings vary with the seed, so words are compared and not only texts."""
    seeds = {text for seed in range(3) for text in built_in_seeds(seed)}
    seen = {run for text in seeds for run in runs(text)}
    for prompt in texts("held_out.jsonl"):
        assert not any(seed.lower() in prompt.lower() for seed in seeds), prompt
        assert not runs(prompt) & seen, prompt


def test_no_held_out_prompt_is_one_that_settings_are_chosen_on() -> None:
    seen = {run for text in texts("short.jsonl") for run in runs(text)}
    for prompt in texts("held_out.jsonl"):
        assert not runs(prompt) & seen, prompt
