"""What goes into the next step: every ready item of every session, within what services take."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Rank(IntEnum):
    """Order inside a step: free slots, take slots, decode, and prefill with what budget is left."""

    RELEASE = 0
    OPEN = 1
    DECODE = 2
    PREFILL = 3


@dataclass(frozen=True, slots=True)
class Trip:
    """One step's way: when it was sent and answered, and the seconds inside the service."""

    sent: float
    answered: float
    service: float


Answer = asyncio.Future[tuple[Any, Trip]]


class Ready:
    """An item that waits for the next step, or is in it. Nobody waits where `answer` is None."""

    __slots__ = ("answer", "cost", "item", "session")

    def __init__(self, session: int, item: Any, cost: int, answer: Answer | None) -> None:
        self.session = session
        self.item = item
        self.cost = cost
        self.answer = answer


class ReadyItems:
    """The items that wait, by rank."""

    def __init__(self) -> None:
        self._queues: tuple[deque[Ready], ...] = tuple(deque() for _ in Rank)

    def __bool__(self) -> bool:
        return any(self._queues)

    def add(self, rank: Rank, ready: Ready) -> None:
        """Let an item wait."""
        self._queues[rank].append(ready)

    def forget_open(self, session: int) -> bool:
        """Drop the session's open if it was not sent yet; return whether it was there."""
        opening = self._queues[Rank.OPEN]
        unsent = [ready for ready in opening if ready.session == session]
        for ready in unsent:
            opening.remove(ready)
        return bool(unsent)

    def clear(self) -> list[Ready]:
        """Drop and return everything."""
        dropped = [ready for queue in self._queues for ready in queue]
        for queue in self._queues:
            queue.clear()
        return dropped

    def take(self, *, item_limit: int, budget: int) -> list[Ready]:
        """Take the items of the next step.

        One decode or prefill item a session. Items with a cost go only within the budget, but one
        always fits. What is left stays at the front of its queue, and sessions come back at the
        end: they rotate.
        """
        batch: list[Ready] = []
        left = budget
        blocked: set[int] = set()
        for rank, queue in enumerate(self._queues):
            kept: list[Ready] = []
            for ready in queue:
                if ready.answer is not None and ready.answer.done():
                    continue  # cancelled: nobody waits for it any more
                single = rank >= Rank.DECODE
                fits = not ready.cost or ready.cost <= left or left == budget
                if len(batch) >= item_limit or (single and (ready.session in blocked or not fits)):
                    kept.append(ready)
                else:
                    batch.append(ready)
                    left -= ready.cost
                if single:
                    blocked.add(ready.session)
            queue.clear()
            queue.extend(kept)
        return batch
