"""Everything a message can get wrong is refused by name, before it reaches the engine."""

from __future__ import annotations

import math
from typing import Any

import pytest

from drafter_service.decoding import decode_items, encode_info, encode_results
from drafter_service.drafter import DrafterInfo, DraftSampling, SessionParameters
from drafter_service.engine import DraftItem, ItemResult, OpenItem, RefusedItem, ReleaseItem
from splitspec.rows import NO_ROWS, RowFormat, encode_rows
from splitspec.v1 import drafter_pb2 as pb
from splitspec.v1 import rows_pb2
from tests.drafter_service.served import draft, opened, released

TAPS = RowFormat(kind=rows_pb2.ROW_KIND_RAW_TAPS, dtype=rows_pb2.ROW_DTYPE_FLOAT32, width=2)
ROW = b"\0" * 8


def rows_of(**fields: Any) -> rows_pb2.Rows:
    """Return a message with any numbers in it, known or not."""
    return rows_pb2.Rows(**fields)


def info(row_format: RowFormat = NO_ROWS, **fields: Any) -> DrafterInfo:
    limits = {"max_draft_count": 7, "max_context_length": 64, "slot_count": 2, "instant": True}
    return DrafterInfo(
        method="test", model_id="test", row_format=row_format, **{**limits, **fields}
    )


def refusal(item: pb.DraftItem, drafter: DrafterInfo) -> dict[str, str]:
    """Return the details of the error that refuses `item`."""
    (decoded,) = decode_items([item], drafter)
    assert isinstance(decoded, RefusedItem), decoded
    assert decoded.error.reason == "INVALID_ARGUMENT"
    assert decoded.session_id == item.session
    return decoded.error.metadata


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (pb.DraftItem(session=0, context_length=0, open={}), "session"),
        (pb.DraftItem(session=1, open={}), "context_length"),
        (pb.DraftItem(session=1, context_length=0), "action"),
        (pb.DraftItem(session=1, draft={}), "context_length"),
        (pb.DraftItem(session=1, context_length=3, open={}), "context_length"),
        (opened(1, draft_sampling=9), "open.draft_sampling"),
        (opened(1, sampling={"temperature": -0.1}), "sampling.temperature"),
        (opened(1, sampling={"temperature": math.nan}), "sampling.temperature"),
        (opened(1, sampling={"temperature": math.inf, "seed": 1}), "sampling.temperature"),
        (opened(1, sampling={"temperature": 1.0}), "sampling.seed"),
        (opened(1, sampling={"top_p": 0.0}), "sampling.top_p"),
        (opened(1, sampling={"top_p": math.nan}), "sampling.top_p"),
        (opened(1, sampling={"min_p": 1.5}), "sampling.min_p"),
        (opened(1, sampling={"frequency_penalty": 0.0}), "sampling.frequency_penalty"),
        (opened(1, sampling={"logit_bias": {1: 2.0}}), "sampling.logit_bias"),
        (opened(1, sampling={"grammar": ""}), "sampling.grammar"),
        (opened(1, sampling={"min_tokens": 0}), "sampling.min_tokens"),
        (draft(1, 0, [1, 2**31]), "draft.token_ids"),
        (draft(1, 0, [1, 2**32 - 1]), "draft.token_ids"),  # -1 as a careless client sends it
        (draft(1, 0, [1], pending=2**31, count=1), "draft.pending_token_id"),
        (draft(1, 0, [1], pending=1, count=8), "draft.draft_count"),
        (draft(1, 0, [1], pending=1, count=2**32 - 1), "draft.draft_count"),
        (draft(1, 0, [1], count=1), "draft.pending_token_id"),
        (draft(1, 0, [1], rows=encode_rows(TAPS, 0, ROW)), "draft.rows"),
    ],
)
def test_a_malformed_item_is_refused_by_its_field(item: pb.DraftItem, field: str) -> None:
    assert refusal(item, info())["field"] == field


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        (None, "draft.rows"),
        (rows_of(), "rows.kind"),
        (encode_rows(TAPS, 4, ROW * 2), "rows.start"),
        (encode_rows(TAPS, 5, ROW * 3), "rows.count"),
        (encode_rows(TAPS, 5, ROW), "rows.count"),
        (rows_of(kind=2, dtype=2, width=2, start=5, count=2, inline=ROW * 2), "rows.dtype"),
        (rows_of(kind=2, dtype=99, width=2, start=5, count=2, inline=ROW), "rows.dtype"),
        (rows_of(kind=3, dtype=1, width=2, start=5, count=2, inline=ROW * 2), "rows.kind"),
        (rows_of(kind=2, dtype=1, width=4, start=5, count=2, inline=ROW * 4), "rows.width"),
        (
            rows_of(kind=2, dtype=1, width=2, start=5, count=2, inline=ROW + b"\0" * 7),
            "rows.inline bytes",
        ),
        (
            rows_of(
                kind=2,
                dtype=1,
                width=2,
                start=5,
                count=2,
                shared_memory=rows_pb2.SharedMemoryRegion(name="x", length_bytes=16),
            ),
            "rows.data",
        ),
    ],
)
def test_rows_that_do_not_fit_their_tokens_are_refused(
    rows: rows_pb2.Rows | None, field: str
) -> None:
    item = draft(1, 5, [8, 9], rows=rows)
    assert refusal(item, info(TAPS))["field"] == field


