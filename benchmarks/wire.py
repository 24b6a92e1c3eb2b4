"""What a round costs besides the models: coordinator and wire, for 1, 8 and 32 sessions.

    python benchmarks/wire.py [--model smollm2-135m]

Real coordinator, real ngram drafter and a real verifier around a target that costs nothing, as
three processes on unix sockets. Overhead a round is the round's time less what the two services
report for themselves. The floor is measured in the same run: two round trips of 60 bytes over a
bare gRPC stream between two processes, hot, and after 15 ms of rest as in a round with a real
target. Prints a table for people, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import grpc
import uvloop

from coordinator.chat import Question, ask
from coordinator.launch import ServiceCommand, new_log_dir, services
from splitspec.channels import CLIENT_OPTIONS, SERVER_OPTIONS
from splitspec.folders import DEFAULT_CACHE_DIR, model_folder

PHASES = ("draft", "verify", "wire", "coordinator")
SESSION_COUNTS = (1, 8, 32)
HOPS = 2
REST_SECONDS = 0.015
ECHO = "/splitspec.benchmark/Echo"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-count", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR)
    parser.add_argument("--serve-echo", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve_echo:
        uvloop.run(_serve_echo(args.serve_echo))
        return 0
    folder = model_folder(args.model, args.cache_dir)
    with (
        tempfile.TemporaryDirectory(prefix="splitspec-") as sockets,
        services(
            _commands(folder, Path(sockets)),
            log_dir=new_log_dir(args.cache_dir),
            timeout_seconds=60,
        ) as children,
    ):
        address = children[-1].command.address
        before = _floor(sockets)
        rows = [_measure(address, count, args) for count in SESSION_COUNTS]
        after = _floor(sockets)
    floor = {kind: (before[kind] + after[kind]) / 2 for kind in before}
    print(f"{'sessions':>9}{'rounds':>8}{'round ms':>10}" + "".join(f"{p:>13}" for p in PHASES))
    for row in rows:
        cells = "".join(f"{row[f'{phase}_ms']:>13.3f}" for phase in PHASES)
        print(f"{row['sessions']:>9}{row['rounds']:>8}{row['round_ms']:>10.3f}{cells}")
    overhead = rows[0]["overhead_ms"]
    print(f"overhead a round for one session: {overhead:.3f} ms (budget 0.6)")
    print(
        f"floor, {HOPS} bare round trips: {floor['hot']:.3f} ms hot, {floor['rested']:.3f} rested"
    )
    print(f"overhead / hot floor: {overhead / floor['hot']:.2f}")
    result = {"benchmark": "wire", "draft_count": args.draft_count, "floor_ms": floor, "rows": rows}
    print(json.dumps(result))
    return 0


def _floor(sockets: str) -> dict[str, float]:
    """Return the median milliseconds of two bare round trips, hot and after a rest."""
    address = f"unix:{sockets}/echo"
    server = subprocess.Popen([sys.executable, __file__, "--serve-echo", address])
    try:
        return uvloop.run(_echo_times(address))
    finally:
        server.kill()
        server.wait()


async def _echo_times(address: str) -> dict[str, float]:
    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        call = channel.stream_stream(ECHO)()
        hot = [await _round_trip(call) for _ in range(600)][100:]
        rested = []
        for _ in range(100):
            await asyncio.sleep(REST_SECONDS)
            rested.append(await _round_trip(call))
        call.cancel()
    return {
        "hot": 1e3 * HOPS * statistics.median(hot),
        "rested": 1e3 * HOPS * statistics.median(rested),
    }


async def _round_trip(call: grpc.aio.StreamStreamCall) -> float:
    started = perf_counter()
    await call.write(bytes(60))
    await call.read()
    return perf_counter() - started


async def _serve_echo(address: str) -> None:
    async def echo(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    _, service, method = ECHO.split("/")
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


def _commands(folder: Path, sockets: Path) -> list[ServiceCommand]:
    address = {name: f"unix:{sockets}/{name}" for name in ("drafter", "verifier", "coordinator")}
    script = str(Path(__file__).with_name("instant_verifier.py"))
    peers = ("--verifier", address["verifier"], "--drafter", address["drafter"])
    arguments = {
        "drafter": ("-m", "drafter_service", "serve", "--address", address["drafter"]),
        "verifier": (script, str(folder), address["verifier"], str(max(SESSION_COUNTS))),
        "coordinator": (
            *("-m", "coordinator", "serve", "--model", str(folder), *peers),
            *("--address", address["coordinator"]),
        ),
    }
    return [
        ServiceCommand(name=name, arguments=arguments[name], address=address[name])
        for name in address
    ]


def _measure(address: str, sessions: int, args: argparse.Namespace) -> dict[str, float]:
    """Answer `sessions` requests at once, several times; return the median repeat, a round."""
    question = Question(
        prompt="a", chat=False, max_tokens=args.max_tokens, draft_count=args.draft_count
    )
    repeats = []
    with ThreadPoolExecutor(sessions) as pool:
        for _ in range(args.repeats + 1):
            started = perf_counter()
            answers = list(
                pool.map(lambda _: ask(address, question, lambda _text: None), range(sessions))
            )
            wall = perf_counter() - started
            statistics = [answer.finish.statistics for answer in answers]
            rounds = max(s.round_count for s in statistics)
            phases = {
                f"{phase}_ms": 1e3
                * sum(getattr(s.round_times, phase).ToNanoseconds() / 1e9 for s in statistics)
                / sum(s.round_count for s in statistics)
                for phase in PHASES
            }
            repeats.append(
                {
                    "sessions": sessions,
                    "rounds": rounds,
                    "round_ms": 1e3 * wall / rounds,
                    "overhead_ms": phases["wire_ms"] + phases["coordinator_ms"],
                    **phases,
                }
            )
    ordered = sorted(repeats[1:], key=lambda row: row["overhead_ms"])  # the first one warms up
    return ordered[len(ordered) // 2]


if __name__ == "__main__":
    sys.exit(main())
