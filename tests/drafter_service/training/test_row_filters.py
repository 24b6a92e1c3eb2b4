"""Filters and the split, on rows written by hand and against a count in plain Python."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from drafter_service.training.rollouts_config import RowFilters
from drafter_service.training.row_filters import LOOP_GRAM, loop_shares, select
from splitspec.errors import UserError

END = 2
OPENING = 3
LENGTH = 40


def row(user: list[int], answer: list[int]) -> tuple[list[int], list[int]]:
    """Return tokens and roles of a row: opening, user turn, answer opening, answer, filler."""
    tokens = [9] * OPENING + [*user, END, 8] + answer
    roles = [0] * (OPENING + len(user) + 2) + [1] * len(answer)
    filler = LENGTH - len(tokens)
    return tokens + [7] * filler, roles + [0] * filler


def chosen(rows: list[tuple[list[int], list[int]]], **limits: float) -> tuple:
    tokens = torch.tensor([tokens for tokens, _ in rows], dtype=torch.int32)
    roles = torch.tensor([roles for _, roles in rows], dtype=torch.uint8)
    filters = RowFilters(**{"min_answer_tokens": 4, "held_out_share": 0.0, **limits})
    selection = select(tokens, roles, opening_length=OPENING, user_end_token=END, filters=filters)
    return selection.training_rows.tolist(), selection.held_out_rows.tolist(), selection.counts


def test_each_row_is_dropped_for_one_reason_and_counted() -> None:
    answer = list(range(100, 120))
    rows = [
        row([20, 21], answer),
        row([20, 21], answer[:3]),  # short
        row([20, 22], [50] * 20),  # looping
        row([20, 21], answer),  # duplicate
        row([20, 21], answer[::-1]),  # the same question, another answer
        row([20, 23], answer),  # another question, the same answer
    ]
    training, held_out, counts = chosen(rows)
    assert training == [0, 4, 5]
    assert held_out == []
    assert counts == {
        "rows": 6, "tokens": 240, "short": 1, "looping": 1, "duplicate": 1,
        "training": 3, "held_out": 0, "answer_tokens": 60,
    }  # fmt: skip


def test_a_row_without_any_answer_is_short_whatever_the_limit() -> None:
    training, _, counts = chosen([row([20], [])], min_answer_tokens=0)
    assert (training, counts["short"]) == ([], 1)


def test_rows_with_the_same_question_are_on_one_side() -> None:
    rows = [row([20 + i % 50], list(range(100 + i, 112 + i))) for i in range(400)]
    training, held_out, _ = chosen(rows, held_out_share=0.2)
    assert sorted(training + held_out) == list(range(400))
    assert not {i % 50 for i in training} & {i % 50 for i in held_out}
    assert 2 <= len({i % 50 for i in held_out}) <= 20, "about 10 of 50 questions"


def test_the_split_does_not_depend_on_which_rows_there_are() -> None:
    rows = [row([20 + i], list(range(100, 112))) for i in range(100)]
    _, held_out, _ = chosen(rows, held_out_share=0.2)
    _, later, _ = chosen(rows[50:], held_out_share=0.2)
    assert later == [i - 50 for i in held_out if i >= 50]


def test_loop_shares_are_those_of_a_count_in_plain_python() -> None:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(2, (50, 64), generator=generator, dtype=torch.int32)
    roles = (torch.rand(50, 64, generator=generator) < 0.97).to(torch.uint8)
    wanted = []
    for some, of in zip(tokens.tolist(), roles.tolist(), strict=True):
        starts = [p for p in range(64 - LOOP_GRAM + 1) if all(of[p : p + LOOP_GRAM])]
        grams = {p: tuple(some[p : p + LOOP_GRAM]) for p in starts}
        times = Counter(grams.values())
        covered = {p + i for p, gram in grams.items() if times[gram] > 1 for i in range(LOOP_GRAM)}
        wanted.append(len(covered) / max(sum(of), 1))
    assert len(set(wanted)) > 10, "the rows are of many kinds"
    torch.testing.assert_close(loop_shares(tokens, roles), torch.tensor(wanted))


def test_rows_shorter_than_a_gram_do_not_loop() -> None:
    tokens = torch.ones(2, LOOP_GRAM - 1, dtype=torch.int32)
    assert loop_shares(tokens, tokens.to(torch.uint8)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_answer_tokens", -1), ("max_loop_share", 1.5), ("held_out_share", float("nan"))],
)
def test_a_limit_out_of_its_range_is_refused_by_its_flag(name: str, value: float) -> None:
    with pytest.raises(UserError, match="--" + name.replace("_", "-")):
        RowFilters(**{name: value})
