"""An answer ends where it would if its tokens came one by one, and shows only what is certain."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.output import Output, StopStrings
from coordinator.text import ModelText
from splitspec.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from tests.tiny import write_tiny_tokenizer

_LOADED: list[ModelText] = []


@pytest.fixture(scope="module", autouse=True)
def _load(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("output")
    write_tiny_tokenizer(folder)
    _LOADED.append(ModelText.load(folder))


def _ids(text: str) -> list[int]:
    """Return one token a byte."""
    return [_LOADED[0].encode(char, add_special_tokens=False)[0] for char in text]


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 8), min_size=1, max_size=30),
)
def test_stop_strings_end_the_text_before_the_earliest_and_at_the_first_token_that_completes_one(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    # The reference: add letters one at a time until a stop string is there.
    count = next((n for n in range(1, len(text) + 1) if any(s in text[:n] for s in stops)), None)
    seen = text[:count]
    expected = seen if count is None else seen[: min(seen.find(s) for s in stops if s in seen)]

    output = Output(_LOADED[0], limit=1000, stops=stops)
    ids, shown = [], ""
    tokens = _ids(text)
    for cut in cuts * 30:
        if not tokens or output.finish is not None:
            break
        output.push(tokens[:cut])
        tokens = tokens[cut:]
        new_ids, new_text = output.take()
        ids += new_ids
        shown += new_text
        assert (expected + "b" * 4).startswith(shown) or expected.startswith(shown)
    if count is None:
        output.finish = FINISH_REASON_LENGTH  # the target ends: what was held back is shown
        shown += output.take()[1]
    else:
        assert output.finish == FINISH_REASON_STOP
    assert shown == expected
    assert ids == _ids(seen)


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["</end>"])
    assert stops.push("a</") == "a"
    assert stops.push("en") == ""
    assert stops.push("x") == "</enx"
    assert stops.push("<") == ""
    assert stops.flush() == "<"


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_the_earliest_of_stop_token_stop_string_and_limit_wins(size: int) -> None:
    text = "abcdefgh"
    ids = _ids(text)

    def end(limit: int, stop_token: str, stop: str) -> tuple[list[int], str, int]:
        output = Output(
            _LOADED[0], limit=limit, stop_token_ids=_ids(stop_token), stops=[stop] if stop else []
        )
        for i in range(0, len(ids), size):
            if output.push(ids[i : i + size]) is not None:
                break
        assert output.finish is not None
        return *output.take(), output.finish

    assert end(8, "d", "f") == (ids[:4], "abc", FINISH_REASON_STOP)
    assert end(8, "d", "bc") == (ids[:3], "a", FINISH_REASON_STOP)
    assert end(2, "d", "bc") == (ids[:2], "ab", FINISH_REASON_LENGTH)
    assert end(3, "d", "bc") == (ids[:3], "a", FINISH_REASON_STOP)
    assert end(8, "d", "") == (ids[:4], "abc", FINISH_REASON_STOP)
    assert end(4, "d", "") == (ids[:4], "abc", FINISH_REASON_STOP)
    assert end(8, "x", "") == (ids, text, FINISH_REASON_LENGTH)


def test_an_incomplete_character_at_the_end_is_shown_as_the_decoder_shows_it(
    tmp_path: Path,
) -> None:
    write_tiny_tokenizer(tmp_path)
    text = ModelText.load(tmp_path)
    ids = text.encode("a🙂", add_special_tokens=False)[:-1]
    for stops in ([], ["zz"]):
        output = Output(text, limit=len(ids), stops=stops)
        assert output.push(ids) == FINISH_REASON_LENGTH
        assert output.take() == (ids, text.tokenizer.decode(ids))
