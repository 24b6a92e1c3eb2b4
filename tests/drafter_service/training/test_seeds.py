"""Instructions that rows begin with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafter_service.training.seeds import built_in_seeds, read_seeds
from splitspec.errors import UserError

PROMPTS = Path(__file__).parents[3] / "benchmarks" / "prompts"


def test_there_are_thousands_each_once_and_without_a_gap_to_fill() -> None:
    seeds = built_in_seeds(1)
    assert len(seeds) > 5000
    assert len(set(seeds)) == len(seeds)
    for text in seeds:
        assert text == text.strip()
        assert not set("{}|\n") & set(text), text
        assert 12 <= len(text) <= 320, text


def test_the_seed_decides_their_order_and_numbers() -> None:
    assert built_in_seeds(1) == built_in_seeds(1)
    assert built_in_seeds(1) != built_in_seeds(2)
    assert len(set(built_in_seeds(1)) & set(built_in_seeds(2))) > 4000


def test_none_is_a_prompt_that_drafts_are_measured_on() -> None:
    files = sorted(PROMPTS.glob("*.jsonl"))
    prompts = {
        json.loads(line)["prompt"] for path in files for line in path.read_text().splitlines()
    }
    assert len(prompts) >= 60
    assert not prompts & set(built_in_seeds(1))


def test_a_file_of_instructions_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "seeds.txt"
    path.write_text("Sing.\n\n  Dance a little.  \nSing.\nÜbe.\n", encoding="utf-8")
    assert read_seeds(path) == ["Sing.", "Dance a little.", "Übe."]


def test_a_file_that_is_missing_empty_or_no_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "seeds.txt"
    with pytest.raises(UserError, match=r"--seeds .*seeds\.txt cannot be read"):
        read_seeds(path)
    path.write_text("\n \n")
    with pytest.raises(UserError, match="holds no instruction"):
        read_seeds(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        read_seeds(path)
