"""What keeps a row's bits apart from its place in a tile (law L4)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from graph_runtime.tiles import TILE_ROWS, by_tiles, silu_by_row


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


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 21])
def test_l4_whatever_is_computed_by_tiles_sees_tiles_of_one_height_only(count: int) -> None:
    rows, places = torch.randn(count, 3, 5), torch.arange(count)
    heights = []

    def compute(tile: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heights.append((len(tile), len(places)))
        return tile + 1, places * 2

    shifted, doubled = by_tiles(compute, rows, places)
    assert heights == [(TILE_ROWS, TILE_ROWS)] * -(-count // TILE_ROWS)
    assert torch.equal(shifted, rows + 1)
    assert torch.equal(doubled, places * 2)
    assert doubled.dtype == torch.int64
