"""Rows as they cross the wire: which a draft wants, and the features that it makes of them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from drafter_service.drafter import DraftWork
from splitspec.rows import RowFormat
from splitspec.v1 import rows_pb2

assert sys.byteorder == "little", "rows cross the wire as this machine's own bytes"

_DTYPES = {
    rows_pb2.ROW_DTYPE_FLOAT32: torch.float32,
    rows_pb2.ROW_DTYPE_BFLOAT16: torch.bfloat16,
    rows_pb2.ROW_DTYPE_FLOAT16: torch.float16,
}
_ROW_KINDS = {"raw": rows_pb2.ROW_KIND_RAW_TAPS, "fused": rows_pb2.ROW_KIND_FUSED}
_ROW_DTYPES = {
    "float32": rows_pb2.ROW_DTYPE_FLOAT32,
    "bfloat16": rows_pb2.ROW_DTYPE_BFLOAT16,
    "float16": rows_pb2.ROW_DTYPE_FLOAT16,
}


def row_format(rows: str, row_dtype: str, *, raw_width: int, fused_width: int) -> RowFormat:
    """Return the format of the rows that the flags `--rows` and `--row-dtype` ask for."""
    width = fused_width if rows == "fused" else raw_width
    return RowFormat(kind=_ROW_KINDS[rows], dtype=_ROW_DTYPES[row_dtype], width=width)


class RowFeatures:
    """Reads rows of one format."""

    def __init__(self, row_format: RowFormat, fuse: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Read rows of `row_format`; `fuse` makes features of raw ones."""
        self._dtype = _DTYPES[row_format.dtype]
        self._width = row_format.width
        # A fused row went through fc on the verifier: it must never go through it again.
        self._is_fused = row_format.kind == rows_pb2.ROW_KIND_FUSED
        self._fuse = fuse

    def read(self, work: DraftWork) -> torch.Tensor:
        """Return the features [c, H] float32 of a work's rows."""
        assert work.rows is not None
        # NOTE: the one copy. The bytes are the message's, read-only and gone after the step; torch
        # wants neither, and features may outlive the step.
        rows = torch.frombuffer(bytearray(work.rows), dtype=self._dtype)
        rows = rows.view(len(work.token_ids), self._width).float()
        return rows if self._is_fused else self._fuse(rows)
