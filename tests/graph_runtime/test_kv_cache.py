"""The cache of one layer: what is written is read, what is stale is cleared, slots stay apart."""

from __future__ import annotations

import pytest
import torch

from graph_runtime.kv_cache import KVCache, padded_length


def make(max_context_length: int = 130) -> KVCache:
    return KVCache(
        slot_count=3,
        n_kv_heads=2,
        max_context_length=max_context_length,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def rows(count: int, *, seed: int) -> torch.Tensor:
    return torch.randn(count, 2, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("length", "padded"), [(1, 64), (64, 64), (65, 128), (130, 192)])
def test_lengths_are_padded_to_whole_blocks(length: int, padded: int) -> None:
    assert padded_length(length) == padded
    assert make(length).k.shape == (3, 2, padded, 4)


def test_what_is_written_is_read_and_the_rest_of_the_block_is_cleared() -> None:
    cache = make()
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    k, v = rows(70, seed=0), rows(70, seed=1)
    cache.write(1, 0, k, v)
    read_k, read_v = cache.read(1, 128)
    assert torch.equal(read_k[:, :70], k.transpose(0, 1))
    assert torch.equal(read_v[:, :70], v.transpose(0, 1))
    assert not read_k[:, 70:].any()
    assert not read_v[:, 70:].any()
    assert cache.k[0].isnan().all()
    assert cache.k[2].isnan().all()


def test_a_part_is_cleared_and_nothing_around_it() -> None:
    cache = make()
    values = rows(100, seed=0)
    for slot in range(3):
        cache.write(slot, 0, values, values)
    cache.clear(1, 10, 70)
    cache.clear(0, 5, 5)
    for slot in range(3):
        for part in cache.read(slot, 100):
            cleared = [i for i in range(100) if not part[:, i].any()]
            assert cleared == (list(range(10, 70)) if slot == 1 else [])
            kept = [i for i in range(100) if i not in cleared]
            assert torch.equal(part[:, kept], values[kept].transpose(0, 1))


def test_a_rollback_overwrites_and_keeps_what_was_committed() -> None:
    cache = make()
    first, second = rows(60, seed=0), rows(8, seed=1)
    cache.write(0, 0, first, first)
    cache.write(0, 55, second, second)
    read, _ = cache.read(0, 64)
    assert torch.equal(read[:, :55], first[:55].transpose(0, 1))
    assert torch.equal(read[:, 55:63], second.transpose(0, 1))
    assert not read[:, 63:].any()


def test_a_prefix_is_copied_and_then_independent() -> None:
    cache = make()
    values = rows(100, seed=0)
    cache.write(0, 0, values, values)
    cache.copy_prefix(0, 2, 77)
    cache.write(0, 0, rows(100, seed=1), rows(100, seed=1))
    for part in cache.read(2, 77):
        assert torch.equal(part, values[:77].transpose(0, 1))
    assert not cache.k[2, :, 77:].any()
