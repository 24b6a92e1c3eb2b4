"""Which sessions are open, in which slots, and how much context each holds."""

from __future__ import annotations

from dataclasses import dataclass

from drafter_service.drafter import SessionParameters
from splitspec.errors import InvalidArgument, NoFreeSlot, SessionNotFound


@dataclass(slots=True, kw_only=True)
class Session:
    """One open session."""

    slot: int
    parameters: SessionParameters
    context_length: int = 0


class SlotTable:
    """The free slots of the drafter, shared by every stream."""

    def __init__(self, slot_count: int) -> None:
        self._slot_count = slot_count
        self._free = list(range(slot_count - 1, -1, -1))

    @property
    def used_count(self) -> int:
        """Return how many slots are held."""
        return self._slot_count - len(self._free)

    def take(self) -> int:
        """Return a slot that was free.

        Raises:
            NoFreeSlot: there is none.
        """
        if not self._free:
            raise NoFreeSlot(f"all {self._slot_count} slots are taken", slots=self._slot_count)
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Free a held slot."""
        assert slot not in self._free, slot
        self._free.append(slot)


class StreamSessions:
    """The sessions that one stream owns (law L7)."""

    def __init__(self) -> None:
        self._sessions: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session_id: int, session: Session) -> None:
        """Add a new session. `check_new` comes first."""
        assert session_id not in self._sessions, session_id
        self._sessions[session_id] = session

    def check_new(self, session_id: int) -> None:
        """Refuse an id that is open already.

        Raises:
            InvalidArgument: it is.
        """
        if session_id in self._sessions:
            raise InvalidArgument.of("session", session_id, "an id that is not open on this stream")

    def get(self, session_id: int) -> Session:
        """Return an open session.

        Raises:
            SessionNotFound: the stream has no such session.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFound(
                f"session {session_id} is not open on this stream", session=session_id
            )
        return session

    def context_length(self, session_id: int) -> int:
        """Return a session's context length; 0 when it is not open."""
        session = self._sessions.get(session_id)
        return session.context_length if session else 0

    def remove(self, session_id: int) -> Session:
        """Remove an open session and return it."""
        return self._sessions.pop(session_id)

    def remove_all(self) -> list[Session]:
        """Remove and return every session: the stream has ended."""
        sessions = list(self._sessions.values())
        self._sessions.clear()
        return sessions
