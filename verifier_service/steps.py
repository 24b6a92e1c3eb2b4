"""What a step asks of the engine and what it answers, as plain typed values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from graph_runtime.choice import Sampling
from splitspec.errors import SplitspecError
from splitspec.rows import RowFormat


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """What the engine serves and its limits, as the handshake tells it; fields as in the proto."""

    model_id: str
    model_hash: str
    tokenizer_hash: str
    vocab_size: int
    tap_layers: tuple[int, ...]
    row_formats: tuple[RowFormat, ...]
    """One a kind that is offered."""
    fused_model_hash: str
    """Empty where ROW_KIND_FUSED is not offered."""
    max_draft_count: int
    min_prefill_chunk: int
    max_prefill_chunk: int
    max_context_length: int
    slot_count: int
    precision: str
    runtime: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenItem:
    """Take a slot."""

    action: ClassVar[str] = "open"
    session_id: int
    sampling: Sampling
    row_kind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkItem:
    """Take a slot that starts with the first `length` committed positions of another session."""

    action: ClassVar[str] = "fork"
    session_id: int
    source_session_id: int
    length: int
    sampling: Sampling
    row_kind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillItem:
    """Run prompt tokens at [committed_length, committed_length + n)."""

    action: ClassVar[str] = "prefill"
    session_id: int
    committed_length: int
    token_ids: Sequence[int]
    final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyItem:
    """Verify the window [pending, d1..dK] at [committed_length, committed_length + K + 1)."""

    action: ClassVar[str] = "verify"
    session_id: int
    committed_length: int
    pending_token_id: int
    draft_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseItem:
    """Give the slot back, whatever length the peer believes: the session ends with it."""

    action: ClassVar[str] = "release"
    session_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedItem:
    """An item that could not be decoded."""

    action: ClassVar[str] = "refused"
    session_id: int
    error: SplitspecError


ModelItem = PrefillItem | VerifyItem
Item = OpenItem | ForkItem | ModelItem | ReleaseItem | RefusedItem


@dataclass(slots=True, kw_only=True)
class Committed:
    """Rows that an item committed: whole rows, raw little-endian bytes."""

    row_format: RowFormat
    start: int
    data: bytes


@dataclass(slots=True, kw_only=True)
class PrefillOutcome:
    """What a prefill item gave."""

    bonus_token_id: int | None
    """The prefill bonus; None after an inner chunk."""
    rows: Committed | None


@dataclass(slots=True, kw_only=True)
class VerifyOutcome:
    """What a verify item gave. Law L3: accepted_count + 1 rows are committed."""

    accepted_count: int
    bonus_token_id: int
    rows: Committed | None


@dataclass(slots=True, kw_only=True)
class ItemResult:
    """What happened to one item."""

    session_id: int
    committed_length: int = 0
    """After the item; after an error, as it was before."""
    outcome: PrefillOutcome | VerifyOutcome | None = None
    """None for open, fork, release, and after an error."""
    error: SplitspecError | None = None


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Results in the order of the items, and where the time went."""

    results: list[ItemResult]
    device_ns: int
    """Target passes and verification."""
    copy_ns: int
    """Committed rows to host bytes, fusing included where it was asked for."""
    pass_count: int
    """Target passes (law L5: one a round)."""
    row_bytes: int
    """Bytes of committed rows that were copied to the host."""
