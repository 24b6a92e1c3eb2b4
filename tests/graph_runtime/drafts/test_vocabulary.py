"""A draft's vocabulary: offsets to target ids, what contradicts them, and padding."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from graph_runtime.drafts.vocabulary import is_padded, read_target_ids
from graph_runtime.eagle3.checkpoint import Eagle3Checkpoint, Eagle3Source, load_checkpoint
from splitspec.errors import UserError
from tests.eagle3_layouts import covered, offsets, random_weights, weights_for, write_draft
from tests.tiny import write_tiny_model

IDS = [0, 1, 5, 9, 10, 29]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), n_layers=8)


def load(folder: Path, target: Path | None, **source: Any) -> Eagle3Checkpoint:
    source = {"embeddings": "target" if target else "own", **source}
    return load_checkpoint(
        Eagle3Source(folder=folder, target=target, **source), folder.parent / "cache"
    )


def read(
    d2t: torch.Tensor | None, t2d: torch.Tensor | None = None, *, rows: int = 6, size: int = 30
) -> list[int] | None:
    ids = read_target_ids(d2t, t2d, head_rows=rows, vocabulary=size)
    return None if ids is None else ids.tolist()


@pytest.mark.parametrize("layout", ["safeailab", "specforge", "eagle-3.1", "modelopt"])
def test_a_draft_s_ids_become_target_ids(layout: str, target: Path, tmp_path: Path) -> None:
    weights = weights_for(layout, 1)
    ids = load(write_draft(tmp_path / "d", layout=layout, weights=weights), target).target_ids
    assert ids is not None
    assert ids.dtype == torch.int64
    assert ids.tolist() == weights.target_ids


def test_trap_d2t_holds_offsets_and_not_ids() -> None:
    d2t = offsets(IDS)
    assert d2t.tolist() == [0, 0, 3, 6, 6, 24]
    assert read(d2t) == read(d2t, covered(IDS, 30)) == IDS


@pytest.mark.parametrize("known", [True, False])
def test_trap_d2t_that_holds_ids_is_said_to(known: bool) -> None:
    ids = [3, 7, 11, 12, 20, 29]
    t2d = covered(ids, 30) if known else None
    with pytest.raises(
        UserError, match=r"d2t: .* is 34 where \[0, 30\).* ids themselves; expected"
    ):
        read(torch.tensor(ids), t2d)


def test_trap_d2t_that_holds_ids_which_pass_for_offsets_is_told_by_t2d() -> None:
    ids = [1, 3, 5, 7, 9, 11]  # as offsets: 1, 4, 7, 10, 13, 16
    assert read(torch.tensor(ids)) == [1, 4, 7, 10, 13, 16]
    with pytest.raises(UserError, match=r"other ids than those that t2d marks; .* ids themselves"):
        read(torch.tensor(ids), covered(ids, 30))


def test_trap_many_ids_which_pass_for_offsets_are_refused_unless_t2d_confirms_them() -> None:
    ids = torch.arange(1500) * 2 + 3

    def target_ids(t2d: torch.Tensor | None) -> torch.Tensor | None:
        return read_target_ids(ids, t2d, head_rows=1500, vocabulary=32000)

    with pytest.raises(UserError, match="d2t rises at every one of its 1500 entries, as a list"):
        target_ids(None)
    meant = torch.arange(1500) + ids
    marks = torch.zeros(32000, dtype=torch.bool)
    marks[meant] = True
    found = target_ids(marks)
    assert found is not None
    assert torch.equal(found, meant)
    ids[700:] -= 2  # one pair of neighbours, as real vocabularies have by the thousand
    found = target_ids(None)
    assert found is not None
    assert torch.equal(found, torch.arange(1500) + ids)


def test_trap_d2t_missing_from_a_reduced_vocabulary_is_refused(
    target: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"missing tensor d2t: .* 6 rows for 30 target ids"):
        read(None)
    folder = write_draft(
        tmp_path / "d",
        layout="specforge",
        weights=random_weights(1),
        tensors={"d2t": None, "t2d": None},
    )
    with pytest.raises(UserError, match=r"d: missing tensor d2t: .* 100 rows for 300"):
        load(folder, target)


@pytest.mark.parametrize(
    ("d2t", "said"),
    [
        (torch.tensor([0, 0, 3, 6, 6, 25]), r"is 30 where \[0, 30\)"),
        (torch.tensor([-1, 0, 3, 6, 6, 24]), "is -1 where"),
        (torch.tensor([0, 0, -1, 6, 6, 24]), "is 1 and then 1, which is not increasing"),
        (torch.tensor([9, 0, 0, 0, 0, 0]), "is 9 and then 1"),
        (torch.tensor([2**62] * 6), "where"),
        (torch.tensor([0, 0, 3, 6, 6]), r"d2t is \[5\] torch.int64; expected \[6\]"),
        (torch.tensor([[0, 0, 3, 6, 6, 24]]), r"d2t is \[1, 6\]"),
        (torch.tensor([0, 0, 3, 6, 6, 24], dtype=torch.int32), r"torch.int32; expected"),
        (torch.tensor([0, 0, 3, 6, 6, 24.0]), r"torch.float32; expected"),
    ],
)
def test_e17_a_bad_map_is_refused(d2t: torch.Tensor, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        read(d2t)
    assert "d2t" in str(caught.value)


def test_e17_a_bad_map_is_refused_at_load_and_a_good_one_stays_in_the_vocabulary(
    target: Path, tmp_path: Path
) -> None:
    for seed in range(5):
        weights = random_weights(seed)
        good = write_draft(tmp_path / f"g{seed}", layout="modelopt", weights=weights)
        ids = load(good, target).target_ids
        assert ids is not None
        assert 0 <= int(ids.min()) <= int(ids.max()) < 300
        assert weights.target_ids is not None
        beyond = offsets(weights.target_ids)
        beyond[-1] = 300 - 99
        bad = write_draft(
            tmp_path / f"b{seed}", layout="modelopt", weights=weights, tensors={"d2t": beyond}
        )
        with pytest.raises(UserError, match=r"tensor d2t: i \+ d2t\[i\] is 300"):
            load(bad, target)


@pytest.mark.parametrize(
    ("t2d", "said"),
    [
        (covered([0, 1, 5, 9, 10, 28], 30), "other ids than those that t2d marks"),
        (covered([0, 1, 5, 9, 10, 28, 29], 30), "other ids than those that t2d marks"),
        (torch.zeros(30, dtype=torch.bool), "other ids than those that t2d marks"),
        (torch.ones(30), r"t2d is \[30\] torch.float32; expected \[30\] torch.bool"),
        (covered(IDS, 31), r"t2d is \[31\]"),
        (covered([*IDS, 40], 64), r"t2d is \[64\]"),
    ],
)
def test_d2t_and_t2d_have_to_agree(t2d: torch.Tensor, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(offsets(IDS), t2d)


def test_a_map_that_changes_nothing_is_dropped() -> None:
    zeros, none = torch.zeros(30, dtype=torch.int64), torch.zeros(30, dtype=torch.bool)
    for d2t, t2d in ((None, None), (zeros, None), (zeros, none), (zeros, ~none)):
        assert read(d2t, t2d, rows=30) is None


@pytest.mark.parametrize(
    ("t2d", "said"),
    [
        (torch.ones(300), r"t2d is \[300\] torch.float32; expected \[300\] torch.bool"),
        (torch.ones(299, dtype=torch.bool), r"t2d is \[299\]"),
        (torch.arange(300) < 299, "t2d marks 299 of 300 target ids, and there is no d2t"),
        (torch.zeros(300, dtype=torch.bool), "t2d marks 0 of 300"),
    ],
)
def test_t2d_alone_in_a_full_vocabulary_has_to_mark_every_id(
    t2d: torch.Tensor, said: str, target: Path, tmp_path: Path
) -> None:
    weights = random_weights(1, draft_vocab_size=None)
    folder = write_draft(
        tmp_path / "d", layout="specforge", weights=weights, tensors={"d2t": None, "t2d": t2d}
    )
    with pytest.raises(UserError, match=said):
        load(folder, target)
    assert read(None, torch.ones(30, dtype=torch.bool), rows=30) is None


def test_a_full_vocabulary_in_another_order_is_refused() -> None:
    d2t = torch.zeros(30, dtype=torch.int64)
    d2t[0], d2t[1] = 1, -1
    with pytest.raises(UserError, match="not increasing"):
        read(d2t, rows=30)
    with pytest.raises(UserError, match="t2d and d2t disagree"):
        read(torch.zeros(30, dtype=torch.int64), covered(IDS, 30), rows=30)


def test_the_first_ids_are_a_map_that_is_kept() -> None:
    assert read(torch.zeros(6, dtype=torch.int64)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("mapped", [True, False])
def test_trap_a_reduced_vocabulary_equal_to_a_padded_target_vocabulary_loses_the_padding(
    mapped: bool, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    weights = random_weights(1, draft_vocab_size=None)
    head = torch.cat((weights.tensors["lm_head.weight"], torch.zeros(20, 64)))
    maps: dict[str, torch.Tensor | None] = {
        "d2t": torch.zeros(320, dtype=torch.int64) if mapped else None,
        "t2d": (torch.arange(320) < 300) if mapped else None,
    }
    folder = write_draft(
        tmp_path / "d",
        layout="specforge",
        weights=weights,
        config={"draft_vocab_size": 320, "vocab_size": 320},
        tensors={"lm_head.weight": head, **maps},
    )
    draft = load(folder, target)
    assert draft.target_ids is None
    assert (draft.config.vocab_size, draft.config.draft_vocab_size) == (300, 300)
    assert torch.equal(draft.tensors["lm_head.weight"], weights.tensors["lm_head.weight"])
    assert "padding rows of lm_head.weight are dropped" in caplog.text


def test_an_own_padded_embedding_loses_the_padding(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    weights = weights_for("speculators", 1)
    table = torch.cat((weights.tensors["embed_tokens.weight"], torch.zeros(20, 64)))
    folder = write_draft(
        tmp_path / "d",
        layout="speculators",
        weights=weights,
        nested={"vocab_size": 320},
        tensors={"embed_tokens.weight": table, "t2d": torch.cat((
            covered(weights.target_ids or [], 300), torch.zeros(20, dtype=torch.bool)))},
    )  # fmt: skip
    draft = load(folder, target, embeddings="own")
    assert torch.equal(draft.tensors["embed_tokens.weight"], table[:300])
    assert "padding rows of embed_tokens.weight are dropped" in caplog.text
    assert draft.target_ids is not None
    assert draft.target_ids.tolist() == weights.target_ids


@pytest.mark.parametrize("size", [299, 301, 310, 640, 1024])
def test_another_vocabulary_than_the_target_s_is_refused(
    size: int, target: Path, tmp_path: Path
) -> None:
    folder = write_draft(
        tmp_path / "d",
        layout="specforge",
        weights=random_weights(1),
        config={"vocab_size": size},
    )
    with pytest.raises(UserError, match=rf"vocab_size is {size}; the target's is 300"):
        load(folder, target)


def test_padding_is_rounding_up_to_a_multiple_that_exporters_use() -> None:
    assert [rows for rows in range(290, 600) if is_padded(rows, 300)] == [300, 320, 384, 512]
    assert is_padded(50304, 50257)
    assert not is_padded(50257, 50304)


def test_a_full_vocabulary_of_llama_4_size_needs_no_map() -> None:
    assert read(None, rows=202048, size=202048) is None


@pytest.mark.parametrize("stated", [99, 101, 300])
def test_a_head_of_other_rows_than_the_config_says_is_refused(
    stated: int, target: Path, tmp_path: Path
) -> None:
    folder = write_draft(
        tmp_path / "d",
        layout="specforge",
        weights=random_weights(1),
        config={"draft_vocab_size": stated},
    )
    with pytest.raises(UserError, match=rf"lm_head.weight is \[100, 64\]; .* is {stated}"):
        load(folder, target)


def test_the_head_s_rows_tell_the_draft_vocabulary_where_the_config_does_not(
    target: Path, tmp_path: Path
) -> None:
    folder = write_draft(
        tmp_path / "d",
        layout="speculators",
        weights=weights_for("speculators", 1),
        config={"draft_vocab_size": None},
    )
    assert load(folder, target).config.draft_vocab_size == 100
    assert len(load_file(folder / "model.safetensors")["d2t"]) == 100


def test_more_draft_ids_than_padding_explains_are_refused(target: Path, tmp_path: Path) -> None:
    weights = random_weights(1, vocab_size=333, draft_vocab_size=None)
    folder = write_draft(
        tmp_path / "d", layout="specforge", weights=weights, config={"vocab_size": 300}
    )
    with pytest.raises(
        UserError, match=r"head.weight is \[333, 64\]; the target's vocabulary is of 300 ids"
    ):
        load(folder, target)
