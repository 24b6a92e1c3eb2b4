"""Where an answer ends, and what of it may be shown.

Rounds emit several tokens at once; the answer ends exactly where it would if they came one by one,
at the earliest of stop token, stop string and output limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.text import Detokenizer, ModelText
from splitspec.v1.generation_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FinishReason,
)


class StopStrings:
    """Ends a text before the earliest stop string; holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Take more text; return what can be shown for good."""
        held = self._held + text
        starts = [start for stop in self._stops if (start := held.find(stop)) >= 0]
        if starts:
            self.found = True
            self._held = ""
            return held[: min(starts)]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """Return what was held back: no text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper start of `stop` that `text` ends with."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class Output:
    """One answer as it grows. `push` runs between rounds, `take` whenever the client is ready."""

    def __init__(
        self,
        text: ModelText,
        *,
        limit: int,
        stop_token_ids: Iterable[int] = (),
        stops: Sequence[str] = (),
    ) -> None:
        self._detokenizer = Detokenizer(text)
        self._limit = limit
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stops = StopStrings(stops) if stops else None
        self._ids: list[int] = []
        """Emitted, not taken yet."""
        self._undecoded: list[int] = []
        self._text = ""
        self.count = 0
        self.finish: FinishReason | None = None

    def push(self, ids: Sequence[int]) -> FinishReason | None:
        """Take a round's tokens; return why the answer ends with them, or None.

        Tokens after the end are dropped. Without stop strings nothing is decoded here: that can
        wait until the next round is on its way.
        """
        for token in ids:
            self._push(token)
            if self.finish is not None:
                break
        return self.finish

    def _push(self, token: int) -> None:
        self._ids.append(token)
        self.count += 1
        if token in self._stop_token_ids:
            self.finish = FINISH_REASON_STOP
            return
        self._undecoded.append(token)
        if self._stops is not None:
            self._text += self._stops.push(self._decode())
            if self._stops.found:
                self.finish = FINISH_REASON_STOP
                return
        if self.count >= self._limit:
            self.finish = FINISH_REASON_LENGTH

    def take(self) -> tuple[list[int], str]:
        """Return the token ids and the text since the last call; at the end, all that is left."""
        ids, self._ids = self._ids, []
        text, self._text = self._text, ""
        if self._stops is None:
            text += self._decode()
        if self.finish is not None:
            text += self._flush()
        return ids, text

    def _decode(self) -> str:
        ids, self._undecoded = self._undecoded, []
        return self._detokenizer.push(ids) if ids else ""

    def _flush(self) -> str:
        rest = self._detokenizer.flush()
        if self._stops is None:
            return rest
        if self._stops.found:
            return ""
        shown = self._stops.push(rest)
        return shown if self._stops.found else shown + self._stops.flush()
