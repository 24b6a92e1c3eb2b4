"""What a verifier keeps of a session: its slot, its parameters, and how much has committed."""

from __future__ import annotations

from dataclasses import dataclass

from graph_runtime.choice import Sampling
from graph_runtime.slots import OwnedSessions
from splitspec.rows import RowFormat


@dataclass(slots=True, kw_only=True)
class Session:
    """One open session. Rollback is not advancing `committed_length`; nothing is cleared."""

    slot: int
    sampling: Sampling
    row_format: RowFormat
    """Rows that its results carry; NO_ROWS for none."""
    committed_length: int = 0


class StreamSessions(OwnedSessions[Session]):
    """The sessions of one stream.

    They are touched by the engine's thread alone; `ended` is set by the stream's own task, so that
    steps which still wait are dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ended = False

    def committed_length(self, session_id: int) -> int:
        """Return a session's committed length, 0 when it is not open."""
        session = self.find(session_id)
        return session.committed_length if session is not None else 0
