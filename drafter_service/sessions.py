"""What a drafter keeps of a session: its slot, its parameters, and how much context it holds."""

from __future__ import annotations

from dataclasses import dataclass

from drafter_service.drafter import SessionParameters
from graph_runtime.slots import OwnedSessions


@dataclass(slots=True, kw_only=True)
class Session:
    """One open session."""

    slot: int
    parameters: SessionParameters
    context_length: int = 0


class StreamSessions(OwnedSessions[Session]):
    """The sessions of one stream."""

    def context_length(self, session_id: int) -> int:
        """Return a session's context length, 0 when it is not open."""
        session = self.find(session_id)
        return session.context_length if session is not None else 0
