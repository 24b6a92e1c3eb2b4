"""Which draft a word, a folder and a target mean: the same for every process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from graph_runtime.config_values import read_config_object
from graph_runtime.dflash.layouts import is_dflash
from splitspec import drafts
from splitspec.drafts import (
    MODEL_METHODS,
    PREFERRED,
    WORDS,
    NamedDraft,
    find_draft,
    find_folder,
    method_of,
    shipped_drafts,
    shipped_for,
    stated_method,
    weights_dir,
)
from splitspec.errors import UserError
from tests import dflash_layouts, eagle3_layouts
from tests.shipped import lay_draft
from tests.tiny import write_tiny_model

HASH, OTHER_HASH = "a" * 64, "b" * 64


def never() -> str:
    raise AssertionError("a hash costs a read of every byte: only where what ships is looked for")


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the tree of what ships, with both methods for "tiny" and one for "other"."""
    folder = tmp_path / "weights"
    monkeypatch.setattr(drafts, "weights_dir", lambda: folder)
    lay_draft(folder, "tiny", "dflash", training={"target_model_hash": HASH, "tau": {"3": 2.5}})
    lay_draft(folder, "tiny", "eagle3", training={"target_model_hash": HASH, "tau": {"3": 2.6}})
    lay_draft(folder, "other", "dflash")
    return folder


@pytest.fixture
def no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "weights_dir", lambda: tmp_path / "missing")


@pytest.mark.parametrize("layout", dflash_layouts.LAYOUTS)
def test_every_layout_of_dflash_states_its_method(layout: str, tmp_path: Path) -> None:
    folder = dflash_layouts.write_draft(
        tmp_path / "draft", dflash_layouts.random_weights(1), layout=layout
    )
    assert method_of(folder) == "dflash"
    assert read_as_dflash(folder)


@pytest.mark.parametrize("layout", eagle3_layouts.LAYOUTS)
def test_every_layout_of_eagle_3_states_its_method(layout: str, tmp_path: Path) -> None:
    folder = eagle3_layouts.write_draft(
        tmp_path / "draft", layout=layout, weights=eagle3_layouts.weights_for(layout, 1)
    )
    if layout == "deepspec":  # it has all of the target's vocabulary, and a name of its own
        assert read_config_object(folder / "config.json").get("draft_vocab_size") is None
    assert method_of(folder) == "eagle3"
    assert not read_as_dflash(folder)


def read_as_dflash(folder: Path) -> bool:
    """Return what the checkpoints' readers take the draft for."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
    return is_dflash(read_config_object(folder / "config.json"), names)


def test_a_whole_model_is_no_draft(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    assert stated_method(read_config_object(folder / "config.json")) is None
    line = r"states no drafting method: .* --draft eagle3 or --draft dflash, with --draft-model"
    with pytest.raises(UserError, match=line):
        find_draft(str(folder), target=None)


def test_the_file_decides_before_its_tensors_are_asked() -> None:
    """A tensor's name that only DFlash has is no matter where config.json says EAGLE-3."""
    content = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 7}
    assert stated_method(content) == "eagle3"
    assert not is_dflash(content, ["hidden_norm.weight"])


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"architectures": "DFlashDraftModel"},
        {"architectures": [None, 3]},
        {"speculators_model_type": "mtp", "architectures": ["DFlashDraftModel"]},
        {"dflash_config": None, "draft_vocab_size": None},
    ],
    ids=str,
)
def test_a_file_that_says_nothing_usable_states_none(content: dict[str, object]) -> None:
    assert stated_method(content) is None


def test_what_ships_is_told_by_its_folder_and_its_training(weights: Path) -> None:
    found = {(d.target, d.method): (d.folder, d.target_hash) for d in shipped_drafts()}
    assert found == {
        ("other", "dflash"): (weights / "other-dflash", None),
        ("tiny", "dflash"): (weights / "tiny-dflash", HASH),
        ("tiny", "eagle3"): (weights / "tiny-eagle3", HASH),
    }


@pytest.mark.parametrize("place", ["tiny", "/models/tiny"])
@pytest.mark.parametrize("target_hash", [None, OTHER_HASH])
@pytest.mark.usefixtures("weights")
def test_where_no_hash_fits_the_models_name_does(place: str, target_hash: str | None) -> None:
    assert [draft.method for draft in shipped_for(place, target_hash)] == list(PREFERRED)
    assert [draft.method for draft in shipped_for("other", target_hash)] == ["dflash"]
    assert shipped_for("tin", target_hash) == []


@pytest.mark.usefixtures("weights")
def test_a_known_hash_finds_what_was_trained_for_these_files_whatever_they_are_called() -> None:
    assert [draft.target for draft in shipped_for("/my/gguf", HASH)] == ["tiny", "tiny"]
    assert [draft.target for draft in shipped_for("other", HASH)] == ["tiny", "tiny"]


def test_a_hash_that_one_draft_states_hides_none_of_another_method(weights: Path) -> None:
    """Guards: a draft without a hash in its training.json was lost beside one that has one."""
    (weights / "tiny-dflash" / "training.json").unlink()
    assert [draft.method for draft in shipped_for("tiny", HASH)] == list(PREFERRED)


