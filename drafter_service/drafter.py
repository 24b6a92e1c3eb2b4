"""What every drafter implements, whatever it drafts with. One file a method; `METHODS` names them.

A drafter owns the draft model's state of `slot_count` slots and knows nothing of streams, sessions
or gRPC. Its step is packed: the works of many sessions share one model pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from splitspec.rows import RowFormat


class DraftSampling(Enum):
    """How draft tokens are picked from the draft's logits; never changes the text (law L4)."""

    METHOD_DEFAULT = "default"
    ARGMAX = "argmax"
    COUPLED = "coupled"


@dataclass(frozen=True, kw_only=True)
class SessionParameters:
    """What a session keeps from its opening: how the target samples, and how to draft for it."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Key of the target's noise, 64 bits. Means nothing at temperature 0."""
    draft_sampling: DraftSampling = DraftSampling.METHOD_DEFAULT


@dataclass(frozen=True, kw_only=True)
class DrafterInfo:
    """What a drafter is, what it needs from a target, and its limits. None accepts any target."""

    method: str
    model_id: str
    model_hash: str = ""
    vocab_size: int | None = None
    tokenizer_hash: str | None = None
    target_model_hash: str | None = None
    row_format: RowFormat
    tap_layers: tuple[int, ...] = ()
    max_draft_count: int
    max_context_length: int
    slot_count: int
    instant: bool
    """True: a step takes microseconds and runs on the event loop, where a hop to the engine's
    thread would cost more than the step. False for everything that runs a model."""


@dataclass(frozen=True, kw_only=True)
class DraftWork:
    """One session's part of a packed step: extend the context, then draft.

    The context held positions [0, start). `token_ids` and `rows` are those of [start, start + c);
    afterwards the context is [0, start + c), start + c being the committed length (law L2), and
    drafting happens from there: pending is at position start + c, d1 at start + c + 1.
    """

    slot: int
    parameters: SessionParameters
    start: int
    token_ids: Sequence[int]
    """c newly committed token ids; c may be 0."""
    rows: bytes | None
    """[c, row width] in the drafter's own row format, little-endian; None when it wants none or
    c is 0. Valid during the step only."""
    pending_token_id: int | None
    """Given when draft_count > 0."""
    draft_count: int
    """0: only extend."""


class Drafter(Protocol):
    """One loaded drafter. Used by one thread. Works are checked before they come here: an
    exception from any of these methods is a fault of the engine, not of a peer."""

    @property
    def info(self) -> DrafterInfo:
        """Return what is loaded."""
        ...

    @property
    def pass_count(self) -> int:
        """Return how many passes of a model steps have run since the load; 0 without a model."""
        ...

    def open(self, slot: int, parameters: SessionParameters) -> None:
        """Begin an empty context in a free slot."""
        ...

    def step(self, works: Sequence[DraftWork]) -> list[list[int]]:
        """Run one packed step; a slot appears at most once.

        Returns the draft tokens d1..dK' of each work, K' <= its draft_count, none for extend only.
        """
        ...

    def release(self, slot: int) -> None:
        """Forget a slot's context."""
        ...
