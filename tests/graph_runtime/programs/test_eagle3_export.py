"""Programs of drafts in the cache, and what goes wrong with one: one clear line each."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("executorch")

from graph_runtime.eagle3.checkpoint import Eagle3Source
from graph_runtime.eagle3.load import load_draft
from graph_runtime.programs import ensure_eagle3_program, ensure_program
from graph_runtime.programs.eagle3_export import eagle3_key
from graph_runtime.programs.export import write_program
from splitspec.errors import UserError
from tests.eagle3_layouts import random_weights, write_draft
from tests.graph_runtime.programs.conftest import CONTEXT, MakeModel, MakeSource

pytestmark = pytest.mark.usefixtures("exported_here")


def test_what_changes_a_draft_s_program_changes_its_name(
    make_source: MakeSource, make_model: MakeModel, tmp_path: Path
) -> None:
    source = make_source()
    sources = (
        source,
        make_source(seed=4),
        replace(source, target=make_model(n_layers=8, seed=1)),
        replace(source, embeddings="target"),
        replace(source, feedback="post-norm"),
    )
    paths = {
        eagle3_key(s, precision=p, cache_dir=tmp_path, max_context_length=n).path(tmp_path)
        for s, p, n in [
            *((s, "8da8w", 64) for s in sources),
            (source, "fp32", 64),
            (source, "8da8w", 65),
        ]
    }
    assert len(paths) == len(sources) + 2


def test_a_draft_with_an_unknown_precision_is_refused_with_those_there_are(
    make_source: MakeSource, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="precision is 'q4_1'; a draft has fp32, 8da8w, 8da4w"):
        ensure_eagle3_program(
            make_source(), precision="q4_1", cache_dir=tmp_path, max_context_length=64
        )


def test_a_width_that_is_not_whole_groups_is_refused_with_the_tensor(
    tmp_path: Path, draft_target: Path
) -> None:
    weights = random_weights(0, intermediate=80)
    folder = write_draft(tmp_path / "draft", layout="safeailab", weights=weights)
    with pytest.raises(UserError, match=r"layer\.mlp\.down_proj\.weight has 80: try .* 8da8w"):
        ensure_eagle3_program(
            Eagle3Source(folder=folder, target=draft_target),
            precision="8da4w",
            cache_dir=tmp_path,
            max_context_length=64,
        )


def foreign_path(source: Eagle3Source, cache_dir: Path) -> Path:
    """Return where the draft's program would lie."""
    path = eagle3_key(
        source, precision="8da8w", cache_dir=cache_dir, max_context_length=CONTEXT
    ).path(cache_dir)
    path.parent.mkdir(parents=True)
    return path


def load_in(source: Eagle3Source, cache_dir: Path) -> None:
    load_draft(
        source,
        runtime="executorch",
        precision="8da8w",
        cache_dir=cache_dir,
        max_context_length=CONTEXT,
        slot_count=1,
        threads=None,
    )


def test_another_draft_s_program_is_refused_with_both_values(
    make_source: MakeSource, program_cache: Path, tmp_path: Path
) -> None:
    source, other = make_source(), make_source(seed=4)
    theirs = ensure_eagle3_program(
        other, precision="8da8w", cache_dir=program_cache, max_context_length=CONTEXT
    )
    path = foreign_path(source, tmp_path / "cache")
    for suffix in (".pte", ".sha256"):
        shutil.copy(theirs.with_suffix(suffix), path.with_suffix(suffix))
    with pytest.raises(UserError, match=r"has draft hash \w{64}; expected \w{64}"):
        load_in(source, tmp_path / "cache")


def test_a_target_s_program_is_no_draft_s(
    make_source: MakeSource,
    make_model: MakeModel,
    program_cache: Path,
    tmp_path: Path,
) -> None:
    theirs = ensure_program(
        folder=make_model(n_layers=1),
        precision="8da8w",
        cache_dir=program_cache,
        tap_layers=(0,),
        max_context_length=64,
        max_prefill_chunk=8,
    )
    source = make_source()
    path = foreign_path(source, tmp_path / "cache")
    for suffix in (".pte", ".sha256"):
        shutil.copy(theirs.with_suffix(suffix), path.with_suffix(suffix))
    with pytest.raises(UserError, match="lacks the metadata key get_draft_hash: export it again"):
        load_in(source, tmp_path / "cache")


def test_a_corrupt_draft_program_is_refused(make_source: MakeSource, tmp_path: Path) -> None:
    source = make_source()
    path = foreign_path(source, tmp_path / "cache")
    write_program(path, b"a program")
    path.write_bytes(b"a progrXm")
    with pytest.raises(UserError, match="corrupt or truncated: delete it to export it again"):
        load_in(source, tmp_path / "cache")


def test_a_program_stores_each_weight_once(make_source: MakeSource, program_cache: Path) -> None:
    # Guards four methods that each carried the weights of all of them.
    path = ensure_eagle3_program(
        make_source(vocab_size=300, hidden=64, intermediate=1024),
        precision="fp32",
        cache_dir=program_cache,
        max_context_length=CONTEXT,
    )
    mlp, others = 4 * 3 * 64 * 1024, 4 * 64 * 1000
    assert mlp < path.stat().st_size < mlp + others
