"""config.json is read once, whole, and never guessed at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graph_runtime.config_values import read_config_object
from splitspec.errors import UserError


def test_an_object_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1, "b": {"a": 2}}')
    assert read_config_object(tmp_path / "config.json") == {"a": 1, "b": {"a": 2}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds no JSON object"),
        ('{"block_size": 8, "block_size": 4}', "the key 'block_size' stands twice"),
        ('{"x": {"y": 1, "z": 2, "y": 1}}', "the key 'y' stands twice"),
    ],
)
def test_what_cannot_be_read_in_one_way_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=said) as refusal:
        read_config_object(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_pipe_or_a_folder_in_its_place_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(UserError, match=f"{name} is no regular file"):
            read_config_object(tmp_path / name)
    with pytest.raises(UserError, match="cannot read"):
        read_config_object(tmp_path / "absent")
