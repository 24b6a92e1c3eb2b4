"""A child process for tests of the terminal side: gRPC health and a Generation service.

Run as `python -m tests.coordinator.fake_service MODE --address A ...`; knows no model.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from splitspec.v1 import generation_pb2, generation_pb2_grpc

WORDS = ["héllo ", "wörld ", "again "]


class FakeGeneration(generation_pb2_grpc.GenerationServicer):
    """Streams WORDS for any prompt, forever or not to the end when the prompt says so."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.cancelled = threading.Event()

    def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generation_pb2.GenerateResponse]:
        """Answer, or refuse a draft_count of 1000."""
        self.requests.append(request)
        context.add_callback(self.cancelled.set)
        if request.draft_count == 1000:
            refusal = "draft_count is 1000; expected 0..7"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, refusal)
        if request.HasField("max_tokens") and request.max_tokens == 99:
            context.abort(grpc.StatusCode.INTERNAL, "the engine\nfailed")
        prompt = request.text or request.conversation.messages[-1].content
        for i, word in enumerate(WORDS):
            yield generation_pb2.GenerateResponse(token_ids=[i], text_delta=word)
        if prompt == "break off":
            context.abort(grpc.StatusCode.UNAVAILABLE, "the verifier was lost")
        while prompt == "forever" and context.is_active():
            yield generation_pb2.GenerateResponse(token_ids=[7], text_delta="more ")
            time.sleep(0.02)
        yield generation_pb2.GenerateResponse(finish=_finish(request))


def _finish(request: generation_pb2.GenerateRequest) -> generation_pb2.Finish:
    target_only = request.HasField("draft_count") and request.draft_count == 0
    statistics = generation_pb2.GenerationStatistics(
        output_token_count=3,
        round_count=2 if target_only else 1,
        draft_token_count=0 if target_only else 4,
        accepted_token_count=0 if target_only else 1,
        tokens_per_second=10.0 if target_only else 25.0,
        mean_acceptance_length=1.0 if target_only else 2.0,
        draft_method="" if target_only else "ngram",
    )
    statistics.time_to_first_token.FromMilliseconds(210)
    return generation_pb2.Finish(
        reason=generation_pb2.FINISH_REASON_STOP, seed=11, statistics=statistics
    )


def fake_server(address: str, generation: FakeGeneration) -> grpc.Server:
    """Return a started server at `address` that reports SERVING."""
    server = grpc.server(ThreadPoolExecutor(4))
    probe = health.HealthServicer()
    probe.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(probe, server)
    generation_pb2_grpc.add_GenerationServicer_to_server(generation, server)
    assert server.add_insecure_port(address)
    server.start()
    return server


def _refuse() -> None:
    print("loading\nerror: cannot listen there: in use", file=sys.stderr)
    sys.exit(2)


def _crash() -> None:
    raise ValueError("a bug [not a colour]")


def _stay_silent() -> None:
    print("exporting: 40%\rexporting: 41%", file=sys.stderr, flush=True)
    time.sleep(60)


def _ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _have_a_child() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(sys.argv[sys.argv.index("--pid-file") + 1]).write_text(str(child.pid))


MODES: dict[str, Callable[[], None]] = {
    "serve": lambda: None,
    "refuse": _refuse,
    "crash": _crash,
    "silent": _stay_silent,
    "stubborn": _ignore_sigterm,
    "parent": _have_a_child,
}


if __name__ == "__main__":
    MODES[sys.argv[1]]()
    server = fake_server(sys.argv[sys.argv.index("--address") + 1], FakeGeneration())
    print("arguments:", *sys.argv[1:], flush=True)
    server.wait_for_termination()