def test_rows_without_tokens_are_refused() -> None:
    item = draft(1, 5, [], pending=1, count=1, rows=encode_rows(TAPS, 5, ROW))
    assert refusal(item, info(TAPS))["field"] == "draft.rows"


def test_token_ids_stay_inside_a_vocabulary_that_is_known() -> None:
    assert refusal(draft(1, 0, [299, 300]), info(vocab_size=300))["value"] == "300"
    (decoded,) = decode_items([draft(1, 0, [299])], info(vocab_size=300))
    assert isinstance(decoded, DraftItem)


@pytest.mark.parametrize("field", [2047, 15])
@pytest.mark.parametrize("where", ["item", "open", "sampling", "draft", "release", "rows"])
def test_an_unknown_field_is_refused_never_ignored(where: str, field: int) -> None:
    key = field << 3
    extra = (bytes([key & 0x7F | 0x80, key >> 7]) if key > 127 else bytes([key])) + b"\x01"
    item = {
        "open": opened(1, sampling={}),
        "sampling": opened(1, sampling={}),
        "draft": draft(1, 0, [1], rows=encode_rows(TAPS, 0, ROW)),
        "rows": draft(1, 0, [1], rows=encode_rows(TAPS, 0, ROW)),
        "release": released(1),
        "item": released(1),
    }[where]
    target: Any = {
        "item": item,
        "open": item.open,
        "sampling": item.open.sampling,
        "draft": item.draft,
        "rows": item.draft.rows,
        "release": item.release,
    }[where]
    kept = item.WhichOneof("action")
    target.MergeFromString(extra)
    assert item.WhichOneof("action") == kept
    assert str(field) in refusal(item, info(TAPS))["value"]


def test_good_items_are_decoded_whole() -> None:
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 2**64 - 1}
    items = [
        opened(1, sampling=sampling, draft_sampling=pb.DRAFT_SAMPLING_COUPLED),
        opened(2),
        draft(1, 5, [8, 9], pending=3, count=7, rows=encode_rows(TAPS, 5, ROW + b"\1" * 8)),
        draft(2, 5, []),
        released(1),
    ]
    assert decode_items(items, info(TAPS)) == [
        OpenItem(
            session_id=1,
            parameters=SessionParameters(
                temperature=0.7,
                top_p=0.9,
                top_k=40,
                min_p=0.1,
                seed=2**64 - 1,
                draft_sampling=DraftSampling.COUPLED,
            ),
        ),
        OpenItem(session_id=2, parameters=SessionParameters()),
        DraftItem(
            session_id=1,
            context_length=5,
            token_ids=[8, 9],
            rows=ROW + b"\1" * 8,
            pending_token_id=3,
            draft_count=7,
        ),
        DraftItem(
            session_id=2,
            context_length=5,
            token_ids=[],
            rows=None,
            pending_token_id=None,
            draft_count=0,
        ),
        ReleaseItem(session_id=1),
    ]


def test_a_draft_result_without_tokens_is_still_a_draft_result() -> None:
    (message,) = encode_results([ItemResult(session_id=1, context_length=3, draft_token_ids=[])])
    assert message.WhichOneof("result") == "draft"
    (message,) = encode_results([ItemResult(session_id=1)])
    assert message.WhichOneof("result") is None


def test_the_handshake_leaves_open_what_any_target_fits() -> None:
    message = encode_info(info())
    assert not message.HasField("vocab_size")
    assert not message.HasField("tokenizer_hash")
    assert not message.HasField("target_model_hash")
    assert message.row_kind == rows_pb2.ROW_KIND_NONE
    assert message.protocol_version == 1
    message = encode_info(info(TAPS, vocab_size=300, tap_layers=(1, 2)))
    assert (message.vocab_size, list(message.tap_layers), message.row_width) == (300, [1, 2], 2)
