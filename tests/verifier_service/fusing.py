"""A verifier's engine on a tiny target, with the projection of a draft, as `serve` builds it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from graph_runtime.choice import Sampling
from splitspec.v1 import rows_pb2
from verifier_service.__main__ import load_engine
from verifier_service.config import VerifierConfig
from verifier_service.sessions import StreamSessions
from verifier_service.steps import (
    OpenItem,
    PrefillItem,
    PrefillOutcome,
    StepResult,
    VerifyItem,
    VerifyOutcome,
)

NONE = rows_pb2.ROW_KIND_NONE
PROMPT = [10, 200, 30, 4, 50, 60, 7, 80, 90, 100, 11]


def config(model: Path, fuse_for: Path | None, cache: Path, **fields: Any) -> VerifierConfig:
    return VerifierConfig(
        **{
            "model": str(model),
            "runtime": "torch",
            "cache_dir": cache,
            "slot_count": 4,
            "max_context_length": 64,
            "max_prefill_chunk": 16,
            "fuse_for": fuse_for,
            **fields,
        }
    )


class Rig:
    """An engine on a tiny target, as `serve` builds it, and one stream."""

    def __init__(self, model: Path, fuse_for: Path | None, cache: Path, **fields: Any) -> None:
        self.engine = load_engine(
            config(model, fuse_for, cache, **fields), model, threading.Event()
        )
        self.stream = StreamSessions()

    def run(self, *items: Any) -> StepResult:
        return self.engine.run_step(self.stream, items)

    def open(self, session: int, kind: int) -> None:
        (result,) = self.run(
            OpenItem(session_id=session, sampling=Sampling(), row_kind=kind)
        ).results
        assert result.error is None, result.error

    def prompt(self, session: int, kind: int, chunk: int = 16) -> tuple[int, bytes]:
        """Open a session, prefill PROMPT in chunks; return the bonus and the rows."""
        self.open(session, kind)
        data = b""
        for at in range(0, len(PROMPT), chunk):
            part = PROMPT[at : at + chunk]
            outcome = self.run(prefilling(session, at, part)).results[0].outcome
            assert isinstance(outcome, PrefillOutcome)
            data += outcome.rows.data if outcome.rows is not None else b""
        assert outcome.bonus_token_id is not None
        return outcome.bonus_token_id, data

    def continuation(self, count: int) -> list[int]:
        """Return the target's own tokens after PROMPT, one a window."""
        tokens = [self.prompt(99, NONE)[0]]
        while len(tokens) < count:
            item = verifying(99, len(PROMPT) + len(tokens) - 1, tokens[-1])
            tokens.append(verified(self.run(item)).bonus_token_id)
        self.engine.release_all(self.stream)
        return tokens


def prefilling(session: int, at: int, part: Sequence[int]) -> PrefillItem:
    return PrefillItem(
        session_id=session,
        committed_length=at,
        token_ids=part,
        final=at + len(part) == len(PROMPT),
    )


def verifying(session: int, length: int, pending: int, drafts: Sequence[int] = ()) -> VerifyItem:
    return VerifyItem(
        session_id=session,
        committed_length=length,
        pending_token_id=pending,
        draft_token_ids=drafts,
    )


def verified(step: StepResult, index: int = 0) -> VerifyOutcome:
    outcome = step.results[index].outcome
    assert isinstance(outcome, VerifyOutcome), step.results[index]
    return outcome


def values(data: bytes, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(-1, width)
