"""Instructions that some rows begin with, so that text covers what users ask for.

A target that writes its own user turns stays near what it was tuned on; these widen it: topics,
arithmetic, code, extraction, rewriting, classification, advice and reasoning.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from drafter_service.training import seed_words as words
from splitspec.errors import UserError

ARITHMETIC_COUNT = 900
EXTRACTION_COUNT = 500
REASONING_COUNT = 300


def built_in_seeds(seed: int) -> list[str]:
    """Return several thousand instructions in a shuffled order, each once."""
    draws = random.Random(f"{seed}/instructions")
    texts = [
        *(form.format(topic=topic) for topic in words.TOPICS for form in words.TOPIC_FORMS),
        *(form.format(task=task) for task in words.CODE_TASKS for form in words.CODE_FORMS),
        *(form.format(text=text) for text in words.SENTENCES for form in words.REWRITE_FORMS),
        *(form.format(what=what) for what in words.SITUATIONS for form in words.ADVICE_FORMS),
        *_many(ARITHMETIC_COUNT, _arithmetic, draws),
        *_many(EXTRACTION_COUNT, _extraction, draws),
        *_many(REASONING_COUNT, _reasoning, draws),
    ]
    unique = list(dict.fromkeys(texts))
    draws.shuffle(unique)
    return unique


def read_seeds(path: Path) -> list[str]:
    """Return the lines of a file of instructions, without empty ones, each once.

    Raises:
        UserError: it cannot be read, or holds none.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"--seeds {path} cannot be read: {error}") from error
    texts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not texts:
        raise UserError(f"--seeds {path} holds no instruction: expected one a line")
    return texts


def _many(count: int, make: Callable[[random.Random], str], draws: random.Random) -> Iterator[str]:
    return (make(draws) for _ in range(count))


def _arithmetic(draws: random.Random) -> str:
    a, b, c = draws.randint(3, 95), draws.randint(3, 95), draws.randint(2, 12)
    one, other = draws.sample(words.NAMES, 2)
    thing, shop = draws.choice(words.THINGS), draws.choice(words.SHOPS)
    return draws.choice(
        [
            f"Work out {a} + {b} - {c} and show each step.",
            f"How much is {a} times {c}?",
            f"{one} buys {a} {thing} at the {shop} and {other} buys {b}. "
            f"They share them equally among {c} friends. How many does each friend get, "
            "and how many are left?",
            f"One of the {thing} costs {c} euros at the {shop}. What do {a} of them cost?",
            f"{one} reads {c} pages an evening. After how many evenings is a book of {a * c} "
            "pages finished?",
            f"Divide {a * c} by {c}. Explain how you got there.",
            f"Find x if {c}x - {b} = {c * a - b}.",
            f"A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
            f"What is {c * 5} percent of {a * 20}?",
            f"{one} is {a} years old and {other} is {c} years younger. How old are they together?",
            f"A {shop} sold {a} {thing} on Monday, {b} on Tuesday and {a + c} on Wednesday. "
            "What is the average a day?",
            f"A bus leaves at {8 + c % 9}:15 and drives for {a + b} minutes. When does it arrive?",
            f"Which is larger, {a}/{c} or {b}/{c + 1}? Explain.",
            f"Continue the sequence: {a}, {a + c}, {a + 2 * c}, {a + 3 * c}, ...",
        ]
    )


def _extraction(draws: random.Random) -> str:
    one, other = draws.sample(words.NAMES, 2)
    place, day, month = (draws.choice(x) for x in (words.PLACES, words.DAYS, words.MONTHS))
    thing, job, shop = (draws.choice(x) for x in (words.THINGS, words.JOBS, words.SHOPS))
    price, number, date = draws.randint(4, 90), draws.randint(2, 40), draws.randint(1, 28)
    text = draws.choice(
        [
            f"On {date} {month}, {one} from {place} ordered {number} {thing} at the {shop} for "
            f"{price} euros. {other} picked them up on {day}.",
            f"{one} works as a {job} in {place} and has done so for {number} years. Before that, "
            f"{one} and {other} ran a {shop} together.",
            f"The meeting is on {day} the {date}th at {number % 12 + 1} pm in {place}. {one} "
            f"brings the {thing}, {other} takes the notes.",
            f"Invoice {number}{date}: {number} {thing}, {price}.50 euros each, sold to {one}, "
            f"{place}, on {date} {month}. Questions go to {other}.",
        ]
    )
    ask = draws.choice(
        [
            "List every name in this text: {text}",
            "Which dates, days or times does this text mention? {text}",
            "Turn this into JSON with the keys who, where, when and what: {text}",
            "Extract all numbers from the text and say what each stands for. {text}",
            "Read the text and answer: who did what, and where? {text}",
            "Write the facts of this text as a bullet list. {text}",
            "Shorten this to a single sentence of at most ten words: {text}",
            "Make a two-column table of the people and what they do: {text}",
        ]
    )
    return ask.format(text=text)


def _reasoning(draws: random.Random) -> str:
    first, second, third = draws.sample(words.NAMES, 3)
    topic, other = draws.sample(words.TOPICS, 2)
    thing, what = draws.choice(words.THINGS), draws.choice(words.SITUATIONS)
    return draws.choice(
        [
            f"{first} is taller than {second}, and {second} is taller than {third}. "
            "Who is the shortest? Explain your reasoning.",
            f"{first} sits left of {second}. {third} sits right of {second}. Who is in the middle?",
            f"Is it true that everyone who knows about {topic} also knows about {other}? Why?",
            f"Which would you rather learn about first, {topic} or {other}? Give reasons.",
            f"What do {topic} and {other} have in common, and how do they differ?",
            f"{first} says the {thing} are missing, {second} says {third} has them. "
            "What should be checked first, and why?",
            f"Name one good and one bad reason for {what}.",
            f"What would change in a town if nobody cared about {topic} any more?",
        ]
    )
