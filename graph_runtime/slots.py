"""The slots of a cache, and the sessions that a stream holds them for. No torch, no gRPC."""

from __future__ import annotations

from typing import Generic, TypeVar

from splitspec.errors import InvalidArgument, NoFreeSlot, SessionNotFound

S = TypeVar("S")


class SlotTable:
    """The free slots of one cache, shared by every stream."""

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


class OwnedSessions(Generic[S]):
    """The sessions that one stream owns (law L7), by the coordinator's numbers."""

    def __init__(self) -> None:
        self._sessions: dict[int, S] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, session_id: int) -> S | None:
        """Return a session if it is open."""
        return self._sessions.get(session_id)

    def get(self, session_id: int) -> S:
        """Return an open session.

        Raises:
            SessionNotFound: the stream has none of this number.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFound(f"no session {session_id} on this stream", session=session_id)
        return session

    def check_new(self, session_id: int) -> None:
        """Refuse a number that is in use.

        Raises:
            InvalidArgument: the session is open.
        """
        if session_id in self._sessions:
            raise InvalidArgument.of("session", session_id, "a number that is not open")

    def add(self, session_id: int, session: S) -> None:
        """Own a new session; `check_new` comes first."""
        assert session_id not in self._sessions, session_id
        self._sessions[session_id] = session

    def remove(self, session_id: int) -> S:
        """Forget an open session and return it."""
        return self._sessions.pop(session_id)

    def remove_all(self) -> list[S]:
        """Forget every session and return them: the stream has ended."""
        sessions = list(self._sessions.values())
        self._sessions.clear()
        return sessions
