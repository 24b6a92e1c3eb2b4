"""What keeps a row's bits apart from its place in a tile (law L4)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from graph_runtime.tiles import TILE_ROWS, silu_by_row


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("width", [150, 151, 1536, 14336])
@pytest.mark.usefixtures("threads")
def test_l4_silu_gives_a_row_the_same_bits_wherever_it_lies(width: int) -> None:
    """Guards a bug: the last rows of odd widths, or of a thread's share, had other bits."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(TILE_ROWS, width, generator=generator)
    expected = silu_by_row(rows)
    torch.testing.assert_close(expected, rows / (1 + (-rows).exp()))
    for places in range(1, TILE_ROWS):
        assert torch.equal(silu_by_row(rows.roll(places, 0)).roll(-places, 0), expected)
