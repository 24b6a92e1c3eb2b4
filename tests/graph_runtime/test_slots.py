"""Slots are held once and come back."""

from __future__ import annotations

import pytest

from graph_runtime.slots import SlotTable
from splitspec.errors import NoFreeSlot


def test_every_slot_is_handed_out_once_and_comes_back() -> None:
    slots = SlotTable(3)
    taken = [slots.take() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2]
    assert slots.used_count == 3
    with pytest.raises(NoFreeSlot):
        slots.take()
    slots.give_back(taken[1])
    assert slots.used_count == 2
    assert slots.take() == taken[1]


def test_giving_a_free_slot_back_is_our_own_bug() -> None:
    slots = SlotTable(2)
    with pytest.raises(AssertionError):
        slots.give_back(0)
