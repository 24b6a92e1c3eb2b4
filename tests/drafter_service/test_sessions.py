"""Slots are handed out once and come back."""

from __future__ import annotations

import pytest

from drafter_service.drafter import SessionParameters
from drafter_service.sessions import Session, SlotTable, StreamSessions
from splitspec.errors import InvalidArgument, NoFreeSlot, SessionNotFound


def test_every_slot_is_held_once_and_comes_back() -> None:
    slots = SlotTable(3)
    held = [slots.take() for _ in range(3)]
    assert sorted(held) == [0, 1, 2]
    with pytest.raises(NoFreeSlot, match="all 3 slots"):
        slots.take()
    slots.give_back(held[1])
    assert slots.used_count == 2
    assert slots.take() == held[1]


def test_a_slot_that_is_free_cannot_be_given_back_again() -> None:
    slots = SlotTable(1)
    with pytest.raises(AssertionError):
        slots.give_back(0)


def test_l7_a_stream_gives_all_its_sessions_back_at_once() -> None:
    stream = StreamSessions()
    sessions = [Session(slot=i, parameters=SessionParameters()) for i in range(3)]
    for i, session in enumerate(sessions):
        stream.add(i + 1, session)
    assert stream.remove_all() == sessions
    assert len(stream) == 0
    with pytest.raises(SessionNotFound, match="session 2"):
        stream.get(2)


def test_a_session_id_is_open_once() -> None:
    stream = StreamSessions()
    stream.check_new(7)
    stream.add(7, Session(slot=0, parameters=SessionParameters(), context_length=5))
    assert stream.context_length(7) == 5
    with pytest.raises(InvalidArgument, match="session is 7"):
        stream.check_new(7)
    stream.remove(7)
    stream.check_new(7)
    assert stream.context_length(7) == 0
