"""Programs of DFlash drafts in the cache, and what goes wrong with one: one clear line each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("executorch")

from graph_runtime.dflash.checkpoint import load_fusion
from graph_runtime.drafts.source import DraftSource
from graph_runtime.programs import ensure_dflash_program, export, load_dflash_program
from graph_runtime.programs.dflash_export import DFlashKey, dflash_key
from graph_runtime.programs.export import write_program
from graph_runtime.programs.load import open_program
from graph_runtime.programs.metadata import DFlashMetadata, read_keys
from splitspec.errors import UserError
from tests.graph_runtime.programs.block_drafts import (
    CONTEXT,
    BlockDraftFiles,
    MakeFiles,
    write_files,
)
from tests.graph_runtime.programs.conftest import MakeModel
from tests.graph_runtime.programs.test_export import WithoutKey, export_in_this_process

Ensure = Callable[..., Path]


@pytest.fixture
def make_files(tmp_path: Path, make_model: MakeModel) -> MakeFiles:
    """Return a function that writes a draft of a variant."""

    def make(name: str = "z-lab", **changes: Any) -> BlockDraftFiles:
        folder = tmp_path / f"{name} {sorted(changes.items())}".replace("/", " ")
        return write_files(folder, name, make_model, **changes)

    return make


@pytest.fixture
def ensure(program_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Ensure:
    """Return a function that exports a draft's program into the shared cache."""
    monkeypatch.setattr(export, "_export", export_in_this_process)  # quicker than a process

    def ensure(files: BlockDraftFiles, **arguments: Any) -> Path:
        settings: dict[str, Any] = {
            "block_length": None,
            "precision": "8da8w",
            "cache_dir": program_cache,
            "max_context_length": CONTEXT,
        }
        return ensure_dflash_program(files.source, **{**settings, **arguments})

    return ensure


def key_of(
    source: DraftSource,
    cache_dir: Path,
    *,
    block_length: int | None = None,
    precision: str = "8da8w",
    context: int = CONTEXT,
) -> DFlashKey:
    return dflash_key(
        source,
        load_fusion(source, cache_dir)[0],
        block_length=block_length,
        precision=precision,
        cache_dir=cache_dir,
        max_context_length=context,
    )


def metadata_of(path: Path) -> DFlashMetadata:
    return read_keys(DFlashMetadata, open_program(path), path)


def load_in(files: BlockDraftFiles, cache_dir: Path, **arguments: Any) -> None:
    settings: dict[str, Any] = {
        "block_length": None,
        "precision": "8da8w",
        "max_context_length": CONTEXT,
        "slot_count": 1,
        "threads": 1,
    }
    load_dflash_program(files.source, cache_dir=cache_dir, **{**settings, **arguments})


def test_what_changes_a_draft_s_program_changes_its_name(
    make_files: MakeFiles, make_model: MakeModel, tmp_path: Path
) -> None:
    source = make_files().source
    sources = (
        source,
        make_files(seed=4).source,
        replace(source, target=make_model(n_layers=4, seed=1)),
        replace(source, embeddings="target"),
        replace(source, tap_layers=(0, 1, 3)),
    )
    keys = [
        *(key_of(s, tmp_path) for s in sources),
        key_of(source, tmp_path, precision="fp32"),
        key_of(source, tmp_path, context=CONTEXT + 1),
        key_of(source, tmp_path, block_length=7),
    ]
    assert len({key.path(tmp_path) for key in keys}) == len(keys)


def test_what_a_file_says_anyhow_changes_nothing_when_a_flag_says_it_too(
    make_files: MakeFiles, tmp_path: Path
) -> None:
    source = make_files().source
    wanted = key_of(source, tmp_path)
    assert key_of(source, tmp_path, block_length=8) == wanted
    assert key_of(replace(source, tap_layers=(0, 1, 2)), tmp_path) == wanted


