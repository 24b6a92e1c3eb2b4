"""Both links of a coordinator: which peers are there, what they bound, and lanes on them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from coordinator import drafter, verifier
from coordinator.batching import Trip
from coordinator.config import CoordinatorConfig
from coordinator.drafter import DrafterPatience, NoDrafter, RemoteDrafter
from coordinator.handshake import DrafterCheck, VerifierCheck
from coordinator.requests import ServedLimits
from coordinator.steps import Dialect, LinkLimits, StepLink
from coordinator.verifier import RemoteVerifier, VerifierPatience
from splitspec.errors import ModelMismatch, NotReady
from splitspec.v1 import verifier_pb2

logger = logging.getLogger(__name__)

DRAFTER_STEP_SECONDS = 10.0
DRAFTER_STEP_BYTES = 16 * 1024 * 1024
"""Rows in one step of the drafter at most."""
DRAFTER_BACKOFF_SECONDS = 0.2
"""A drafter that loads longer than the verifier is found soon after it serves: an answer that began
without it has to be replayed for its rows."""
FIRST_DRAFTER_SECONDS = 1.0
"""How long a start waits for the drafter's handshake, to refuse a pair that does not fit. One that
comes later and does not fit is a warning: rounds stay target-only, and it is tried again."""

OnStep = Callable[[str, int, int, Trip], None]


class Links:
    """The verifier, and the drafter if there is one."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        tokenizer_hash: str,
        on_change: Callable[[], None],
        on_step: OnStep,
    ) -> None:
        self._config = config
        self._check = VerifierCheck(tokenizer_hash=tokenizer_hash)
        self._verifier_patience = VerifierPatience(
            reconnect_seconds=config.reconnect_seconds, slot_seconds=config.queue_seconds
        )
        self._drafter_patience = DrafterPatience(draft_seconds=config.draft_seconds)

        def link(
            dialect: Dialect, address: str, accept: Callable[[Any], None], limits: LinkLimits
        ) -> StepLink:
            return StepLink(
                dialect=dialect,
                address=address,
                limits=limits,
                accept=accept,
                on_change=on_change,
                on_step=lambda *step: on_step(dialect.peer, *step),
            )

        self.verifier = link(
            verifier.DIALECT,
            config.verifier,
            self._check,
            LinkLimits(step_seconds=config.step_seconds, step_budget=config.prefill_budget),
        )
        self.drafter: StepLink | None = None
        if config.drafter is not None:
            self.drafter = link(
                drafter.DIALECT,
                config.drafter,
                DrafterCheck(self._check),
                LinkLimits(
                    step_seconds=DRAFTER_STEP_SECONDS,
                    step_budget=DRAFTER_STEP_BYTES,
                    max_backoff_seconds=DRAFTER_BACKOFF_SECONDS,
                ),
            )

    async def connect(self) -> None:
        """Connect; return once the verifier is there and the drafter has had its chance.

        Raises:
            ModelMismatch: one of them does not fit.
        """
        self.verifier.start()
        await self.verifier.ready(None)
        if self.drafter is None:
            return
        self.drafter.start()
        try:
            await self.drafter.ready(FIRST_DRAFTER_SECONDS)
        except ModelMismatch:
            raise
        except NotReady as error:
            logger.warning("target-only until the drafter answers: %s", error.message)

    async def close(self) -> None:
        """End both streams."""
        await self.verifier.close()
        if self.drafter is not None:
            await self.drafter.close()

    @property
    def target(self) -> verifier_pb2.VerifierGetModelResponse:
        """Return the target, connected now or the last time.

        Raises:
            NotReady: no verifier has been seen.
        """
        if self._check.model is None:
            raise NotReady("no verifier has been connected yet")
        return self._check.model

    @property
    def draft_method(self) -> str:
        """Return how the connected drafter drafts; empty while none is connected."""
        link = self.drafter
        return link.model.method if link is not None and link.connected else ""

    def limits(self) -> ServedLimits:
        """Return what bounds a request."""
        target = self.target
        return ServedLimits(
            vocab_size=target.vocab_size,
            max_context_length=target.max_context_length,
            max_draft_count=target.max_draft_count,
            default_draft_count=min(self._config.draft_count, target.max_draft_count),
        )

    @contextmanager
    def lanes(self, draft_count: int) -> Iterator[tuple[RemoteVerifier, NoDrafter | RemoteDrafter]]:
        """Yield a session's lanes; when the block ends, however it ends, both slots are freed."""
        verifier_lane = RemoteVerifier(self.verifier, self._verifier_patience)
        drafter_lane: NoDrafter | RemoteDrafter = NoDrafter()
        if self.drafter is not None and draft_count:
            drafter_lane = RemoteDrafter(
                self.drafter, self._drafter_patience, self.target.vocab_size
            )
        try:
            yield verifier_lane, drafter_lane
        finally:
            verifier_lane.release()
            drafter_lane.release()


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and wait until its cleanup has run."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
