"""A model is a folder, or the name of a pulled one."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitspec.errors import UserError
from splitspec.folders import model_folder, models_dir, programs_dir


def _write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_with_a_config_is_used_as_it_is(tmp_path: Path) -> None:
    folder = _write_model(tmp_path / "mine")
    assert model_folder(str(folder), tmp_path / "cache") == folder


def test_a_pulled_model_is_found_by_its_name(tmp_path: Path) -> None:
    folder = _write_model(models_dir(tmp_path) / "org--name")
    assert model_folder("org/name", tmp_path) == folder


def test_a_name_that_is_neither_says_how_to_pull_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="splitspec model pull nothing"):
        model_folder("nothing", tmp_path)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("m" * 300, f"'{'m' * 77}...' cannot be looked up: File name too long"),
        ("~nobody-has-this-name/m", "cannot be looked up"),
    ],
)
def test_a_name_that_no_disk_can_hold_is_one_clear_line(
    model: str, named: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        model_folder(model, tmp_path)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_dir(Path("~/cache")) == tmp_path / "cache" / "models"
    assert programs_dir(Path("~/cache")) == tmp_path / "cache" / "programs"
