"""The rows codec accepts exactly what was agreed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitspec.errors import InvalidArgument
from splitspec.rows import NO_ROWS, RowFormat, check_rows, encode_rows
from splitspec.v1 import rows_pb2

BF16 = RowFormat(kind=rows_pb2.ROW_KIND_FUSED, dtype=rows_pb2.ROW_DTYPE_BFLOAT16, width=3)


def test_a_row_has_width_times_element_bytes() -> None:
    assert BF16.row_bytes == 6
    assert RowFormat(kind=rows_pb2.ROW_KIND_RAW_TAPS, dtype=1, width=3).row_bytes == 12  # type: ignore[arg-type]
    assert NO_ROWS.row_bytes == 0


@given(count=st.integers(1, 9), start=st.integers(0, 2**32 - 1), fill=st.integers(0, 255))
def test_rows_come_back_as_they_went_in(count: int, start: int, fill: int) -> None:
    data = bytes([fill]) * (count * 6)
    message = rows_pb2.Rows.FromString(encode_rows(BF16, start, data).SerializeToString())
    assert (message.start, message.count, message.width) == (start, count, 3)
    assert check_rows(message, BF16, start, count) == data


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("kind", rows_pb2.ROW_KIND_RAW_TAPS, "rows.kind"),
        ("kind", 77, "rows.kind"),
        ("dtype", rows_pb2.ROW_DTYPE_FLOAT16, "rows.dtype"),
        ("dtype", 77, "rows.dtype"),
        ("width", 2**32 - 1, "rows.width"),
        ("start", 8, "rows.start"),
        ("count", 2**32 - 1, "rows.count"),
        ("count", 0, "rows.count"),
        ("inline", bytes(11), "rows.inline bytes"),
        ("inline", b"", "rows.inline bytes"),
    ],
)
def test_any_field_that_differs_is_refused_by_name(field: str, value: object, named: str) -> None:
    rows = encode_rows(BF16, 7, bytes(12))
    setattr(rows, field, value)
    with pytest.raises(InvalidArgument) as caught:
        check_rows(rows, BF16, 7, 2)
    assert caught.value.metadata["field"] == named


def test_rows_in_shared_memory_or_nowhere_are_refused_where_none_was_agreed() -> None:
    rows = encode_rows(BF16, 0, bytes(6))
    rows.shared_memory.name = "x"
    for message in (rows, rows_pb2.Rows(kind=3, dtype=2, width=3, count=1)):  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"rows\.data"):
            check_rows(message, BF16, 0, 1)


def test_part_of_a_row_is_our_own_bug() -> None:
    for data in (b"", bytes(7)):
        with pytest.raises(AssertionError):
            encode_rows(BF16, 0, data)