def test_a_draft_for_these_very_files_goes_before_one_of_the_name(weights: Path) -> None:
    for target in ("a", "z"):
        lay_draft(weights, target, "dflash", training={"target_model_hash": OTHER_HASH})
        assert shipped_for("other", OTHER_HASH)[0].target == target
        (weights / f"{target}-dflash" / "config.json").unlink()


@pytest.mark.parametrize("method", MODEL_METHODS)
def test_a_method_alone_is_the_draft_that_ships_for_the_target(method: str, weights: Path) -> None:
    shipped = NamedDraft(method=method, folder=weights / f"tiny-{method}")
    assert find_draft(method, target="tiny") == shipped
    assert find_draft(method, target="x", target_hash=lambda: HASH) == shipped


def test_auto_is_the_preferred_draft_that_ships(weights: Path) -> None:
    assert find_draft("auto", target="tiny") == NamedDraft(
        method=PREFERRED[0], folder=weights / f"tiny-{PREFERRED[0]}"
    )
    assert find_draft("auto", target="other").folder == weights / "other-dflash"


@pytest.mark.parametrize("target", ["unknown", None])
@pytest.mark.usefixtures("weights")
def test_auto_is_ngram_where_nothing_ships(target: str | None) -> None:
    assert find_draft("auto", target=target) == NamedDraft(method="ngram", folder=None)


@pytest.mark.usefixtures("no_weights")
def test_without_a_folder_of_weights_auto_is_ngram_and_a_method_says_that_none_ships() -> None:
    """A checkout whose weights were left out still works."""
    assert find_draft("auto", target="tiny").method == "ngram"
    with pytest.raises(UserError, match=r"'tiny' \(what ships: none\)"):
        find_draft("eagle3", target="tiny")


@pytest.mark.usefixtures("weights")
def test_what_does_not_ship_is_refused_with_what_does() -> None:
    with pytest.raises(UserError) as caught:
        find_draft("eagle3", target="other")
    assert str(caught.value) == (
        "--draft eagle3: no such trained draft ships for 'other' (what ships: dflash for other, "
        "dflash for tiny, eagle3 for tiny); name the folder of one, or draft with ngram"
    )
    with pytest.raises(UserError, match=r"^--fuse-for eagle3: no such"):
        find_folder("eagle3", target="other", flag="--fuse-for")
    with pytest.raises(UserError, match=r"eagle3 needs --draft-model, .* or --target"):
        find_draft("eagle3", target=None)


@pytest.mark.parametrize("draft", ["ngram", "none"])
@pytest.mark.usefixtures("weights")
def test_methods_without_a_model_look_for_none(draft: str) -> None:
    expected = NamedDraft(method=draft, folder=None)
    assert find_draft(draft, target="tiny", target_hash=never) == expected


def test_a_folder_names_its_method_itself(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in MODEL_METHODS:
        folder = weights / f"tiny-{method}"
        named = NamedDraft(method=method, folder=folder)
        assert find_draft(str(folder), target=None, target_hash=never) == named
        assert find_draft("auto", folder, target="tiny", target_hash=never) == named
        assert find_draft(method, folder, target="tiny", target_hash=never) == named
    monkeypatch.setenv("HOME", str(weights))
    assert find_draft("~/tiny-eagle3", target=None).folder == weights / "tiny-eagle3"


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (
            lambda p: find_draft(str(p / "no"), target="t"),
            "no' is neither a folder nor one of ngram",
        ),
        (lambda _: find_draft("~nobody-of-this-name/d", target="t"), "~nobody-of-this-name/d"),
        (lambda _: find_draft("x" * 5000, target="t"), "File name too long"),
        (lambda p: find_draft(str(p), target="t"), r"holds no config\.json"),
        (lambda p: find_draft(str(p), p, target="t"), "names a draft, and --draft-model"),
        (lambda p: find_draft("auto", p / "no", target="t"), r"no holds no config\.json"),
    ],
)
def test_what_is_no_draft_is_one_line(
    ask: Callable[[Path], NamedDraft], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=named) as caught:
        ask(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"architectures": '])
def test_a_damaged_file_of_what_ships_is_named(text: str, weights: Path) -> None:
    (weights / "tiny-eagle3" / "training.json").write_text(text)
    with pytest.raises(UserError, match=r"tiny-eagle3/training\.json"):
        find_draft("auto", target="tiny")


def test_a_hash_that_is_no_text_counts_as_none(weights: Path) -> None:
    (weights / "tiny-eagle3" / "training.json").write_text(json.dumps({"target_model_hash": 3}))
    assert [draft.target_hash for draft in shipped_for("tiny")] == [None, HASH]


def test_what_ships_lies_beside_the_drafters_code() -> None:
    assert weights_dir() == Path(drafts.__file__).parents[2] / "drafter_service" / "weights"


def test_every_method_with_a_model_can_be_preferred_and_named() -> None:
    assert set(PREFERRED) == set(MODEL_METHODS)
    assert set(MODEL_METHODS) < set(WORDS)
