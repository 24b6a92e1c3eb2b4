"""The target's features of the rows that are trained on, computed once and kept on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from tqdm import tqdm

from drafter_service.training.batches import Batch
from splitspec.errors import UserError

FIRST_POSITIONS = 20
"""Positions at a row's start that neither scale the taps nor are trained on: the first ones carry
activations a hundred times the others'."""
_RMS_ROWS = 256
_FORWARD_TOKENS = 32768
"""Tokens of one pass of the target."""
_GIB = 2**30


class FeatureTarget(Protocol):
    """What features need of a `TrainingTarget`."""

    device: torch.device
    dtype: torch.dtype
    """What activations, and so features, are kept in."""

    def forward(
        self, tokens: torch.Tensor, tap_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return taps [B, S, T, H] and final [B, S, H] of tokens [B, S]."""
        ...

    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] float32 of `final` [..., H]."""
        ...


class Text(Protocol):
    """What features need of `Rollouts`; on the CPU."""

    @property
    def tokens(self) -> torch.Tensor:
        """Return [N, S] integers."""
        ...

    @property
    def roles(self) -> torch.Tensor:
        """Return [N, S] uint8."""
        ...

    @property
    def training_rows(self) -> torch.Tensor:
        """Return int64 rows, ascending."""
        ...


class Features:
    """A cache of as many rows as fit, in buffers that stay where they are.

    A captured graph reads the buffers, so `load` only ever fills them anew.
    """

    def __init__(
        self, target: FeatureTarget, text: Text, *, tap_layers: tuple[int, ...], gib: float,
        least_rows: int,
    ) -> None:  # fmt: skip
        """Measure the taps' scale and make the buffers; `load` fills them.

        Args:
            target: whose taps are read.
            text: its own text.
            tap_layers: T 0-based layers, ascending.
            gib: device memory that the buffers may take.
            least_rows: rows of a step, which must fit at once.

        Raises:
            UserError: --feature-gib is too little, or there are fewer training rows than a step
                takes, or the device has not so much memory.
        """
        self.text, self.tap_layers, self.device = text, tap_layers, target.device
        self.dtype = target.dtype
        self.row_length = int(text.tokens.shape[1])
        self._target = target
        if len(text.training_rows) < least_rows:
            raise UserError(
                f"--batch-rows {least_rows} is not in 1..{len(text.training_rows)}, the rows that "
                "there are to train on"
            )
        self.tap_rms, widths = self._measure()
        """[T] float32: median RMS of each tap's rows, by which features are divided."""
        self.capacity = self._capacity(gib, widths, least_rows)
        """Rows that fit at once, at most all training rows."""
        self._buffers = self._allocate(widths)

    def load(self, rows: torch.Tensor) -> None:
        """Fill places [0, len(rows)) with `rows`, indices into the text; at most `capacity`."""
        assert 1 <= len(rows) <= self.capacity, (len(rows), self.capacity)
        at_once = self._forward_rows()
        with tqdm(total=len(rows), desc="features", unit="row", disable=None) as bar:
            for first in range(0, len(rows), at_once):
                batch = self._compute(rows[first : first + at_once])
                count = len(batch.tokens)
                for name, buffer in self._buffers.items():
                    buffer[first : first + count] = getattr(batch, name)
                bar.update(count)

    def batch(self, places: torch.Tensor) -> Batch:
        """Return the rows at `places` [R] int64 on the device, which a graph may capture."""
        picked = {name: b.index_select(0, places) for name, b in self._buffers.items()}
        for name in ("tokens", "likeliest"):
            picked[name] = picked[name].long()
        return Batch(**picked)

    def batches(self, rows: torch.Tensor) -> Iterator[Batch]:
        """Yield the batches of any of the text's rows, computed as they are asked for."""
        at_once = min(8, self._forward_rows())
        for first in range(0, len(rows), at_once):
            yield self._compute(rows[first : first + at_once])

    def _compute(self, rows: torch.Tensor) -> Batch:
        tokens = self.text.tokens[rows].to(self.device).long()
        with torch.no_grad():
            taps, final = self._target.forward(tokens, self.tap_layers)
            return Batch(
                tokens=tokens,
                roles=self.text.roles[rows].to(self.device),
                features=(taps / self.tap_rms[:, None].to(taps.dtype)).to(self.dtype),
                final=final.to(self.dtype),
                likeliest=torch.stack([self._target.logits(row).argmax(-1) for row in final]),
            )

    @torch.no_grad()
    def _measure(self) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return the taps' median RMS over rows spread evenly, and the widths T and H."""
        rows = self.text.training_rows
        rows = rows[:: -(-len(rows) // _RMS_ROWS)]
        found = []
        for part in rows.split(self._forward_rows()):
            tokens = self.text.tokens[part].to(self.device).long()
            taps, _ = self._target.forward(tokens, self.tap_layers)
            kept = taps[:, min(FIRST_POSITIONS, self.row_length // 2) :].float()
            found.append(kept.pow(2).mean(-1).sqrt().flatten(0, 1))
        return torch.cat(found).median(0).values, (taps.shape[2], taps.shape[3])

    def _forward_rows(self) -> int:
        return max(_FORWARD_TOKENS // self.row_length, 1)

    def _shapes(self, widths: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape of one row of each buffer."""
        taps, hidden = widths
        return {
            "tokens": ((self.row_length,), torch.int32),
            "roles": ((self.row_length,), torch.uint8),
            "features": ((self.row_length, taps, hidden), self.dtype),
            "final": ((self.row_length, hidden), self.dtype),
            "likeliest": ((self.row_length,), torch.int32),
        }

    def _capacity(self, gib: float, widths: tuple[int, int], least_rows: int) -> int:
        row_bytes = sum(
            torch.Size(shape).numel() * dtype.itemsize
            for shape, dtype in self._shapes(widths).values()
        )
        fitting = int(gib * _GIB / row_bytes)
        if fitting < least_rows:
            raise UserError(
                f"--feature-gib {gib} holds {fitting} rows of text; expected at least "
                f"{least_rows * row_bytes / _GIB:.3g}, the {least_rows} rows of a step"
            )
        return min(fitting, len(self.text.training_rows))

    def _allocate(self, widths: tuple[int, int]) -> dict[str, torch.Tensor]:
        try:
            return {
                name: torch.zeros((self.capacity, *shape), dtype=dtype, device=self.device)
                for name, (shape, dtype) in self._shapes(widths).items()
            }
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise UserError(
                f"features of {self.capacity} rows do not fit in the memory of {self.device}; "
                "give a smaller --feature-gib"
            ) from error
