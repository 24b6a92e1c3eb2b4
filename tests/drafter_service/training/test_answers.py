"""Files of prompts, loops, and tau by class, against loops written another way and by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.training.answers import (
    NO_CLASS,
    Answer,
    figures,
    loop_share,
    print_results,
    print_table,
    read_prompts,
    report,
    report_row,
)
from splitspec.errors import UserError


def brute_force_share(token_ids: list[int]) -> float:
    """Mark each position by comparing every pair of places where 8 tokens stand."""
    marked = [False] * len(token_ids)
    for one in range(len(token_ids) - 7):
        for other in range(len(token_ids) - 7):
            if one != other and token_ids[one : one + 8] == token_ids[other : other + 8]:
                marked[one : one + 8] = [True] * 8
    return sum(marked) / len(token_ids) if token_ids else 0.0


@given(st.lists(st.integers(0, 1), max_size=40))
def test_loop_share_equals_the_comparison_of_all_pairs(token_ids: list[int]) -> None:
    assert loop_share(token_ids) == brute_force_share(token_ids)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 12), st.integers(0, 4))
def test_loop_share_equals_the_comparison_of_all_pairs_where_texts_loop(
    before: list[int], period: int, turns: int
) -> None:
    token_ids = before + list(range(period)) * turns
    assert loop_share(token_ids) == brute_force_share(token_ids)


def test_a_text_without_repetition_has_no_loop_and_one_of_two_halves_is_all_loop() -> None:
    assert loop_share([]) == 0.0
    assert loop_share([1] * 8) == 0.0  # one gram, once
    assert loop_share([1] * 9) == 1.0
    assert loop_share(list(range(100))) == 0.0
    assert loop_share([*range(8), *range(8)]) == 1.0
    assert loop_share([*range(7), 99, *range(7)]) == 0.0
    assert loop_share([*range(8), 99, 98, 97, 96, *range(8)]) == 16 / 20


def answer(prompt_class: str, count: int, rounds: int, *, loops: bool = False) -> Answer:
    token_ids = [7] * count if loops else list(range(count))
    return Answer(prompt_class=prompt_class, token_ids=token_ids, round_count=rounds)


def test_tau_is_pooled_over_answers_and_the_first_token_is_free() -> None:
    # 9 / 3 and 20 / 10 pooled: 29 / 13, not the mean of 3 and 2.
    told = figures([answer("a", 10, 3), answer("b", 21, 10)])
    assert told == {"answers": 2, "tau": 2.231, "tokens_after_first": 29, "rounds": 13}


def test_an_answer_that_ends_with_its_first_token_counts_as_an_answer_and_nothing_else() -> None:
    told = figures([answer("a", 10, 3), answer("a", 1, 0)])
    assert told == {"answers": 2, "tau": 3.0, "tokens_after_first": 9, "rounds": 3}
    assert figures([answer("a", 1, 0)])["tau"] is None


def test_loops_are_counted_apart_in_all_and_in_each_class() -> None:
    answers = [
        answer("a", 11, 5),
        answer("a", 41, 5, loops=True),
        answer("b", 31, 10),
        answer("c", 41, 5, loops=True),
    ]
    told = report(answers)
    assert (told["tau"], told["no_loop"]["tau"]) == (4.8, 2.667)
    assert (told["answers"], told["no_loop"]["answers"]) == (4, 2)
    by_class = {name: (own["tau"], own["no_loop"]["tau"]) for name, own in told["by_class"].items()}
    assert by_class == {"a": (5.0, 2.0), "b": (3.0, 3.0), "c": (8.0, None)}


def test_a_tenth_of_looping_positions_makes_a_loop_and_less_does_not() -> None:
    def with_loop(length: int) -> Answer:
        token_ids = [*range(100, 100 + length - 16), *range(8), *range(8)]
        return Answer(prompt_class="a", token_ids=token_ids, round_count=1)

    assert with_loop(160).loops
    assert not with_loop(161).loops


def test_a_table_shows_both_taus_and_a_dash_where_there_was_no_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = report([answer("maths", 10, 3), answer("chat", 1, 0)])
    print_table([report_row(told)])
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["answers", "tau", "no", "loop", "maths", "chat"]
    assert row.split() == ["2", "3.000", "3.000", "(2)", "3.000", "-"]


def test_the_tables_of_results_tell_each_class_without_its_loops(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = [answer("a", 11, 5), answer("a", 41, 5, loops=True), answer("b", 41, 5, loops=True)]
    told = {"temperature": 0.7, "draft_count": 2, **report(answers), "acceptance": [0.5]}
    print_results([told])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["0.7", "2", "3", "6.000", "2.000", "(1)", "5.000", "8.000"]
    assert lines[4] == ["T", "K", "answers", "tau", "a", "b"]
    assert lines[5] == ["0.7", "2", "1", "2.000", "2.000", "(1)", "-", "(0)"]
    assert lines[8:] == [["T", "K", "1", "2"], ["0.7", "2", "0.500", "-"]]


def write(folder: Path, *lines: Any) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    return file


def test_prompts_are_read_in_order_with_their_place_as_seed(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"class": "maths", "prompt": "What is 2 + 2?\nShow it."},
        "",
        {"prompt_ids": [5, 6], "prompt": "not looked at", "class": "a class of its own"},
        {"prompt": "🙂", "id": 7},
    )
    first, second, third = read_prompts(file)
    assert (first.text, first.prompt_class) == ("What is 2 + 2?\nShow it.", "maths")
    assert (second.text, second.token_ids) == (None, (5, 6))
    assert second.prompt_class == "a class of its own"
    assert (third.text, third.prompt_class) == ("🙂", NO_CLASS)
    assert [(p.seed, p.line) for p in (first, second, third)] == [(0, 1), (1, 3), (2, 4)]
    assert [p.text for p in read_prompts(file, 1)] == [first.text]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{not json", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1, 2]", "is not a JSON object"),
        ({"class": "maths"}, "has neither prompt nor prompt_ids"),
        ({"prompt": 5}, "prompt is 5"),
        ({"prompt": "  "}, "prompt is '  '"),
        ('{"prompt": "\\ud800"}', "no Unicode"),
        ({"prompt": "x", "class": 3}, "class is 3"),
        ({"prompt_ids": []}, "prompt_ids is []"),
        ({"prompt_ids": "12"}, "prompt_ids is 12"),
        ({"prompt_ids": [1, -2]}, "prompt_ids is [1, -2]"),
        ({"prompt_ids": [1, 2**32]}, "prompt_ids is"),
        ({"prompt_ids": [1.0]}, "prompt_ids is"),
        ({"prompt_ids": [True]}, "prompt_ids is"),
        ({"prompt_ids": None, "prompt": "x"}, "prompt_ids is None"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(tmp_path: Path, line: Any, said: str) -> None:
    file = write(tmp_path, {"prompt": "fine"}, "", line)
    with pytest.raises(UserError, match=r"prompts\.jsonl:3") as caught:
        read_prompts(file)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_prompts_or_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no prompt"):
        read_prompts(write(tmp_path, "", "  "))
    with pytest.raises(UserError, match="cannot read"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="cannot read"):
        read_prompts(tmp_path)
    (tmp_path / "latin").write_bytes('{"prompt": "né"}'.encode("latin-1"))
    with pytest.raises(UserError, match="cannot read"):
        read_prompts(tmp_path / "latin")


def test_any_bytes_are_read_or_refused(tmp_path: Path) -> None:
    rng = random.Random(0)
    valid = json.dumps({"class": "a", "prompt": "some text", "prompt_ids": [1, 2]}).encode()
    for _ in range(300):
        content = bytearray(valid)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        (tmp_path / "f").write_bytes(content)
        try:
            read_prompts(tmp_path / "f")
        except UserError:
            continue