def test_a_program_is_exported_in_a_process_of_its_own_and_once(
    make_files: MakeFiles, program_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_files("speculators, reduced vocabulary, windows of both kinds")
    arguments: dict[str, Any] = {
        "precision": "8da4w", "cache_dir": program_cache, "max_context_length": 64,
    }  # fmt: skip
    path = ensure_dflash_program(files.source, block_length=None, **arguments)
    assert metadata_of(path).precision == "8da4w"
    monkeypatch.setattr(export, "_export", None)
    assert ensure_dflash_program(files.source, block_length=8, **arguments) == path


def test_a_program_says_what_its_draft_is(make_files: MakeFiles, ensure: Ensure) -> None:
    def said(*name: str, block_length: int | None = None, **changes: Any) -> DFlashMetadata:
        files = make_files(*name, **changes)
        return metadata_of(ensure(files, precision="fp32", block_length=block_length))

    short = said(block_size=16, block_length=8)
    assert (short.block_size, short.block_length, short.first_draft_slot) == (16, 8, 1)
    assert (short.mask_token_id, short.tap_layers, short.n_draft_layers) == (16, (0, 1, 2), 2)
    assert (short.max_seq_len, short.max_capacity, short.final_softcap) == (CONTEXT, 320, 0.0)
    assert (short.draft_sliding_window, short.mask_windows) == (0, (0,))
    mixed = said("causal windows beside full layers")
    assert (mixed.n_draft_layers, mixed.draft_sliding_window) == (3, 20)
    assert (mixed.mask_windows, mixed.mask_causal) == ((20, 0), (1, 0))
    anchored = said("deepspec, from the anchor")
    assert (anchored.block_size, anchored.first_draft_slot) == (7, 0)
    assert said("gemma's scale and cap").final_softcap == 3.0
    reduced = said("speculators, reduced vocabulary, windows of both kinds")
    assert (reduced.vocab_size, reduced.draft_vocab_size) == (300, 100)
    assert (reduced.mask_windows, reduced.mask_causal) == ((0, 20), (0, 0))


@pytest.mark.parametrize("field", DFlashMetadata.__dataclass_fields__)
def test_a_missing_key_is_named(field: str, make_files: MakeFiles, ensure: Ensure) -> None:
    path = ensure(make_files())
    program: Any = WithoutKey(open_program(path), f"get_{field}")
    with pytest.raises(UserError, match=f"lacks the metadata key get_{field}: export it again"):
        read_keys(DFlashMetadata, program, path)


@pytest.mark.parametrize(
    "key",
    [
        "get_block_size",
        "get_block_length",
        "get_mask_token_id",
        "get_tap_layers",
        "get_draft_sliding_window",
        "get_n_draft_layers",
    ],
)
def test_a_program_has_the_keys_that_are_promised(
    key: str, make_files: MakeFiles, ensure: Ensure
) -> None:
    assert key in open_program(ensure(make_files())).method_names


def test_a_program_that_was_written_without_a_key_is_refused_at_load(
    make_files: MakeFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = DFlashMetadata.constant_methods

    def incomplete(metadata: DFlashMetadata) -> dict[str, Any]:
        methods = complete(metadata)
        del methods["get_mask_token_id"]
        return methods

    monkeypatch.setattr(DFlashMetadata, "constant_methods", incomplete)
    monkeypatch.setattr(export, "_export", export_in_this_process)  # where the key is missing
    with pytest.raises(UserError, match="lacks the metadata key get_mask_token_id"):
        load_in(make_files(), tmp_path / "cache")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "q4_1"}, "precision is 'q4_1'; a draft has fp32, 8da8w, 8da4w"),
        ({"max_context_length": 0}, "max context length is 0; expected at least 1"),
        ({"block_length": 16}, "--block-length is 16; expected 2 to 8, the block_size that"),
        ({"block_length": 1}, "--block-length is 1; expected 2 to 8"),
    ],
)
def test_d19_an_argument_out_of_its_range_is_refused_by_export_and_load(
    arguments: dict[str, Any], message: str, make_files: MakeFiles, ensure: Ensure, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        ensure(make_files(), **arguments)
    with pytest.raises(UserError, match=message):
        load_in(make_files(), tmp_path, **arguments)


def test_a_width_that_is_not_whole_groups_is_refused_with_the_tensor(
    make_files: MakeFiles, ensure: Ensure, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.down_proj\.weight has 80: try .* 8da8w"):
        ensure(make_files(intermediate=80), precision="8da4w", cache_dir=tmp_path)


def put(theirs: Path, path: Path) -> None:
    """Put one program where another belongs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".pte", ".sha256"):
        shutil.copy(theirs.with_suffix(suffix), path.with_suffix(suffix))


def test_another_draft_s_program_is_refused_with_both_values(
    make_files: MakeFiles, make_model: MakeModel, ensure: Ensure, tmp_path: Path
) -> None:
    files, cache = make_files(), tmp_path / "cache"
    other_target = replace(files.source, target=make_model(n_layers=4, seed=1))
    theirs = ensure(files)
    cases: list[tuple[DraftSource, dict[str, Any], str]] = [
        (make_files(seed=4).source, {}, r"has draft hash \w{64}; expected \w{64}"),
        (other_target, {}, r"has target hash \w{64}; expected \w{64}"),
        (files.source, {"precision": "fp32"}, "has precision 8da8w; expected fp32"),
        (files.source, {"block_length": 4}, "has block length 8; expected 4"),
    ]
    for source, arguments, message in cases:
        put(theirs, key_of(source, cache, **arguments).path(cache))
        with pytest.raises(UserError, match=message):
            load_in(replace(files, source=source), cache, **arguments)
    put(theirs, key_of(files.source, cache).path(cache))
    load_in(files, cache)


def test_a_corrupt_program_is_refused(make_files: MakeFiles, tmp_path: Path) -> None:
    files, cache = make_files(), tmp_path / "cache"
    path = key_of(files.source, cache).path(cache)
    path.parent.mkdir(parents=True)
    write_program(path, b"a program")
    with pytest.raises(UserError, match="is not a program that this runtime can load"):
        load_in(files, cache)
    path.write_bytes(b"a progrXm")
    with pytest.raises(UserError, match="corrupt or truncated: delete it to export it again"):
        load_in(files, cache)


def test_a_program_stores_each_weight_once_and_the_fusion_not_at_all(
    make_files: MakeFiles, ensure: Ensure
) -> None:
    # Guards three methods that each carried the weights of all of them.
    path = ensure(make_files(intermediate=1024), precision="fp32")
    mlp, attention, tables = 2 * 3 * 64 * 1024, 2 * 64 * (2 * 64 + 2 * 32), 2 * 64 * 300
    stored = 4 * (mlp + attention + tables)
    assert stored < path.stat().st_size < 1.1 * stored


def test_a_loaded_draft_keeps_no_weights_but_the_fusion_s(
    make_files: MakeFiles, ensure: Ensure, program_cache: Path
) -> None:
    files = make_files()
    ensure(files)
    _, checkpoint = load_dflash_program(
        files.source,
        block_length=None,
        precision="8da8w",
        cache_dir=program_cache,
        max_context_length=CONTEXT,
        slot_count=1,
        threads=1,
    )
    assert set(checkpoint.tensors) == {"fusion.fc.weight", "fusion.norm.weight"}
