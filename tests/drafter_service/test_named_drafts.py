"""What `--draft` and `--draft-model` mean to the drafter's commands."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import drafter_service.__main__ as drafter
from drafter_service.config import MODEL_METHODS, DrafterConfig
from graph_runtime.model_files import model_hash
from splitspec import drafts
from splitspec.errors import UserError
from tests.shipped import lay_draft
from tests.tiny import write_tiny_model


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the tree of what ships, for the model "tiny" of the cache `tmp_path`."""
    target = write_tiny_model(tmp_path / "models" / "tiny")
    training = {"target_model_hash": model_hash(target, tmp_path)}
    for method in MODEL_METHODS:
        # The hash finds them: they are not named after the model.
        lay_draft(tmp_path / "weights", "little", method, training=training)
    monkeypatch.setattr(drafts, "weights_dir", lambda: tmp_path / "weights")
    return tmp_path / "weights"


def served(
    monkeypatch: pytest.MonkeyPatch, *flags: str, variables: dict[str, str] | None = None
) -> DrafterConfig:
    """Return the configuration that `serve` makes of its flags."""
    configs: list[DrafterConfig] = []
    monkeypatch.setattr(drafter, "run_service", lambda serving: serving.close())
    monkeypatch.setattr(drafter.logger, "info", lambda _format, config: configs.append(config))
    result = CliRunner().invoke(drafter.app, ["serve", *flags], env=variables)
    if result.exception is not None:
        raise result.exception
    (config,) = configs
    return config


@pytest.mark.parametrize(
    ("draft", "method"), [("eagle3", "eagle3"), ("dflash", "dflash"), ("auto", "eagle3")]
)
def test_a_word_serves_the_draft_that_ships_for_the_targets_files(
    draft: str, method: str, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--draft", draft, "--target", "tiny", "--cache-dir", str(tmp_path))
    config = served(monkeypatch, *flags)
    assert (config.draft, config.draft_model) == (method, weights / f"little-{method}")


def test_auto_serves_ngram_where_nothing_ships_or_no_target_is_named(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path / "models" / "other", seed=1)
    flags = ("--draft", "auto", "--target", "other", "--cache-dir", str(tmp_path))
    assert served(monkeypatch, *flags).draft == "ngram"
    assert served(monkeypatch, "--draft", "auto").draft == "ngram"
    assert served(monkeypatch).draft == "ngram"
    with pytest.raises(UserError, match=r"'other' \(what ships: dflash for little, eagle3 for"):
        served(monkeypatch, "--draft", "eagle3", *flags[2:])
    del weights


@pytest.mark.parametrize("method", MODEL_METHODS)
def test_a_folder_serves_its_own_method_also_by_variable(
    method: str, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = weights / f"little-{method}"
    for config in (
        served(monkeypatch, "--draft", str(folder)),
        served(monkeypatch, variables={"SPLITSPEC_DRAFT": str(folder)}),
        served(monkeypatch, "--draft", "auto", "--draft-model", str(folder)),
    ):
        assert (config.draft, config.draft_model) == (method, folder)


@pytest.mark.parametrize("named", ["ships", "draft", "draft-model"])
@pytest.mark.parametrize("method", MODEL_METHODS)
def test_an_export_is_of_what_ships_or_of_a_folder(
    method: str, named: str, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[DrafterConfig] = []
    module = importlib.import_module(f"drafter_service.{method}")
    monkeypatch.setattr(module, "ensure_program", exported.append)
    folder = lay_draft(tmp_path, "mine", method)
    flags = [] if named == "ships" else [f"--{named}", str(folder)]
    common = ["--target", "tiny", "--cache-dir", str(tmp_path)]
    result = CliRunner().invoke(drafter.app, ["export", method, *flags, *common])
    assert result.exit_code == 0, result.exception
    (config,) = exported
    expected = weights / f"little-{method}" if named == "ships" else folder
    assert (config.draft, config.draft_model) == (method, expected)
    assert (config.target, config.cache_dir) == ("tiny", tmp_path)


def test_an_export_of_another_methods_draft_is_refused(weights: Path) -> None:
    flags = ["--draft", str(weights / "little-eagle3")]
    result = CliRunner().invoke(drafter.app, ["export", "dflash", *flags])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).endswith("little-eagle3 is no dflash draft, but eagle3")
