"""Which sessions are open, in which slots, and how much each has committed."""

from __future__ import annotations

from dataclasses import dataclass

from splitspec.errors import InvalidArgument, NoFreeSlot, SessionNotFound
from verifier_service.verification import Sampling


@dataclass(slots=True, kw_only=True)
class Session:
    """One open session. Rollback is not advancing `committed_length`; nothing is cleared."""

    slot: int
    sampling: Sampling
    row_kind: int
    """RowKind that its results carry."""
    committed_length: int = 0


class SlotTable:
    """The free slots of the target's cache, shared by every stream."""

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
    """The sessions that one stream owns (law L7), by the coordinator's numbers.

    Its items are touched by the engine's thread alone; `ended` is set by the stream's own task, so
    that steps which still wait are dropped.
    """

    def __init__(self) -> None:
        self._sessions: dict[int, Session] = {}
        self.ended = False

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: int) -> Session:
        """Return an open session.

        Raises:
            SessionNotFound: the stream has none of this number.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFound(f"no session {session_id} on this stream", session=session_id)
        return session

    def committed_length(self, session_id: int) -> int:
        """Return a session's committed length, 0 when it is not open."""
        session = self._sessions.get(session_id)
        return session.committed_length if session is not None else 0

    def check_new(self, session_id: int) -> None:
        """Refuse a number that is in use.

        Raises:
            InvalidArgument: the session is open.
        """
        if session_id in self._sessions:
            raise InvalidArgument.of("session", session_id, "a number that is not open")

    def add(self, session_id: int, session: Session) -> None:
        """Own a new session."""
        assert session_id not in self._sessions, session_id
        self._sessions[session_id] = session

    def remove(self, session_id: int) -> Session:
        """Forget an open session and return it."""
        return self._sessions.pop(session_id)

    def remove_all(self) -> list[Session]:
        """Forget every session and return them."""
        sessions = list(self._sessions.values())
        self._sessions.clear()
        return sessions
