"""A DFlash draft that writes its steps down, and whose drafts can be foretold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from drafter_service.dflash import DFlashDrafter
from drafter_service.drafter import DrafterInfo, DraftSampling, DraftWork, SessionParameters
from graph_runtime.dflash.config import DFlashConfig
from graph_runtime.dflash.draft import BlockWork, ContextLengths
from graph_runtime.rope_config import RopeScaling
from splitspec.rows import RowFormat
from splitspec.v1 import rows_pb2

VOCAB = 1000
FUSED_BY_US = 7.0
"""What the fake's fusion adds beside a raw row, so that it can be told."""
CONFIG = DFlashConfig(
    layout="z-lab",
    hidden_size=5,
    target_hidden_size=4,
    intermediate_size=4,
    n_layers=1,
    n_heads=1,
    n_kv_heads=1,
    head_dim=2,
    rms_norm_eps=1e-5,
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    tap_layers=(1,),
    rope=RopeScaling(kind="default", theta=10000.0),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=True,
    block_size=8,
    mask_token_id=16,
    sample_from_anchor=False,
    sliding_windows=(None,),
    causal=(False,),
    embedding_scale=1.0,
    final_softcap=None,
)
FORMAT = RowFormat(
    kind=rows_pb2.ROW_KIND_RAW_TAPS, dtype=rows_pb2.ROW_DTYPE_FLOAT32, width=CONFIG.raw_row_width
)

Logits = Callable[[Sequence[Sequence[float]], int, int], torch.Tensor]
"""(features of the context, pending token id, K) -> logits [K, Vd]."""


def row(text: int, position: int) -> list[float]:
    """Return the raw row [4] of a position of a text."""
    return [float(text), float(position), 0.0, 0.0]


def feature(text: int, position: int) -> list[float]:
    """Return what the fake's fusion makes of it."""
    return [*row(text, position), FUSED_BY_US]


def rows(text: int, start: int, count: int) -> bytes:
    """Return raw rows as they cross the wire."""
    values = [row(text, start + i) for i in range(count)]
    return cast("bytes", torch.tensor(values).numpy().tobytes())


def foretold(text: int, length: int, pending: int, count: int) -> list[int]:
    """Return what the fake drafts after the first `length` positions of a text."""
    context = [feature(text, p) for p in range(length)]
    return foretold_of(context, pending, count)


def foretold_of(context: Sequence[Sequence[float]], pending: int, count: int) -> list[int]:
    """Return what the fake drafts after features [P, 5]."""
    return [_drafted(context, pending, k) for k in range(1, count + 1)]


def _drafted(context: Sequence[Sequence[float]], pending: int, k: int) -> int:
    digest = sum((p + 1) * int(31 * c[0] + 7 * c[1]) for p, c in enumerate(context))
    return (digest + 17 * pending + 101 * k + 3) % VOCAB


def _peaked(context: Sequence[Sequence[float]], pending: int, count: int) -> torch.Tensor:
    logits = torch.zeros(count, VOCAB)
    for k in range(1, count + 1):
        logits[k - 1, _drafted(context, pending, k)] = 1.0
    return logits


@dataclass
class RecordingDraft:
    """A block draft; what it drafts depends on every feature that it holds and on pending."""

    slot_count: int = 4
    max_context_length: int = 64
    config: DFlashConfig = CONFIG
    block_length: int = 8
    steps: list[list[BlockWork]] = field(default_factory=list)
    contexts: dict[int, list[list[float]]] = field(default_factory=dict)
    """slot -> the features that it was given, in order."""
    broken_slots: set[int] = field(default_factory=set)
    """Their logits are no numbers."""
    fault: Exception | None = None
    target_ids: torch.Tensor | None = None
    logits: Logits = _peaked
    model_hash: str = ""

    def __post_init__(self) -> None:
        most = self.config.max_draft_count(self.block_length)
        self._lengths = ContextLengths(self.slot_count, self.max_context_length, most)

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        assert rows.dtype == torch.float32
        assert rows.shape[1] == 4, "a fused row is no raw row"
        return torch.cat([rows, torch.full((len(rows), 1), FUSED_BY_US)], dim=1)

    def run(self, works: Sequence[BlockWork]) -> list[torch.Tensor]:
        if self.fault is not None:
            raise self.fault
        self._lengths.check(works)
        self._lengths.extend(works)
        self.steps.append(list(works))
        return [self._run(work) for work in works]

    def _run(self, work: BlockWork) -> torch.Tensor:
        context = self.contexts.setdefault(work.slot, [])
        if work.features is not None:
            context.extend(work.features.tolist())
        if work.draft_count == 0:
            return torch.zeros(0, VOCAB)
        assert work.pending_token_id is not None
        logits = self.logits(context, work.pending_token_id, work.draft_count)
        if work.slot in self.broken_slots:
            logits[-1, 5] = math.nan
        return logits

    def reset(self, slot: int) -> None:
        self._lengths.reset(slot)
        self.contexts.pop(slot, None)

    def length(self, slot: int) -> int:
        """Return how many positions the context of a slot holds."""
        return self._lengths.length(slot)

    def shapes(self) -> list[list[tuple[int, int, int, int]]]:
        """Return (slot, start, rows, K) of each work of each step."""
        return [
            [(w.slot, w.start, w.length - w.start, w.draft_count) for w in works]
            for works in self.steps
        ]


def drafter(
    draft: RecordingDraft,
    *,
    fused: bool = False,
    draft_sampling: DraftSampling = DraftSampling.ARGMAX,
) -> DFlashDrafter:
    """Return a drafter over the fake that wants raw rows, or fused ones."""
    row_format = FORMAT
    if fused:
        row_format = replace(FORMAT, kind=rows_pb2.ROW_KIND_FUSED, width=CONFIG.hidden_size)
    info = DrafterInfo(
        method="dflash",
        model_id="fake",
        vocab_size=VOCAB,
        row_format=row_format,
        tap_layers=draft.config.tap_layers,
        max_draft_count=draft.config.max_draft_count(draft.block_length),
        max_context_length=draft.max_context_length,
        slot_count=draft.slot_count,
        instant=False,
    )
    return DFlashDrafter(draft, info, draft_sampling)


def opened(draft: RecordingDraft, *slots: int, **fields: Any) -> DFlashDrafter:
    """Return a drafter with open slots."""
    made = drafter(draft, **fields)
    for slot in slots:
        made.open(slot, SessionParameters())
    return made


def work(
    slot: int,
    start: int,
    ids: Sequence[int],
    pending: int | None = None,
    count: int = 0,
    *,
    text: int | None = None,
) -> DraftWork:
    """Return a work whose rows are those of its positions in `text`, the slot's own by default."""
    return DraftWork(
        slot=slot,
        parameters=SessionParameters(),
        start=start,
        token_ids=ids,
        rows=rows(slot if text is None else text, start, len(ids)) if ids else None,
        pending_token_id=pending,
        draft_count=count,
    )
