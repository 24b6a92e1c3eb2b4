"""Target-only against speculative, on the same three processes, in one run.

    python benchmarks/generate.py [--model smollm2-135m] [--draft ngram] [--draft-count 7]
    python benchmarks/generate.py --draft eagle3 --draft-model FOLDER [--draft-sampling coupled]
    python benchmarks/generate.py --draft dflash --draft-model FOLDER [--draft-count 4]

Each prompt is answered twice in turn, target-only and speculative, in alternating order, so that a
drifting machine harms both alike. The texts must be identical (law L4): a difference is an error.
Prints a table for people, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from coordinator.chat import Answer, Question, ask
from coordinator.launch import Child, new_log_dir, services
from coordinator.run import READY_SECONDS, RunConfig, service_commands
from splitspec.folders import DEFAULT_CACHE_DIR

PROMPTS = Path(__file__).parent / "prompts" / "short.jsonl"
PHASES = ("draft", "verify", "wire", "coordinator")


@dataclass
class Tally:
    """Sums over the answers of one kind."""

    seconds: float = 0.0
    tokens_after_first: int = 0
    decode_seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=lambda: [0] * 64)
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def add(self, answer: Answer) -> None:
        """Count one answer."""
        s = answer.finish.statistics
        first, total = (d.ToNanoseconds() / 1e9 for d in (s.time_to_first_token, s.total_time))
        self.tokens_after_first += s.output_token_count - 1
        self.decode_seconds += total - first
        self.first_token_seconds.append(first)
        self.rounds += s.round_count
        self.drafted += s.draft_token_count
        self.accepted += s.accepted_token_count
        for index, count in enumerate(s.acceptance_length_counts):
            self.acceptance_lengths[index] += count
        for phase in PHASES:
            self.phases[phase] += getattr(s.round_times, phase).ToNanoseconds() / 1e9

    def report(self) -> dict[str, object]:
        """Return the figures; times in milliseconds a round."""
        rounds = max(1, self.rounds)
        lengths = self.acceptance_lengths
        last = max((i for i, n in enumerate(lengths) if n), default=0)
        firsts = sorted(self.first_token_seconds)
        return {
            "tokens_per_second": round(self.tokens_after_first / self.decode_seconds, 2),
            "tau": round((self.accepted + self.rounds) / rounds, 3),
            "rounds": self.rounds,
            "acceptance_length_counts": lengths[: last + 1],
            "drafted": self.drafted,
            "accepted": self.accepted,
            "first_token_ms_median": round(1e3 * firsts[len(firsts) // 2], 1),
            **{f"{p}_ms": round(1e3 * self.phases[p] / rounds, 3) for p in PHASES},
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 when a text differs."""
    args = _parse(argv)
    lines = args.prompts.read_text().splitlines()[: args.prompt_count]
    prompts = [json.loads(line) for line in lines]
    config = RunConfig(
        model=args.model,
        draft=args.draft,
        runtime=args.runtime,
        precision=args.precision,
        threads=args.threads,
        trace_file=None,
        cache_dir=args.cache_dir,
        compare=False,
        draft_model=args.draft_model,
        draft_sampling=args.draft_sampling,
        block_length=args.block_length,
    )
    tallies = {"target-only": Tally(), "speculative": Tally()}
    differing: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="splitspec-") as sockets,
        services(
            service_commands(config, Path(sockets)),
            log_dir=new_log_dir(args.cache_dir),
            timeout_seconds=READY_SECONDS,
        ) as children,
    ):
        address = children[-1].command.address
        _run_pairs(prompts[:1], args, address, {}, [])  # warm-up
        _run_pairs(prompts, args, address, tallies, differing)
        memory = {child.command.name: _peak_mib(child) for child in children}
    report = {kind: tally.report() for kind, tally in tallies.items()}
    result = {
        "benchmark": "generate",
        "model": args.model,
        "draft": args.draft,
        "draft_model": None if args.draft_model is None else args.draft_model.name,
        "draft_sampling": args.draft_sampling,
        "block_length": args.block_length,
        "draft_count": args.draft_count,
        "temperature": args.temperature,
        "sessions": args.sessions,
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "identical": not differing,
        "wall_speedup": round(tallies["target-only"].seconds / tallies["speculative"].seconds, 3),
        "peak_mib": memory,
        **report,
    }
    _print_table(result, report)
    print(json.dumps(result))
    for prompt in differing:
        print(f"error: the texts differ for {prompt!r}", file=sys.stderr)
    return 1 if differing else 0


def _run_pairs(
    prompts: list[dict[str, str]],
    args: argparse.Namespace,
    address: str,
    tallies: dict[str, Tally],
    differing: list[str],
) -> None:
    """Answer groups of `sessions` prompts together, each group twice."""
    for begin in range(0, len(prompts), args.sessions):
        group = [entry["prompt"] for entry in prompts[begin : begin + args.sessions]]
        kinds = [("target-only", 0), ("speculative", args.draft_count)]
        if (begin // args.sessions) % 2:
            kinds.reverse()
        answers: dict[str, list[Answer]] = {}
        for kind, draft_count in kinds:
            started = perf_counter()
            answers[kind] = list(_ask_all(group, args, address, draft_count))
            if kind in tallies:
                tallies[kind].seconds += perf_counter() - started
                for answer in answers[kind]:
                    tallies[kind].add(answer)
        for prompt, one, other in zip(group, *answers.values(), strict=True):
            if one.token_ids != other.token_ids or one.text != other.text:
                differing.append(prompt)


def _ask_all(
    prompts: list[str], args: argparse.Namespace, address: str, draft_count: int
) -> Iterable[Answer]:
    questions = [
        Question(
            prompt=prompt,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=index if args.temperature else None,
            max_tokens=args.max_tokens,
            draft_count=draft_count,
        )
        for index, prompt in enumerate(prompts)
    ]
    with ThreadPoolExecutor(len(questions)) as pool:
        return list(
            pool.map(lambda question: ask(address, question, lambda _text: None), questions)
        )


def _peak_mib(child: Child) -> int | None:
    """Return the peak resident memory of a service (Linux; None elsewhere)."""
    status = Path(f"/proc/{child.process.pid}/status")
    if not status.exists():
        return None
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


def _print_table(result: dict[str, object], report: dict[str, dict[str, object]]) -> None:
    rows = list(next(iter(report.values())))
    print(f"{'':28}" + "".join(f"{kind:>28}" for kind in report))
    for row in rows:
        print(f"{row:28}" + "".join(f"{report[kind][row]!s:>28}" for kind in report))
    print(f"{'speed-up (tokens/s)':28}{_speedup(report):>28.3f}")
    for key in ("wall_speedup", "identical", "peak_mib"):
        print(f"{key:28}{result[key]!s:>28}")


def _speedup(report: dict[str, dict[str, object]]) -> float:
    speeds = [float(str(report[k]["tokens_per_second"])) for k in ("speculative", "target-only")]
    return speeds[0] / speeds[1]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--draft-model", type=Path, default=None)
    parser.add_argument("--draft-sampling", default=None)
    parser.add_argument("--block-length", type=int, default=None)
    parser.add_argument("--draft-count", type=int, default=7)
    parser.add_argument("--runtime", default=None)
    parser.add_argument("--precision", default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--prompt-count", type=int, default=None)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=None)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
