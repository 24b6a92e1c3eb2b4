"""A pair that does not fit is refused: the message names the field and both values."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.handshake import DrafterCheck, VerifierCheck, check_pair
from splitspec.errors import ModelMismatch, NotReady
from splitspec.v1 import drafter_pb2, rows_pb2, verifier_pb2

KINDS = rows_pb2.RowKind
TARGET: dict[str, Any] = {
    "protocol_version": 1,
    "model_hash": "h1",
    "tokenizer_hash": "t1",
    "vocab_size": 300,
    "tap_layers": [1, 2],
    "row_layouts": [
        verifier_pb2.RowLayout(kind=rows_pb2.ROW_KIND_NONE),
        verifier_pb2.RowLayout(
            kind=rows_pb2.ROW_KIND_RAW_TAPS, width=8, dtype=rows_pb2.ROW_DTYPE_FLOAT32
        ),
    ],
    "precision": "fp32",
    "runtime": "torch",
    "max_context_length": 128,
}
DRAFT: dict[str, Any] = {
    "protocol_version": 1,
    "vocab_size": 300,
    "tokenizer_hash": "t1",
    "target_model_hash": "h1",
    "row_kind": rows_pb2.ROW_KIND_RAW_TAPS,
    "tap_layers": [1, 2],
    "row_width": 8,
    "row_dtype": rows_pb2.ROW_DTYPE_FLOAT32,
}


FUSED_LAYOUT = verifier_pb2.RowLayout(
    kind=rows_pb2.ROW_KIND_FUSED, width=4, dtype=rows_pb2.ROW_DTYPE_FLOAT32
)
FUSED_TARGET: dict[str, Any] = {
    "row_layouts": [*TARGET["row_layouts"], FUSED_LAYOUT],
    "fused_model_hash": "d1",
}
FUSED_DRAFT: dict[str, Any] = {
    "model_hash": "d1",
    "row_kind": rows_pb2.ROW_KIND_FUSED,
    "row_width": 4,
}


def _target(**fields: Any) -> verifier_pb2.VerifierGetModelResponse:
    return verifier_pb2.VerifierGetModelResponse(**{**TARGET, **fields})


def _draft(**fields: Any) -> drafter_pb2.DrafterGetModelResponse:
    return drafter_pb2.DrafterGetModelResponse(**{**DRAFT, **fields})


def test_a_pair_that_fits_is_accepted() -> None:
    check_pair(_draft(), _target())
    check_pair(
        drafter_pb2.DrafterGetModelResponse(protocol_version=1, row_kind=rows_pb2.ROW_KIND_NONE),
        _target(),
    )


@pytest.mark.parametrize(
    ("field", "value", "theirs"),
    [
        ("protocol_version", 2, "1"),
        ("vocab_size", 301, "300"),
        ("tokenizer_hash", "t2", "t1"),
        ("target_model_hash", "h2", "h1"),
        ("row_kind", rows_pb2.ROW_KIND_FUSED, "ROW_KIND_NONE, ROW_KIND_RAW_TAPS"),
        ("row_kind", 77, "ROW_KIND_NONE, ROW_KIND_RAW_TAPS"),
        ("tap_layers", [1, 3], r"\[1, 2\]"),
        ("row_width", 16, "8"),
        ("row_dtype", rows_pb2.ROW_DTYPE_BFLOAT16, "ROW_DTYPE_FLOAT32"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(field: str, value: Any, theirs: str) -> None:
    shown = {rows_pb2.ROW_DTYPE_BFLOAT16: "ROW_DTYPE_BFLOAT16"} if field == "row_dtype" else {}
    if field == "row_kind" and value in KINDS.values():
        shown = {value: KINDS.Name(value)}
    ours = shown.get(value, str(value)) if not isinstance(value, list) else r"\[1, 3\]"
    with pytest.raises(ModelMismatch, match=rf"^{field}: the drafter has {ours}.*{theirs}"):
        check_pair(_draft(**{field: value}), _target())


def test_a_drafter_of_fused_rows_fits_the_verifier_that_fuses_for_it() -> None:
    check_pair(_draft(**FUSED_DRAFT), _target(**FUSED_TARGET))
    # One of raw rows is served beside it, whatever draft the verifier fuses for.
    check_pair(_draft(model_hash="d2"), _target(**FUSED_TARGET))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_hash": "d2"},
            "^fused_model_hash: the drafter has d2, the verifier d1; give .* --fuse-for",
        ),
        ({"model_hash": ""}, "^fused_model_hash: the drafter has none, the verifier d1; give"),
        (
            {"tap_layers": [1, 3]},
            r"^tap_layers: the drafter has \[1, 3\], the verifier \[1, 2\]; give",
        ),
        ({"row_width": 8}, "^row_width: the drafter has 8, the verifier 4$"),
    ],
)
def test_a_drafter_of_fused_rows_of_another_draft_or_shape_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelMismatch, match=message):
        check_pair(_draft(**{**FUSED_DRAFT, **change}), _target(**FUSED_TARGET))


def test_a_verifier_that_fuses_for_nobody_is_told_as_the_kinds_that_it_offers() -> None:
    offered = "ROW_KIND_NONE, ROW_KIND_RAW_TAPS"
    message = (
        f"^row_kind: the drafter has ROW_KIND_FUSED, the verifier {offered}; "
        "give the verifier --fuse-for, or the drafter --rows raw$"
    )
    with pytest.raises(ModelMismatch, match=message):
        check_pair(_draft(**FUSED_DRAFT), _target())
    # It names a kind and no draft, which no verifier of ours does: nobody's rows are for us.
    nameless = {**FUSED_TARGET, "fused_model_hash": ""}
    with pytest.raises(
        ModelMismatch, match=r"^fused_model_hash: .* has d1, the verifier none; give"
    ):
        check_pair(_draft(**FUSED_DRAFT), _target(**nameless))


@pytest.mark.parametrize(
    ("change", "target", "message"),
    [
        (
            FUSED_DRAFT,
            {},
            "^row_kind: the drafter has ROW_KIND_FUSED, the verifier ROW_KIND_NONE, "
            "ROW_KIND_RAW_TAPS; give the verifier --fuse-for, or the drafter --rows raw$",
        ),
        (
            # The verifier fuses for an EAGLE-3 draft of the same width, taps and element type.
            {**FUSED_DRAFT, "model_hash": "d2"},
            FUSED_TARGET,
            "^fused_model_hash: the drafter has d2, the verifier d1; "
            "give the verifier --fuse-for with the drafter's --draft-model$",
        ),
        (
            {"tap_layers": [0, 2]},
            {},
            r"^tap_layers: the drafter has \[0, 2\], the verifier \[1, 2\]; "
            "give the verifier --tap-layers or --fuse-for$",
        ),
        (
            {"row_dtype": rows_pb2.ROW_DTYPE_BFLOAT16},
            {},
            "^row_dtype: the drafter has ROW_DTYPE_BFLOAT16, the verifier ROW_DTYPE_FLOAT32; "
            "give the drafter --row-dtype$",
        ),
    ],
)
def test_a_dflash_drafter_that_does_not_fit_is_told_which_flags_mend_it(
    change: dict[str, Any], target: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelMismatch, match=message):
        check_pair(_draft(method="dflash", **change), _target(**target))


def test_dflash_and_eagle3_drafters_share_a_verifier_that_fuses_for_one_of_them() -> None:
    check_pair(_draft(method="dflash", **FUSED_DRAFT), _target(**FUSED_TARGET))
    check_pair(_draft(method="eagle3", model_hash="d2"), _target(**FUSED_TARGET))


@pytest.mark.parametrize("field", ["protocol_version", "tokenizer_hash"])
def test_a_verifier_of_another_tokenizer_or_protocol_is_refused(field: str) -> None:
    value: Any = "t2" if field == "tokenizer_hash" else 2
    with pytest.raises(ModelMismatch, match=rf"^{field}: the verifier has {value}"):
        VerifierCheck(tokenizer_hash="t1")(_target(**{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_hash", "h2"),
        ("precision", "8da8w"),
        ("runtime", "executorch"),
        ("vocab_size", 400),
        ("tap_layers", [1]),
        ("max_context_length", 64),
    ],
)
def test_a_verifier_that_comes_back_must_be_the_same(field: str, value: Any) -> None:
    check = VerifierCheck(tokenizer_hash="t1")
    check(_target())
    with pytest.raises(ModelMismatch, match=rf"^{field}: the verifier has .*the one before had"):
        check(_target(**{field: value}))
    check(_target())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"fused_model_hash": "d2"},
            "^fused_model_hash: the verifier has d2, the one before had d1$",
        ),
        (
            {"fused_model_hash": "", "row_layouts": TARGET["row_layouts"]},
            "^fused_model_hash: the verifier has none, the one before had d1$",
        ),
        (
            {"row_layouts": TARGET["row_layouts"]},
            "^row_layouts: .*'ROW_KIND_RAW_TAPS 8 ROW_DTYPE_FLOAT32'\\], "
            ".*'ROW_KIND_FUSED 4 ROW_DTYPE_FLOAT32'\\]$",
        ),
    ],
)
def test_a_verifier_must_come_back_with_the_rows_that_the_drafter_was_accepted_for(
    change: dict[str, Any], message: str
) -> None:
    check = VerifierCheck(tokenizer_hash="t1")
    check(_target(**FUSED_TARGET))
    with pytest.raises(ModelMismatch, match=message):
        check(_target(**{**FUSED_TARGET, **change}))
    check(_target(**FUSED_TARGET))


def test_a_drafter_is_checked_only_against_a_verifier_that_is_known() -> None:
    verifier = VerifierCheck(tokenizer_hash="t1")
    check = DrafterCheck(verifier)
    with pytest.raises(NotReady):
        check(_draft())
    verifier(_target())
    check(_draft())
