"""The rows codec: what a `Rows` message must hold, checked without opening the bytes.

Nothing here interprets elements: the coordinator forwards rows as they are, and the model services
view the bytes with the framework they have.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitspec.errors import InvalidArgument
from splitspec.v1 import rows_pb2

ITEM_BYTES = {
    rows_pb2.ROW_DTYPE_FLOAT32: 4,
    rows_pb2.ROW_DTYPE_BFLOAT16: 2,
    rows_pb2.ROW_DTYPE_FLOAT16: 2,
}


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """Kind, dtype and width that both ends of a link agreed on in the handshake."""

    kind: rows_pb2.RowKind
    dtype: rows_pb2.RowDtype = rows_pb2.ROW_DTYPE_UNSPECIFIED
    width: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 for ROW_KIND_NONE."""
        return self.width * ITEM_BYTES.get(self.dtype, 0)


NO_ROWS = RowFormat(kind=rows_pb2.ROW_KIND_NONE)


def encode_rows(row_format: RowFormat, start: int, data: bytes) -> rows_pb2.Rows:
    """Wrap `data`, whole rows of positions `start`, `start` + 1, ..., in a message."""
    rows = rows_pb2.Rows()
    fill_rows(rows, row_format, start, data)
    return rows


def fill_rows(rows: rows_pb2.Rows, row_format: RowFormat, start: int, data: bytes) -> None:
    """Do as `encode_rows` inside a larger message: it copies the bytes once, not twice."""
    count, rest = divmod(len(data), row_format.row_bytes)
    assert count, row_format
    assert not rest, (len(data), row_format)
    rows.kind = row_format.kind
    rows.dtype = row_format.dtype
    rows.width = row_format.width
    rows.start = start
    rows.count = count
    rows.inline = data


def check_rows(rows: rows_pb2.Rows, row_format: RowFormat, start: int, count: int) -> bytes:
    """Return the bytes of `rows` if they are `count` rows of `row_format` from `start` on.

    Raises:
        InvalidArgument: names the first field that differs, its value and what was agreed.
    """
    expected = (
        ("rows.kind", rows.kind, row_format.kind),
        ("rows.dtype", rows.dtype, row_format.dtype),
        ("rows.width", rows.width, row_format.width),
        ("rows.start", rows.start, start),
        ("rows.count", rows.count, count),
    )
    for field, value, wanted in expected:
        if value != wanted:
            raise InvalidArgument.of(field, value, str(wanted))
    if rows.WhichOneof("data") != "inline":
        raise InvalidArgument.of("rows.data", rows.WhichOneof("data"), "inline")
    size = count * row_format.row_bytes
    if len(rows.inline) != size:
        raise InvalidArgument.of("rows.inline bytes", len(rows.inline), str(size))
    return rows.inline
