"""Loading a DFlash drafter: the handshake, what is refused, what spoils a session for real."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from splitspec.errors import UserError
from splitspec.v1 import rows_pb2
from tests.dflash_layouts import random_weights, write_draft
from tests.drafter_service.test_dflash import MASK, PROMPT, Pair, Session, make_pair, raw_rows


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Write the plainest pair."""
    return make_pair(tmp_path_factory.mktemp("dflash"))


def test_the_handshake_says_what_is_loaded_and_which_rows_it_wants(pair: Pair) -> None:
    info = pair.load(row_dtype="bfloat16", max_draft_count=5).info
    assert (info.method, info.model_id, info.instant) == ("dflash", "tiny-draft", False)
    assert (info.vocab_size, info.tap_layers) == (300, (0, 1, 2))
    assert (info.max_draft_count, info.max_context_length, info.slot_count) == (5, 96, 4)
    assert info.tokenizer_hash is not None
    assert len(info.model_hash) == 64
    assert info.row_format.kind == rows_pb2.ROW_KIND_RAW_TAPS
    assert info.row_format.dtype == rows_pb2.ROW_DTYPE_BFLOAT16
    assert info.row_format.row_bytes == 3 * 64 * 2
    assert pair.load().info.max_draft_count == 7, "as many as the block drafts"
    assert pair.load(tap_layers=(0, 2, 3)).info.tap_layers == (0, 2, 3)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_draft_count": 8}, ["--max-draft-count 8 is not in 1..7"]),
        ({"max_draft_count": 4, "block_length": 4}, ["--max-draft-count 4 is not in 1..3"]),
        ({"block_length": 9}, ["block", "9", "8"]),
    ],
)
def test_d19_more_than_the_block_drafts_and_longer_blocks_than_the_trained_are_refused(
    pair: Pair, fields: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        pair.load(**fields)
    for part in named:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"draft_model": Path("/nonexistent/draft")}, "/nonexistent/draft"),
        ({"target": "nobody/nothing"}, "nobody/nothing"),
        ({"target": None}, "--target"),
        ({"precision": "int2"}, "int2"),
        ({"device": "tpu"}, "tpu"),
        ({"tap_layers": (1, 2)}, "tap"),
        ({"runtime": "executorch", "device": "cuda"}, "executorch"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(pair: Pair, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        pair.load(**fields)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "what"), [("norm.weight", "logits"), ("fusion.fc.weight", "features")]
)
def test_a_draft_that_overflows_is_refused_at_load(
    pair: Pair, tmp_path: Path, tensor: str, what: str
) -> None:
    weights = random_weights(4)
    weights.tensors[tensor] = weights.tensors[tensor].sign() * 3e38
    broken = write_draft(tmp_path / "broken", weights, mask_token_id=MASK)
    with pytest.raises(UserError, match=rf"draft \S+broken gives {what} that are not finite") as e:
        pair.load(draft_model=broken)
    assert "overflow at fp32" in str(e.value)
    assert "\n" not in str(e.value)


def test_the_home_of_the_user_is_expanded_in_the_draft_s_folder(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(pair.draft.parent))
    assert pair.load(draft_model=Path("~/tiny-draft")).info.model_id == "tiny-draft"
    with pytest.raises(UserError, match="nobody-of-this-name"):
        pair.load(draft_model=Path("~nobody-of-this-name/d"))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows_kind", ["raw", "fused"])
def test_d13_hostile_rows_stop_their_own_session_only_and_leave_nothing_behind(
    pair: Pair, bad: float, rows_kind: str
) -> None:
    clean = raw_rows(30, 60, 64 if rows_kind == "fused" else 192)
    bad_rows = clean.clone()
    bad_rows[6, 1] = bad
    _check_hostile(pair, rows_kind, clean, bad_rows)


def test_d13_finite_rows_that_overflow_inside_the_draft_are_hostile_too(pair: Pair) -> None:
    clean = raw_rows(30, 60, 64)
    bad_rows = clean.clone()
    bad_rows[6] = 3e38  # k_proj makes infinity of it, and its norm no number
    _check_hostile(pair, "fused", clean, bad_rows)


def _check_hostile(pair: Pair, rows_kind: str, clean: torch.Tensor, bad_rows: torch.Tensor) -> None:
    """Run a hostile session beside an honest one, then an honest one in the hostile one's slot."""
    drafter = pair.load(rows=rows_kind)
    hostile, other = Session(drafter, 0, bad_rows), Session(drafter, 1, clean)
    drafter.step([hostile.work(PROMPT[:5]), other.work(PROMPT[:5])])
    drafts = drafter.step([hostile.work(PROMPT[5:], 7, 4), other.work(PROMPT[5:], 7, 4)])
    again = drafter.step([hostile.work([7], 8, 4), other.work([7, drafts[1][0]], 8, 4)])
    fresh = Session(pair.load(rows=rows_kind), 1, clean)
    fresh.draft(PROMPT[:5])
    assert drafts == [[], fresh.draft(PROMPT[5:], 7, 4)]
    assert again == [[], fresh.draft([7, drafts[1][0]], 8, 4)]
    drafter.release(0)
    after = Session(drafter, 0, clean)
    after.draft(PROMPT[:2])  # what the hostile session left lies beyond it
    assert after.draft(PROMPT[2:], 7, 4) == drafts[1]


def test_export_passes_its_flags_on_and_prints_the_programs_path(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    programs = pytest.importorskip("graph_runtime.programs")
    write_program = programs.export.write_program
    from drafter_service.__main__ import export_dflash

    asked: list[tuple[Any, dict[str, Any]]] = []
    program = tmp_path / "draft.pte"
    write_program(program, b"a program")

    def ensure(source: Any, **flags: Any) -> Path:
        asked.append((source, flags))
        return program

    monkeypatch.setattr(programs, "ensure_dflash_program", ensure)
    export = partial(export_dflash, draft_model=pair.draft, cache_dir=Path("/c"))
    export(
        target=str(pair.target),
        precision="fp32",
        max_context_length=64,
        block_length=4,
        tap_layers="0,1,3",
        embeddings="target",
    )
    export()
    assert capsys.readouterr().out.splitlines() == [str(program)] * 2
    (source, flags), (plain, defaults) = asked
    assert (source.folder, source.target) == (pair.draft, pair.target)
    assert (source.tap_layers, source.embeddings) == ((0, 1, 3), "target")
    assert flags == {
        "block_length": 4,
        "precision": "fp32",
        "cache_dir": Path("/c"),
        "max_context_length": 64,
    }
    assert (plain.target, plain.tap_layers, plain.embeddings) == (None, None, "auto")
    assert defaults == {
        "block_length": None,
        "precision": "8da8w",
        "cache_dir": Path("/c"),
        "max_context_length": 1024,
    }
    program.write_bytes(b"a progran")
    with pytest.raises(UserError, match="is corrupt or truncated: delete it to export it again"):
        export()
    assert capsys.readouterr().out == ""
