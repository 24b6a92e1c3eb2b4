"""The sessions that a stream of the verifier owns."""

from __future__ import annotations

import pytest

from graph_runtime.choice import Sampling
from splitspec.errors import InvalidArgument, SessionNotFound
from splitspec.rows import NO_ROWS
from verifier_service.sessions import Session, StreamSessions


def session(slot: int = 0) -> Session:
    return Session(slot=slot, sampling=Sampling(), row_format=NO_ROWS)


def test_a_stream_finds_its_sessions_and_no_others() -> None:
    stream, other = StreamSessions(), StreamSessions()
    stream.check_new(7)
    stream.add(7, session())
    assert stream.get(7).committed_length == 0
    with pytest.raises(SessionNotFound):
        other.get(7)
    with pytest.raises(InvalidArgument):
        stream.check_new(7)
    other.check_new(7)


def test_the_length_of_a_session_that_is_not_open_is_zero() -> None:
    stream = StreamSessions()
    stream.add(1, session())
    stream.get(1).committed_length = 5
    assert stream.committed_length(1) == 5
    stream.remove(1)
    assert stream.committed_length(1) == 0


def test_L7_removing_all_returns_each_session_once() -> None:
    stream = StreamSessions()
    for number in (1, 2):
        stream.add(number, session(slot=number))
    assert len(stream) == 2
    assert [held.slot for held in stream.remove_all()] == [1, 2]
    assert stream.remove_all() == []
