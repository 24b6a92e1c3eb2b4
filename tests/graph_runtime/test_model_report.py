"""What `model list` and `model show` tell of models and of the drafts that ship for them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from graph_runtime.model_files import model_hash, tokenizer_hash
from graph_runtime.model_report import list_lines, show
from graph_runtime.model_store import PackagedModel
from splitspec import drafts
from splitspec.errors import UserError
from tests.shipped import lay_draft
from tests.tiny import write_tiny_model

TAU = {"3": 2.5, "5": 2.75, "7": 3.0}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache with the model "tiny", which is known as "known" is; both drafts ship."""
    known = PackagedModel(
        package="p", version="1", file="f", sha256="0", download_bytes=12_300_000, licence="MIT"
    )
    monkeypatch.setattr("graph_runtime.model_report.KNOWN_MODELS", {"tiny": known, "known": known})
    monkeypatch.setattr(drafts, "weights_dir", lambda: tmp_path / "weights")
    write_tiny_model(tmp_path / "models" / "tiny")
    write_tiny_model(tmp_path / "models" / "org--big", seed=1)
    for method in ("eagle3", "dflash"):
        lay_draft(
            tmp_path / "weights",
            "tiny",
            method,
            training={"target_model_hash": "0" * 64, "tau": TAU, "steps": 3, "parameters": {}},
        )
    return tmp_path


def test_a_list_says_what_is_pulled_how_large_it_is_and_which_drafts_ship(cache: Path) -> None:
    """Sizes are those of the files on the disk."""
    header, *lines = list_lines(cache)
    assert header.split() == ["MODEL", "PULLED", "WEIGHTS", "TRAINED", "DRAFTS", "FOLDER"]
    weights = (cache / "models" / "tiny" / "model.safetensors").stat().st_size
    size = f"{round(weights / 1e6)} MB"
    assert [line.split(maxsplit=4) for line in lines] == [
        ["org/big", "yes", *size.split(), f"none            {cache}/models/org--big"],
        ["tiny", "yes", *size.split(), f"eagle3, dflash  {cache}/models/tiny"],
        ["known", "no", "12", "MB", "download  none"],
    ]
    starts = {line.find("yes" if "yes" in line else "no ") for line in lines}
    assert starts == {header.find("PULLED")}, "columns stand under their heads"


def test_a_large_model_is_told_in_gigabytes(cache: Path) -> None:
    weights = cache / "models" / "tiny" / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(16_060_000_000)  # sparse
    assert " 16.1 GB " in list_lines(cache)[2]


def test_a_model_is_shown_with_its_shape_its_hashes_its_licence_and_its_drafts(cache: Path) -> None:
    folder = cache / "models" / "tiny"
    shown = show(folder, cache)
    assert [draft.pop("weight_bytes") for draft in shown["drafts"]] == [
        (cache / "weights" / f"tiny-{method}" / "model.safetensors").stat().st_size
        for method in ("eagle3", "dflash")
    ]
    assert shown == {
        "folder": str(folder),
        "architecture": "LlamaForCausalLM",
        "vocab_size": 300,
        "n_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "tied": True,
        "max_context_length": 2048,
        "weight_bytes": (folder / "model.safetensors").stat().st_size,
        "model_hash": model_hash(folder, cache),
        "tokenizer_hash": tokenizer_hash(folder),
        "licence": "MIT",
        "drafts": [
            {"method": method, "folder": str(cache / "weights" / f"tiny-{method}"), "tau": TAU}
            for method in ("eagle3", "dflash")
        ],
    }


def test_a_model_under_another_name_has_the_drafts_of_its_hash(cache: Path) -> None:
    folder = write_tiny_model(cache / "mine", seed=2)
    assert show(folder, cache)["drafts"] == []
    lay_draft(
        cache / "weights",
        "third",
        "dflash",
        training={"target_model_hash": model_hash(folder, cache)},
    )
    (draft,) = show(folder, cache)["drafts"]
    assert (draft["folder"], draft["tau"]) == (str(cache / "weights" / "third-dflash"), None)


def test_a_draft_is_shown_with_what_its_training_was(cache: Path) -> None:
    folder = cache / "weights" / "tiny-dflash"
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A draft\n")
    assert show(folder, cache) == {
        "folder": str(folder),
        "draft_method": "dflash",
        "weight_bytes": (folder / "model.safetensors").stat().st_size,
        "model_hash": model_hash(folder, cache),
        "licence": "apache-2.0",
        "target_model_hash": "0" * 64,
        "steps": 3,
        "tau": TAU,
    }


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        (None, None),
        ("# A model\nlicense: mit\n", None),
        ("---\ntags: [x]\n---\nlicense: mit\n", None),
        ("---\nlicense: mit\n", None),
        ("---\ntags: [x]\nlicense: mit\n---\n", "mit"),
    ],
)
def test_the_licence_of_a_folder_is_what_its_card_states(
    card: str | None, licence: str | None, cache: Path
) -> None:
    """A user's own folder is not the known model that it is named after."""
    folder = cache / "elsewhere" / "known"
    shutil.copytree(cache / "models" / "tiny", folder)
    if card is not None:
        (folder / "README.md").write_text(card)
    assert show(folder, cache)["licence"] == licence


def test_a_card_that_is_no_text_is_one_line(cache: Path) -> None:
    folder = write_tiny_model(cache / "mine")
    (folder / "README.md").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"cannot read .*README\.md"):
        show(folder, cache)
