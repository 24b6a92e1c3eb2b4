"""Which draft `export speculator` takes: the one that ships for the model, or one that is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import graph_runtime.__main__ as commands
from graph_runtime.eagle3.checkpoint import Eagle3Source
from graph_runtime.model_files import model_hash
from splitspec import drafts
from splitspec.errors import UserError
from tests.shipped import lay_draft
from tests.tiny import write_tiny_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache with the model "tiny", for whose files "little" drafts ship."""
    target = write_tiny_model(tmp_path / "models" / "tiny")
    training = {"target_model_hash": model_hash(target, tmp_path)}
    for method in drafts.MODEL_METHODS:
        lay_draft(tmp_path / "weights", "little", method, training=training)
    monkeypatch.setattr(drafts, "weights_dir", lambda: tmp_path / "weights")
    return tmp_path


def exported(monkeypatch: pytest.MonkeyPatch, cache: Path, *flags: str) -> Eagle3Source:
    """Return what `export speculator` with these flags lowers."""
    programs = pytest.importorskip("graph_runtime.programs")
    speculator_export = pytest.importorskip("graph_runtime.programs.speculator_export")
    sources: list[Eagle3Source] = []
    monkeypatch.setattr(
        speculator_export, "ensure_speculator", lambda source, **_: sources.append(source)
    )
    monkeypatch.setattr(programs, "check_digest", lambda _path: None)
    common = ["--model", "tiny", "--cache-dir", str(cache)]
    result = CliRunner().invoke(commands.app, ["export", "speculator", *flags, *common])
    if result.exception is not None:
        raise result.exception
    (source,) = sources
    return source


def test_the_draft_that_ships_is_lowered_unless_another_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = cache / "weights" / "little-eagle3"
    assert exported(monkeypatch, cache).folder == shipped
    assert exported(monkeypatch, cache, "--draft", "eagle3").target == cache / "models" / "tiny"
    mine = lay_draft(cache, "mine", "eagle3")
    for flag in ("--draft", "--draft-model"):
        assert exported(monkeypatch, cache, flag, str(mine)).folder == mine


@pytest.mark.parametrize("draft", ["dflash", "ngram", "weights/little-dflash"])
def test_a_draft_of_another_method_is_refused(
    draft: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cache)
    with pytest.raises(UserError, match=f"^--draft {draft} is (dflash|ngram); a speculator drafts"):
        exported(monkeypatch, cache, "--draft", draft)
