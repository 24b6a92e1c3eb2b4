"""Peers whose bytes are no message: the link is lost and comes back, the answer holds (L4)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator import drafter, verifier
from coordinator.batching import Trip
from coordinator.steps import LinkLimits, StepLink
from splitspec.v1.drafter_pb2_grpc import add_DrafterServicer_to_server
from splitspec.v1.verifier_pb2_grpc import add_VerifierServicer_to_server
from tests.coordinator.fakes.drafter import FakeDrafter
from tests.coordinator.fakes.peer import Peer
from tests.coordinator.fakes.stand import PROMPT, Stand, request, stand
from tests.coordinator.fakes.target import continuation
from tests.coordinator.fakes.verifier import FakeVerifier

NO_MESSAGE = b"\xff"
ADD: dict[type[Peer], Any] = {
    FakeVerifier: add_VerifierServicer_to_server,
    FakeDrafter: add_DrafterServicer_to_server,
}
PEERS = pytest.mark.parametrize("peer", [FakeVerifier, FakeDrafter])


class SpoilingServer:
    """A server whose answers are no messages as often as `spoilt` says, by method."""

    def __init__(self, server: grpc.aio.Server, spoilt: Counter[str]) -> None:
        self._server = server
        self._spoilt = spoilt

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Leave them out: the registered ones come next."""

    def add_registered_method_handlers(self, service: str, methods: dict[str, Any]) -> None:
        """Add every method with a serializer of ours."""
        spoiling = {
            name: method._replace(
                response_serializer=partial(self._serialize, name, method.response_serializer)
            )
            for name, method in methods.items()
        }
        handler = grpc.method_handlers_generic_handler(service, spoiling)
        self._server.add_generic_rpc_handlers((handler,))

    def _serialize(self, name: str, serialize: Callable[[Any], bytes], message: Any) -> bytes:
        if name == "RunSteps" and self._spoilt["sound"] > 0:
            self._spoilt["sound"] -= 1
        elif self._spoilt[name] > 0:
            self._spoilt[name] -= 1
            return NO_MESSAGE
        return serialize(message)


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch, peer: type[Peer]) -> Counter[str]:
    """How many answers of `peer` are still to be spoilt, by method; `sound` steps go first."""
    left: Counter[str] = Counter()

    def add(servicer: Any, server: grpc.aio.Server) -> None:
        ADD[peer](servicer, SpoilingServer(server, left))

    monkeypatch.setattr(peer, "add_to_server", staticmethod(add))
    return left


def _peer(s: Stand, peer: type[Peer]) -> Peer:
    found = s.verifier if peer is FakeVerifier else s.drafter
    assert found is not None
    return found


@PEERS
async def test_l4_any_answer_to_a_step_may_be_undecodable(spoilt: Counter[str]) -> None:
    async with stand(drafter="coin-flip") as s:
        for sound in range(8):
            spoilt.update({"RunSteps": 1, "sound": sound})
            answer = await asyncio.wait_for(s.generate(max_tokens=60, draft_count=1), 20)
            assert answer.token_ids == continuation(PROMPT, None, 60)
            assert not +spoilt
            await s.settle()
            async with asyncio.timeout(5):
                while not (await s.generate(max_tokens=9)).statistics.draft_token_count:
                    await asyncio.sleep(0.01)
            await s.wait_serving()


@PEERS
async def test_a_handshake_that_is_undecodable_is_tried_again(
    peer: type[Peer], spoilt: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with stand() as s:
        spoilt["GetModel"] = 2
        _peer(s, peer).die()
        async with asyncio.timeout(10):
            while +spoilt:
                await asyncio.sleep(0.01)
        await s.wait_serving()
        answer = await s.generate(max_tokens=20)
        assert answer.token_ids == continuation(PROMPT, None, 20)
        async with asyncio.timeout(10):
            while not (await s.generate(max_tokens=9)).statistics.draft_token_count:
                await asyncio.sleep(0.01)
    lines = [r.getMessage() for r in caplog.records if r.name == "coordinator.steps"]
    assert sum("handshake's answer is undecodable" in line for line in lines) == 1


@pytest.mark.parametrize("peer", [FakeVerifier])
async def test_a_verifier_that_never_makes_sense_fails_the_request_in_time(
    spoilt: Counter[str],
) -> None:
    async with stand(reconnect_seconds=0.3) as s:
        spoilt["RunSteps"] = spoilt["GetModel"] = 1000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.stub.Generate(request(max_tokens=5), timeout=20).read()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await s.wait_serving(False)
        spoilt.clear()
        await s.wait_serving()
        assert (await s.generate(max_tokens=5)).token_ids == continuation(PROMPT, None, 5)


@PEERS
@pytest.mark.parametrize("method", ["GetModel", "RunSteps"])
async def test_error_details_that_are_undecodable_are_a_loss_like_any_other(
    peer: type[Peer], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stand() as s:
        honest = getattr(peer, method)
        left = [2]

        async def abort(context: Any) -> None:
            left[0] -= 1
            details = (("grpc-status-details-bin", NO_MESSAGE),)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no", details)

        async def get_model(self: Any, request: Any, context: Any) -> Any:
            if left[0]:
                await abort(context)
            return await honest(self, request, context)

        async def run_steps(self: Any, requests: Any, context: Any) -> Any:
            if left[0]:
                await abort(context)
            async for reply in honest(self, requests, context):
                yield reply

        monkeypatch.setattr(peer, method, get_model if method == "GetModel" else run_steps)
        _peer(s, peer).die()
        async with asyncio.timeout(10):
            while left[0]:
                await asyncio.sleep(0.01)
        await s.wait_serving()
        assert (await s.generate(max_tokens=20)).token_ids == continuation(PROMPT, None, 20)


@pytest.mark.parametrize("dialect", [verifier.DIALECT, drafter.DIALECT])
async def test_a_bug_of_ours_loses_the_link_and_is_logged_once_and_the_link_comes_back(
    tmp_path: Path, dialect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    peer: Peer = (
        FakeVerifier(tmp_path, "t") if dialect is verifier.DIALECT else FakeDrafter(tmp_path)
    )
    await peer.start()
    bugs = {"accept": 2, "step": 0}

    def fail(where: str) -> None:
        if bugs[where]:
            bugs[where] -= 1
            raise ZeroDivisionError("oh")

    def on_step(sent: int, received: int, trip: Trip) -> None:
        del sent, received, trip
        fail("step")

    link = StepLink(
        dialect=dialect,
        address=peer.address,
        limits=LinkLimits(),
        accept=lambda _: fail("accept"),
        on_step=on_step,
    )
    link.start()
    try:
        epoch = await link.ready(5)
        assert sum(record.exc_info is not None for record in caplog.records) == 1
        bugs["step"] = 1
        link.release(epoch, 7, _release(dialect))
        async with asyncio.timeout(5):
            while link.epoch == epoch:
                await asyncio.sleep(0.01)
        assert link.connected
        assert [r.levelno for r in caplog.records if r.exc_info] == [logging.ERROR] * 2
    finally:
        await link.close()
        await peer.close()


def _release(dialect: Any) -> Any:
    request = dialect.step_request()
    item = request.items.add(session=7)
    item.release.SetInParent()
    return item
