"""Three real processes on unix sockets in one temporary folder, and a client for them.

Every process is started in its own group and ended by its id.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitspec.channels import CLIENT_OPTIONS
from splitspec.v1 import generation_pb2 as pb
from splitspec.v1 import generation_pb2_grpc

ROOT = Path(__file__).parents[2]
START_LIMIT_SECONDS = 300.0
CALL_LIMIT_SECONDS = 120.0
WAIT_LIMIT_SECONDS = 60.0


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait until `holds()`; `what` says what is waited for."""
    limit = time.monotonic() + WAIT_LIMIT_SECONDS
    while not holds():
        assert time.monotonic() < limit, f"waited in vain: {what}"
        time.sleep(0.01)


def free_address() -> str:
    """Return a TCP address whose port was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def scrape(metrics_address: str) -> dict[str, float]:
    """Return a process's metrics by name and labels."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=20) as page:
        lines = page.read().decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples}


@dataclass(frozen=True)
class Gate:
    """Holds the passes of a verifier that was started gated; see tests/gated_verifier.py."""

    folder: Path

    def hold(self, position: int) -> None:
        """Let no pass begin that starts at `position` or beyond."""
        # A pass that `open` let through may have said once more that it waits.
        (self.folder / "held").unlink(missing_ok=True)
        # Renamed into place: the verifier never reads half a number.
        (self.folder / "next").write_text(str(position))
        (self.folder / "next").rename(self.folder / "hold")

    def wait_held(self, position: int) -> None:
        """Wait until a pass waits at `position`."""
        held = self.folder / "held"
        wait_until(lambda: held.exists() and held.read_text() == str(position), f"pass {position}")

    def open(self) -> None:
        """Let everything through."""
        (self.folder / "held").unlink(missing_ok=True)
        (self.folder / "fault").unlink(missing_ok=True)
        (self.folder / "hold").unlink(missing_ok=True)

    def fail(self) -> None:
        """Break the device in the pass that is held."""
        (self.folder / "fault").touch()


@dataclass
class Answer:
    """One finished generation."""

    token_ids: list[int]
    text: str
    finish: pb.Finish


@dataclass
class Answering:
    """A request that runs, and its answer once it is over."""

    answer: Answer | None = None

    @property
    def result(self) -> Answer:
        """Return the answer."""
        assert self.answer is not None
        return self.answer


