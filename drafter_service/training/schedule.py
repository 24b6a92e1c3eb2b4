"""What a step trains on and how fast: functions of the step and of the seed only.

So a run that resumes goes on exactly as one that was never stopped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

WARM_UP = 0.04
"""Share of the budget in which the learning rate rises."""
FLOOR = 0.02
"""The last learning rate, as a share of the highest."""
PORTION_PASSES = 2
"""Passes over a portion of rows before the next takes its place: features cost about as much as a
pass of steps."""


def learning_rate(fraction: float, highest: float) -> float:
    """Return the learning rate once `fraction` of the budget is spent: a rise, then a cosine."""
    if fraction < WARM_UP:
        return highest * max(fraction / WARM_UP, 1e-3)
    turned = min((fraction - WARM_UP) / (1.0 - WARM_UP), 1.0)
    return highest * (FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * turned)))


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """Which rows each step takes.

    Where all rows' features fit, each pass is another permutation of all rows. Where they do not,
    the rows are shuffled into equal portions that fit, each is passed over PORTION_PASSES times,
    and after the last portion they are shuffled anew.
    """

    row_count: int
    capacity: int
    """Rows whose features fit at once."""
    batch_rows: int
    """At most `capacity` and `row_count`."""
    seed: int

    def __post_init__(self) -> None:
        assert 1 <= self.batch_rows <= min(self.capacity, self.row_count), self

    @property
    def portion_count(self) -> int:
        """Return how many portions the rows make."""
        return -(-self.row_count // self.capacity)

    @property
    def portion_rows(self) -> int:
        """Return the rows of a portion; rows that do not divide rest until the next shuffle."""
        return max(self.row_count // self.portion_count, self.batch_rows)

    @property
    def pass_steps(self) -> int:
        """Return the steps of one pass over a portion."""
        return self.portion_rows // self.batch_rows

    def portion(self, step: int) -> int:
        """Return the number of the portion that `step` takes its rows of, counted from 0."""
        if self.portion_count == 1:
            return 0
        return step // (self.pass_steps * PORTION_PASSES)

    def rows(self, portion: int) -> torch.Tensor:
        """Return the rows of a portion, [portion_rows] int64 in [0, row_count), ascending."""
        if self.portion_count == 1:
            return torch.arange(self.row_count)
        rotation, place = divmod(portion, self.portion_count)
        shuffled = _permutation(self.row_count, self.seed, 1, rotation)
        first = min(place * self.portion_rows, self.row_count - self.portion_rows)
        return shuffled[first : first + self.portion_rows].sort().values

    def places(self, step: int) -> torch.Tensor:
        """Return the places in its portion of the rows of `step`, [batch_rows] int64."""
        number, place = divmod(step, self.pass_steps)
        order = _permutation(self.portion_rows, self.seed, 0, number)
        return order[place * self.batch_rows : (place + 1) * self.batch_rows]


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, stream: int, number: int) -> torch.Tensor:
    """Return permutation `number` of one of a seed's two streams; [count] int64 on the CPU."""
    # Odd multipliers: streams and numbers of a seed do not meet within 2**63.
    mixed = seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + stream * 0x94D049BB133111EB
    generator = torch.Generator().manual_seed(mixed % 2**63)
    return torch.randperm(count, generator=generator)
