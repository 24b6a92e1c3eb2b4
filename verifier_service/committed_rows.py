"""Committed rows as the bytes that sessions asked for: raw, or fused by a draft. No gRPC."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graph_runtime.projection import RowProjection
from graph_runtime.target import TargetInfo
from splitspec.rows import NO_ROWS, RowFormat
from splitspec.v1 import rows_pb2

assert sys.byteorder == "little", "rows cross the wire as this machine's own bytes"

_ROW_DTYPES = {
    torch.float32: rows_pb2.ROW_DTYPE_FLOAT32,
    torch.bfloat16: rows_pb2.ROW_DTYPE_BFLOAT16,
    torch.float16: rows_pb2.ROW_DTYPE_FLOAT16,
}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Rows that one item committed."""

    row_format: RowFormat
    """One of `CommittedRows.formats`, not NO_ROWS."""
    rows: torch.Tensor
    """[n, row_width], on the target's device: the committed ones, no others (law L6)."""


class CommittedRows:
    """Makes rows into host bytes, in the kinds that are offered."""

    def __init__(self, info: TargetInfo, fusion: RowProjection | None) -> None:
        self._fusion = fusion
        self.formats: dict[int, RowFormat] = {
            rows_pb2.ROW_KIND_NONE: NO_ROWS,
            rows_pb2.ROW_KIND_RAW_TAPS: RowFormat(
                kind=rows_pb2.ROW_KIND_RAW_TAPS,
                dtype=_ROW_DTYPES[info.row_dtype],
                width=info.row_width,
            ),
        }
        """RowKind -> what its rows are."""
        if fusion is not None:
            assert fusion.tap_layers == info.tap_layers, "the taps are the draft's"
            assert fusion.row_width == info.row_width, (fusion.row_width, info.row_width)
            self.formats[rows_pb2.ROW_KIND_FUSED] = RowFormat(
                kind=rows_pb2.ROW_KIND_FUSED,
                dtype=rows_pb2.ROW_DTYPE_FLOAT32,
                width=fusion.hidden_size,
            )

    @property
    def fused_model_hash(self) -> str:
        """Return the hash of the draft whose projection fused rows carry; empty: none are made."""
        return self._fusion.model_hash if self._fusion is not None else ""

    def warm_up(self, rows: torch.Tensor) -> None:
        """Do with rows [n, row_width] once what sessions will have done with theirs."""
        for row_format in self.formats.values():
            if row_format is not NO_ROWS:
                self.to_bytes([Wanted(row_format=row_format, rows=rows)])

    def to_bytes(self, wanted: Sequence[Wanted]) -> list[bytes]:
        """Return each item's rows as row-major bytes; those to fuse share one projection."""
        fused = iter(self._fused([w.rows for w in wanted if _is_fused(w)]))
        return [_bytes(next(fused) if _is_fused(w) else w.rows) for w in wanted]

    @torch.inference_mode()
    def _fused(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not parts:
            return ()
        assert self._fusion is not None, "a kind that is not offered was refused at open"
        # A target in bfloat16 has rows in bfloat16; the projection is float32 whatever it is.
        rows = torch.cat([part.to(torch.float32) for part in parts])
        # To the host in one copy, not in one a session.
        return self._fusion.fuse(rows).cpu().split([len(part) for part in parts])


def _is_fused(wanted: Wanted) -> bool:
    return wanted.row_format.kind == rows_pb2.ROW_KIND_FUSED


def _bytes(rows: torch.Tensor) -> bytes:
    """Return rows [n, W] as row-major bytes, copied off their device."""
    data: bytes = rows.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return data