@dataclass
class Cluster:
    """A verifier, a coordinator, and any number of drafters; `coordinator-NAME` talks to `NAME`."""

    folder: Path
    model: Path
    verifier_flags: list[str]
    cache_dir: Path
    gated: bool = False
    """Whether the verifier's passes can be held; see `gate`."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)
    channels: dict[str, grpc.Channel] = field(default_factory=dict)

    def address(self, name: str) -> str:
        """Return the socket that the process `name` serves on."""
        return f"unix:{self.folder}/{name}.sock"

    @property
    def gate(self) -> Gate:
        """Return what holds the verifier's passes."""
        assert self.gated
        return Gate(self.folder / "gate")

    def start_verifier(self, name: str = "verifier", *more: str, wait: bool = True) -> None:
        """Start the verifier (with `more` flags) and wait until it serves."""
        flags = ["--model", str(self.model), "--cache-dir", str(self.cache_dir)]
        module = ["-m", "verifier_service"]
        if self.gated:
            self.gate.folder.mkdir(exist_ok=True)
            module = [str(ROOT / "tests" / "gated_verifier.py"), str(self.gate.folder)]
        command = [sys.executable, *module, "serve", *flags, *self.verifier_flags, *more]
        self.start(name, [*command, "--address", self.address(name)], wait=wait)

    def start_ngram(self, name: str = "ngram", *flags: str) -> None:
        """Start the ngram drafter."""
        command = [sys.executable, "-m", "drafter_service", "serve", "--draft", "ngram"]
        self.start(name, [*command, "--address", self.address(name), *flags])

    def start_fake_drafter(
        self, kind: str, continuations: dict[tuple[int, ...], list[int]], *flags: str
    ) -> None:
        """Start a drafter that knows the true continuations and drafts as `kind` says."""
        file = self.folder / f"{kind}.json"
        file.write_text(
            json.dumps([{"prompt": list(k), "tokens": v} for k, v in continuations.items()])
        )
        command = [sys.executable, str(ROOT / "tests" / "drafters.py"), "--kind", kind]
        command += ["--continuations", str(file), *flags]
        self.start(kind, [*command, "--address", self.address(kind)])

    def start_eagle3(self, name: str, head: Path, *flags: str, **fields: Any) -> None:
        """Start an EAGLE-3 drafter, or a variant of it; `fields`: see `_start_model_drafter`."""
        self._start_model_drafter("eagle3", name, head, flags, **fields)

    def start_dflash(self, name: str, draft: Path, *flags: str, **fields: Any) -> None:
        """Start a DFlash drafter, or a variant of it; `fields`: see `_start_model_drafter`."""
        self._start_model_drafter("dflash", name, draft, flags, **fields)

    def _start_model_drafter(
        self,
        method: str,
        name: str,
        draft: Path,
        flags: Sequence[str],
        *,
        target: Path | None = None,
        variant: str | None = None,
        wait: bool = True,
    ) -> None:
        """Start a drafter of `method`, or a variant of it (tests/METHOD_drafters.py).

        Without another `target` it drafts for the cluster's model.
        """
        module = ["-m", "drafter_service"]
        if variant is not None:
            report = str(self.folder / f"{name}.jsonl")
            module = [str(ROOT / "tests" / f"{method}_drafters.py"), variant, report]
        command = [sys.executable, *module, "serve", "--draft", method]
        command += ["--draft-model", str(draft), "--target", str(target or self.model)]
        command += ["--cache-dir", str(self.cache_dir), "--address", self.address(name), *flags]
        self.start(name, command, wait=wait)

    def start_coordinator(
        self,
        drafter: str | None,
        *flags: str,
        verifier: str = "verifier",
        name: str | None = None,
        wait: bool = True,
    ) -> str:
        """Start a coordinator for `drafter` (None: target-only) and return its name."""
        name = name or f"coordinator-{drafter or 'target'}"
        command = [sys.executable, "-m", "coordinator", "serve", "--model", str(self.model)]
        command += ["--verifier", self.address(verifier), "--cache-dir", str(self.cache_dir)]
        if drafter is not None:
            command += ["--drafter", self.address(drafter)]
        self.start(name, [*command, "--address", self.address(name), *flags], wait=wait)
        return name

    def start(self, name: str, command: list[str], *, wait: bool = True) -> None:
        """Start (or restart) a process and wait until its health is SERVING, or do not wait."""
        self.commands[name] = command
        log = (self.folder / f"{name}.log").open("ab")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes[name] = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=ROOT, env=environment, start_new_session=True
        )
        log.close()
        if wait:
            self.wait_serving(name)

    def restart(self, name: str, *, wait: bool = True) -> None:
        """Start a process again as it was started first."""
        self.start(name, self.commands[name], wait=wait)

    def restart_missing(self) -> None:
        """Start again what a test has ended and not restarted: it failed, the next one need not."""
        for name in self.commands:
            process = self.processes.get(name)
            if process is None or process.poll() is not None:
                self.restart(name)

    def kill(self, name: str) -> None:
        """End a process with SIGKILL, as a crash would, and reap it."""
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def ended(self, name: str) -> int:
        """Wait until a process ends by itself; return its exit code."""
        code = self.processes[name].wait(WAIT_LIMIT_SECONDS)
        del self.processes[name]
        return code

    def log(self, name: str) -> str:
        """Return what the process has printed."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def channel(self, name: str) -> grpc.Channel:
        """Return a channel to the process, opened once."""
        if name not in self.channels:
            self.channels[name] = grpc.insecure_channel(self.address(name), options=CLIENT_OPTIONS)
        return self.channels[name]

    def wait_serving(self, name: str) -> None:
        """Wait for health SERVING; a process that ended first is an error with its log."""
        limit = time.monotonic() + START_LIMIT_SECONDS
        stub = health_pb2_grpc.HealthStub(self.channel(name))
        while time.monotonic() < limit:
            if self.processes[name].poll() is not None:
                raise RuntimeError(f"{name} ended at start: {self.log(name)[-2000:]}")
            with suppress(grpc.RpcError):
                reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(0.05)
        raise TimeoutError(f"{name} does not serve: {self.log(name)[-2000:]}")

    def wait_all_serving(self) -> None:
        """Wait for every process that was started without waiting, and for its drafter."""
        for name in self.processes:
            self.wait_serving(name)
        for name, command in self.commands.items():
            if name in self.processes and "--drafter" in command:
                self.wait_drafter(name, connected=True)

    def wait_not_serving(self, name: str) -> None:
        """Wait until a process that drains says NOT_SERVING, or takes no new connection."""
        stub = health_pb2_grpc.HealthStub(self.channel(name))

        def serves() -> bool:
            try:
                reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
            except grpc.RpcError as error:
                # CANCELLED: the server's stop came between the call and its answer.
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    raise
                return False
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

        wait_until(lambda: not serves(), f"{name} not serving")

    def wait_drafter(self, coordinator: str, *, connected: bool) -> None:
        """Wait until the coordinator has a drafter, or knows that it has lost it."""
        stub = self.stub(coordinator)
        wait_until(
            lambda: bool(stub.GetModel(pb.GenerationGetModelRequest()).draft_method) == connected,
            f"drafter connected: {connected}",
        )

    def stub(self, coordinator: str) -> generation_pb2_grpc.GenerationStub:
        """Return a client of a coordinator."""
        return generation_pb2_grpc.GenerationStub(self.channel(coordinator))

    def generate(
        self, coordinator: str, on_response: Callable[[int], None] | None = None, **fields: Any
    ) -> Answer:
        """Run one request; `on_response` is told how many tokens have come so far."""
        ids: list[int] = []
        text: list[str] = []
        request = pb.GenerateRequest(**fields)
        for reply in self.stub(coordinator).Generate(request, timeout=CALL_LIMIT_SECONDS):
            ids.extend(reply.token_ids)
            text.append(reply.text_delta)
            if on_response is not None:
                on_response(len(ids))
            if reply.HasField("finish"):
                return Answer(ids, "".join(text), reply.finish)
        raise AssertionError("the stream ended without a finish")

    @contextmanager
    def answering(self, coordinator: str, hold: int, **fields: Any) -> Iterator[Answering]:
        """Run a request whose pass at position `hold` waits while the block runs.

        The answer is there after the block.
        """
        answering = Answering()
        with ThreadPoolExecutor(1) as pool:
            self.gate.hold(hold)
            try:
                future = pool.submit(self.generate, coordinator, **fields)
                self.gate.wait_held(hold)
                yield answering
            finally:
                self.gate.open()
            answering.answer = future.result()

    def close(self) -> None:
        """End everything."""
        for channel in self.channels.values():
            channel.close()
        for name in list(self.processes):
            self.kill(name)


def running_cluster(
    folder: Path, model: Path, verifier_flags: list[str], cache_dir: Path, *, gated: bool = False
) -> Iterator[Cluster]:
    """Yield a cluster with a verifier and the ngram drafter; end it whatever happens."""
    cluster = Cluster(folder, model, verifier_flags, cache_dir, gated)
    try:
        cluster.start_verifier()
        cluster.start_ngram()
        yield cluster
    finally:
        cluster.close()
