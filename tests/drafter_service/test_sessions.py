"""The sessions that a stream of the drafter owns."""

from __future__ import annotations

import pytest

from drafter_service.drafter import SessionParameters
from drafter_service.sessions import Session, StreamSessions
from splitspec.errors import InvalidArgument, SessionNotFound


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
