"""A coordinator between fake peers, in this process, and a client for it."""

from __future__ import annotations

import asyncio
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.config import CoordinatorConfig
from coordinator.server import serve_coordinator
from coordinator.text import ModelText
from splitspec.channels import CLIENT_OPTIONS
from splitspec.serving import Lifecycle
from splitspec.v1 import generation_pb2 as pb
from splitspec.v1.generation_pb2_grpc import GenerationStub
from tests.coordinator.fakes.drafter import FakeDrafter
from tests.coordinator.fakes.verifier import FakeVerifier
from tests.tiny import write_tiny_tokenizer

PROMPT = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]


@dataclass
class Answer:
    """One finished generation."""

    token_ids: list[int]
    text: str
    finish: pb.Finish

    @property
    def statistics(self) -> pb.GenerationStatistics:
        return self.finish.statistics


@dataclass
class Stand:
    """Everything a test talks to."""

    folder: Path
    verifier: FakeVerifier
    drafter: FakeDrafter | None
    channel: grpc.aio.Channel
    lifecycle: Lifecycle
    serving: asyncio.Task[None]
    metrics_address: str | None = None

    @property
    def stub(self) -> GenerationStub:
        return GenerationStub(self.channel)

    async def generate(
        self, on_tokens: Callable[[int], None] | None = None, **fields: Any
    ) -> Answer:
        """Run one request to its end; the default prompt is PROMPT."""
        ids: list[int] = []
        text: list[str] = []
        finish = None
        async for reply in self.stub.Generate(request(**fields), timeout=30):
            assert finish is None, "a response after the last one"
            ids += reply.token_ids
            text.append(reply.text_delta)
            assert reply.token_ids or reply.text_delta or reply.HasField("finish")
            if on_tokens is not None:
                on_tokens(len(ids))
            finish = reply.finish if reply.HasField("finish") else None
        assert finish is not None
        return Answer(ids, "".join(text), finish)

    async def serves(self) -> bool:
        """Return what health says."""
        health = health_pb2_grpc.HealthStub(self.channel)
        reply = await health.Check(health_pb2.HealthCheckRequest())
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def wait_serving(self, serving: bool = True) -> None:
        """Wait until health says so."""
        async with asyncio.timeout(5):
            while await self.serves() != serving:
                await asyncio.sleep(0.01)

    async def wait_metric(self, name: str, value: float) -> None:
        """Wait until the coordinator, which has a metrics address, reports `value`."""

        def reported() -> float:
            with urllib.request.urlopen(f"http://{self.metrics_address}/metrics") as page:
                lines = page.read().decode().splitlines()
            return float(next(s.split()[1] for s in lines if s.startswith(f"{name} ")))

        async with asyncio.timeout(10):
            while await asyncio.to_thread(reported) != value:
                await asyncio.sleep(0.005)

    async def settle(self, seconds: float = 1.0) -> None:
        """Wait until no slot is held at either peer (law L7)."""
        async with asyncio.timeout(seconds):
            while self.verifier.session_count or (self.drafter and self.drafter.session_count):
                await asyncio.sleep(0.005)


def request(**fields: Any) -> pb.GenerateRequest:
    """Return a request; `prompt` is a list of token ids."""
    if not {"text", "conversation", "token_ids"} & set(fields):
        fields["token_ids"] = pb.TokenIds(ids=fields.pop("prompt", PROMPT))
    return pb.GenerateRequest(**{"ignore_eos": True, **fields})


@asynccontextmanager
async def stand(
    *,
    drafter: str | None = "right",
    wants_rows: bool = False,
    late_drafter: bool = False,
    verifier_model: dict[str, Any] | None = None,
    drafter_model: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Stand]:
    """Run fake peers and a real coordinator on unix sockets in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="co") as name:
        folder = Path(name)
        write_tiny_tokenizer(folder)
        (folder / "config.json").write_text('{"eos_token_id": 2, "vocab_size": 300}')
        text = ModelText.load(folder)
        fake_verifier = FakeVerifier(
            folder, **{"tokenizer_hash": text.tokenizer_hash, **(verifier_model or {})}
        )
        fake_drafter = None
        await fake_verifier.start()
        if drafter is not None:
            fake_drafter = FakeDrafter(
                folder, kind=drafter, wants_rows=wants_rows, **(drafter_model or {})
            )
            if not late_drafter:
                await fake_drafter.start()
        settings: dict[str, Any] = {
            "model": str(folder),
            "verifier": fake_verifier.address,
            "drafter": fake_drafter.address if fake_drafter else None,
            "address": f"unix:{folder}/c.sock",
            "cache_dir": folder,
            "reconnect_seconds": 5.0,
        }
        lifecycle = Lifecycle()
        ready = asyncio.Event()
        serving = asyncio.create_task(
            serve_coordinator(
                CoordinatorConfig(**{**settings, **config}),
                lifecycle,
                on_ready=lambda _: ready.set(),
            )
        )
        try:
            async with grpc.aio.insecure_channel(
                settings["address"], options=CLIENT_OPTIONS
            ) as channel:
                waiting = asyncio.create_task(ready.wait())
                await asyncio.wait({waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if serving.done():
                    serving.result()
                metrics_address = config.get("metrics_address")
                yield Stand(
                    folder,
                    fake_verifier,
                    fake_drafter,
                    channel,
                    lifecycle,
                    serving,
                    metrics_address,
                )
        finally:
            fake_verifier.gate.set()
            lifecycle.drain()
            await asyncio.wait({serving}, timeout=10)
            if fake_drafter is not None:
                await fake_drafter.close()
            await fake_verifier.close()
        if fake_drafter is not None:
            assert fake_drafter.problems == []
