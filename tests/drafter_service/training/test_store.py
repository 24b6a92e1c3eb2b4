"""Rollouts folders: what is written is read, and what is foreign or damaged is refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafter_service.training.rollouts_config import RowFilters
from drafter_service.training.store import (
    Pass,
    Provenance,
    finish_rollouts,
    open_rollouts,
    start_rollouts,
    write_pass,
)
from splitspec.errors import UserError

PROVENANCE = Provenance(
    model_id="tiny",
    model_hash="a" * 64,
    tokenizer_hash="b" * 64,
    opening_length=2,
    user_end_token=299,
    parameters={"seed": 1, "rows": 4},
)
FILTERS = asdict(RowFilters())
FIRST = "pass-00000.safetensors"


def random_pass(seed: int, length: int = 48) -> Pass:
    tokens = torch.randint(
        299, (4, length), generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )
    tokens[:, 5] = PROVENANCE.user_end_token
    roles = torch.zeros(4, length, dtype=torch.uint8)
    roles[:, 8:] = 1
    return Pass(tokens=tokens, roles=roles, temperatures=torch.tensor([0.0, 0.0, 0.7, 1.0]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of two passes."""
    folder = tmp_path / "deep" / "rollouts"
    assert start_rollouts(folder, PROVENANCE) == 0
    for index in range(2):
        write_pass(folder, index, random_pass(index))
    return folder


def test_what_is_written_is_read(folder: Path) -> None:
    rollouts = open_rollouts(folder, model_hash="a" * 64)
    passes = [random_pass(0), random_pass(1)]
    assert rollouts.provenance == PROVENANCE
    assert torch.equal(rollouts.tokens, torch.cat([one.tokens for one in passes]))
    assert torch.equal(rollouts.roles, torch.cat([one.roles for one in passes]))
    assert torch.equal(rollouts.temperatures, torch.cat([one.temperatures for one in passes]))
    assert torch.cat((rollouts.training_rows, rollouts.held_out_rows)).sort()[0].tolist() == list(
        range(8)
    )


def test_text_that_is_there_takes_other_filters(folder: Path) -> None:
    stricter = replace(PROVENANCE, filters=RowFilters(min_answer_tokens=41))
    assert start_rollouts(folder, stricter) == 2
    with pytest.raises(UserError, match=r"keep no row.*'short': 8"):
        open_rollouts(folder)
    assert start_rollouts(folder, PROVENANCE) == 2
    assert open_rollouts(folder).counts["short"] == 0


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        (None, "filters is None; expected held_out_share, max_loop_share, min_answer_tokens"),
        ({"max_loop_share": 0.5}, "expected held_out_share, max_loop_share, min_answer_tokens"),
        ({**FILTERS, "max_loop_share": "half"}, r"filters\.max_loop_share is 'half'"),
        ({**FILTERS, "max_loop_share": 7}, "--max-loop-share 7 is not in"),
    ],
)
def test_filters_that_are_none_are_named(folder: Path, filters: object, said: str) -> None:
    path = folder / "rollouts.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "filters": filters}))
    with pytest.raises(UserError, match=said):
        open_rollouts(folder)


def test_a_folder_that_is_there_is_continued_after_its_last_pass(folder: Path) -> None:
    assert start_rollouts(folder, PROVENANCE) == 2
    finish_rollouts(folder, open_rollouts(folder))
    counts = json.loads((folder / "rollouts.json").read_text())["counts"]
    assert (counts["passes"], counts["rows"], counts["tokens"]) == (2, 8, 384)
    assert start_rollouts(folder, PROVENANCE) == 2
    assert open_rollouts(folder).provenance == PROVENANCE


def test_a_pass_that_was_not_written_to_its_end_does_not_count(folder: Path) -> None:
    (folder / "pass-00002.part").write_bytes(b"half")
    assert start_rollouts(folder, PROVENANCE) == 2
    assert len(open_rollouts(folder).tokens) == 8


def test_text_of_another_target_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"text of tiny \(model hash aaaaaaaaaaaa\).*cccccccccccc"):
        open_rollouts(folder, model_hash="c" * 64)
    with pytest.raises(UserError, match=r"made with model_hash 'aaaa.*this run has 'cccc"):
        start_rollouts(folder, replace(PROVENANCE, model_hash="c" * 64))


def test_other_parameters_are_refused_by_name_and_value(folder: Path) -> None:
    other = replace(PROVENANCE, parameters={"seed": 2, "rows": 4})
    with pytest.raises(UserError, match="made with seed 1, this run has 2"):
        start_rollouts(folder, other)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("hello")
    with pytest.raises(UserError, match=r"not empty.*'letter.txt'"):
        start_rollouts(tmp_path, PROVENANCE)
    with pytest.raises(UserError, match=r"no rollouts folder: .*rollouts\.json"):
        open_rollouts(tmp_path)
    with pytest.raises(UserError, match="cannot make the folder"):
        start_rollouts(tmp_path / "letter.txt" / "below", PROVENANCE)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "damaged"),
        ("[]", "format_version is None"),
        ('{"format_version": 99}', "format_version is 99; expected 1"),
        ('{"format_version": 1, "model_id": 7}', "model_id is 7; expected str"),
    ],
)
def test_a_damaged_description_is_refused(folder: Path, text: str, told: str) -> None:
    (folder / "rollouts.json").write_text(text)
    with pytest.raises(UserError, match=told):
        open_rollouts(folder)


def test_a_damaged_pass_is_refused_by_name(folder: Path) -> None:
    path = folder / FIRST
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=rf"{FIRST} is damaged"):
        open_rollouts(folder)


def test_a_missing_pass_is_named(folder: Path) -> None:
    (folder / FIRST).unlink()
    with pytest.raises(UserError, match=f"{FIRST} is missing"):
        open_rollouts(folder)


def test_a_folder_without_a_pass_is_refused(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(UserError, match="holds no pass yet"):
        open_rollouts(folder)


def test_a_file_of_other_tensors_is_no_pass(folder: Path) -> None:
    one = random_pass(0)
    save_file({"tokens": one.tokens, "roles": one.roles}, folder / FIRST)
    with pytest.raises(UserError, match=f"{FIRST} is no pass of rollouts"):
        open_rollouts(folder)
    tensors = {"tokens": one.tokens, "roles": one.roles[:, :3].contiguous()}
    save_file({**tensors, "temperatures": one.temperatures}, folder / FIRST)
    with pytest.raises(UserError, match=f"{FIRST} is no pass of rollouts: its shapes"):
        open_rollouts(folder)


def test_passes_of_different_lengths_are_refused(folder: Path) -> None:
    write_pass(folder, 1, random_pass(1, length=40))
    with pytest.raises(UserError, match="rows of different lengths"):
        open_rollouts(folder)


def test_a_pass_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"cannot write .*{FIRST}"):
        write_pass(tmp_path / "gone", 0, random_pass(0))
