"""What `--fuse-for` means: the same draft as the drafter's `--draft` of the same words."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import verifier_service.__main__ as verifier
from graph_runtime.model_files import model_hash
from splitspec import drafts
from splitspec.errors import UserError
from tests.shipped import lay_draft
from tests.tiny import write_tiny_model
from verifier_service.config import VerifierConfig


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the tree of what ships, for the model "tiny" of the cache `tmp_path`."""
    target = write_tiny_model(tmp_path / "models" / "tiny")
    training = {"target_model_hash": model_hash(target, tmp_path)}
    for method in drafts.MODEL_METHODS:
        # The hash finds them: they are not named after the model.
        lay_draft(tmp_path / "weights", "little", method, training=training)
    monkeypatch.setattr(drafts, "weights_dir", lambda: tmp_path / "weights")
    return tmp_path / "weights"


def fused(monkeypatch: pytest.MonkeyPatch, cache: Path, *flags: str) -> Path | None:
    """Return the folder of the draft that `serve` fuses for."""
    configs: list[VerifierConfig] = []
    monkeypatch.setattr(verifier, "run_service", lambda serving: serving.close())
    monkeypatch.setattr(verifier.logger, "info", lambda _format, config: configs.append(config))
    model = ("--model", "tiny", "--cache-dir", str(cache))
    result = CliRunner().invoke(verifier.app, ["serve", *model, *flags])
    if result.exception is not None:
        raise result.exception
    (config,) = configs
    return config.fuse_for


@pytest.mark.parametrize(
    ("word", "method"), [("eagle3", "eagle3"), ("dflash", "dflash"), ("auto", "eagle3")]
)
def test_a_word_fuses_for_the_draft_that_ships_for_the_models_files(
    word: str, method: str, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fused(monkeypatch, tmp_path, "--fuse-for", word) == weights / f"little-{method}"


@pytest.mark.parametrize("flags", [(), ("--fuse-for", "ngram"), ("--fuse-for", "none")])
@pytest.mark.usefixtures("weights")
def test_nothing_is_fused_for_methods_without_a_model(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fused(monkeypatch, tmp_path, *flags) is None


def test_auto_fuses_nothing_where_nothing_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path / "models" / "tiny")
    monkeypatch.setattr(drafts, "weights_dir", lambda: None)
    assert fused(monkeypatch, tmp_path, "--fuse-for", "auto") is None
    with pytest.raises(UserError, match=r"^--fuse-for dflash: no such trained draft ships for 'ti"):
        fused(monkeypatch, tmp_path, "--fuse-for", "dflash")


def test_a_folder_is_fused_for_whatever_its_file_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The projection's reader asks the tensors too, so a file that states no method will do."""
    write_tiny_model(tmp_path / "models" / "tiny")
    (tmp_path / "draft").mkdir()
    assert fused(monkeypatch, tmp_path, "--fuse-for", f"{tmp_path}/draft") == tmp_path / "draft"
    with pytest.raises(UserError, match=r"^--fuse-for '/nowhere' is neither a folder nor one of"):
        fused(monkeypatch, tmp_path, "--fuse-for", "/nowhere")
