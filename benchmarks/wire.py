"""What a round costs besides the models: coordinator and wire, for 1, 8 and 32 sessions.

    python benchmarks/wire.py [--model smollm2-135m]

Real coordinator, real ngram drafter and a real verifier around a target that costs nothing, as
three processes on unix sockets. Overhead a round is the round's time less what the two services
report for themselves. Prints a table for people, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

from coordinator.chat import Question, ask
from coordinator.launch import ServiceCommand, new_log_dir, services
from splitspec.folders import DEFAULT_CACHE_DIR, model_folder

PHASES = ("draft", "verify", "wire", "coordinator")
SESSION_COUNTS = (1, 8, 32)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-count", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR)
    args = parser.parse_args(argv)
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
        rows = [_measure(address, count, args) for count in SESSION_COUNTS]
    print(f"{'sessions':>9}{'rounds':>8}{'round ms':>10}" + "".join(f"{p:>13}" for p in PHASES))
    for row in rows:
        cells = "".join(f"{row[f'{phase}_ms']:>13.3f}" for phase in PHASES)
        print(f"{row['sessions']:>9}{row['rounds']:>8}{row['round_ms']:>10.3f}{cells}")
    print(f"overhead a round for one session: {rows[0]['overhead_ms']:.3f} ms (budget 0.6)")
    print(json.dumps({"benchmark": "wire", "draft_count": args.draft_count, "rows": rows}))
    return 0


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
