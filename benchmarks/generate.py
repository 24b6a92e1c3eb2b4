"""Target-only against speculative, every method in one run.

    python benchmarks/generate.py [--model smollm2-135m] [--prompts FILE --prompt-count 24]
    python benchmarks/generate.py --methods ngram,eagle3:4,FOLDER:7
    python benchmarks/generate.py --draft eagle3 [--draft-model FOLDER] [--draft-count 4]

A method is ngram, eagle3 or dflash (the trained draft that ships for the model), or a draft's
folder; `:K` is its draft tokens a round. Without `--methods` and `--draft`: ngram and all drafts
that ship. Each method has three processes of its own, as `splitspec run` starts them: a verifier
reads the layers that its draft was trained on, so that two drafts cannot share one. They are all
alive at once, and idle ones must take no processor time: `idle_cpu_percent` tells. Target-only runs
on the first method's, whose drafter then hears nothing.

Each prompt is answered by all in turn, in an order that rotates, so that a drifting machine harms
all alike. The texts must be identical (law L4): a difference is an error. Prints a table for
people, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from coordinator.chat import Answer, Question, ask
from coordinator.launch import Child, ServiceFailed, new_log_dir, services
from coordinator.run import (
    DRAFT_COUNTS,
    MAX_DRAFT_COUNT,
    READY_SECONDS,
    RunConfig,
    Waiting,
    service_commands,
)
from drafter_service.training.answers import Prompt, print_table, read_prompts
from splitspec.drafts import MODEL_METHODS, WORDS, NamedDraft, find_draft, shipped_for
from splitspec.errors import UserError
from splitspec.folders import DEFAULT_CACHE_DIR

PROMPTS = Path(__file__).parent / "prompts" / "short.jsonl"
PHASES = ("draft", "verify", "wire", "coordinator")
TARGET_ONLY = "target-only"
MAX_WARM_UPS = 40
"""Answers until the coordinator must have found its drafter."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """What drafts, and how many tokens a round."""

    name: str
    draft_model: Path | None
    draft_count: int
    label: str
    """The method, or the name of the folder that was asked for."""

    @property
    def kind(self) -> str:
        """Return what its column is called."""
        return f"{self.label}:{self.draft_count}"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One way to answer, and the processes that do it."""

    name: str
    address: str
    draft_count: int
    children: list[Child]


@dataclass
class Tally:
    """Sums over the answers of one kind."""

    seconds: float = 0.0
    idle_cpu_seconds: float = 0.0
    """Processor time that the other processes took meanwhile."""
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

    def report(self) -> dict[str, Any]:
        """Return the figures; times in milliseconds a round."""
        rounds = max(1, self.rounds)
        lengths = self.acceptance_lengths
        last = max((i for i, n in enumerate(lengths) if n), default=0)
        firsts = sorted(self.first_token_seconds)
        return {
            "tokens_per_second": round(self.tokens_after_first / max(1e-9, self.decode_seconds), 2),
            "tau": round(self.tokens_after_first / rounds, 3),
            "rounds": self.rounds,
            "acceptance_length_counts": lengths[: last + 1],
            "drafted": self.drafted,
            "accepted": self.accepted,
            "first_token_ms_median": round(1e3 * firsts[len(firsts) // 2], 1),
            **{f"{p}_ms": round(1e3 * self.phases[p] / rounds, 3) for p in PHASES},
            "seconds": round(self.seconds, 2),
            "idle_cpu_percent": round(100 * self.idle_cpu_seconds / self.seconds, 1),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 when a text differs."""
    args = _parse(argv)
    methods = _methods(args)
    prompts = read_prompts(args.prompts, args.prompt_count)
    for prompt in prompts:
        if prompt.text is None:
            raise UserError(f"{args.prompts}:{prompt.line} has prompt_ids; expected prompt")
    with _kinds(methods, args) as kinds:
        for kind in kinds[1:]:
            _warm_up(kind, prompts[0], args)
        tallies = {kind.name: Tally() for kind in kinds}
        differing = _run_groups(prompts, args, kinds, tallies)
        memory = [{c.command.name: _peak_mib(c) for c in kind.children} for kind in kinds[1:]]
    report = {name: tally.report() for name, tally in tallies.items()}
    base = report[TARGET_ONLY]
    for method, peaks in zip(methods, memory, strict=True):
        own = report[method.kind]
        folder = method.draft_model
        own["speed_up"] = round(own["tokens_per_second"] / base["tokens_per_second"], 3)
        own["wall_speed_up"] = round(base["seconds"] / own["seconds"], 3)
        own |= {"method": method.name, "draft_model": None if folder is None else folder.name}
        own |= {"draft_count": method.draft_count, "peak_mib": peaks}
    settings = {
        "benchmark": "generate",
        "model": args.model,
        "draft_sampling": args.draft_sampling,
        "block_length": args.block_length,
        "temperature": args.temperature,
        "sessions": args.sessions,
        "prompt_file": args.prompts.name,
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "identical": not differing,
    }
    _print_table(report)
    print(json.dumps({**settings, **report}))
    for place in differing:
        print(f"error: the texts differ for {place}", file=sys.stderr)
    return 1 if differing else 0


def _methods(args: argparse.Namespace) -> list[Method]:
    """Return what is compared.

    Raises:
        UserError: a method is unknown, has no weights, or stands there twice.
    """
    if args.draft is not None:
        found = find_draft(args.draft, args.draft_model, target=args.model)
        count = MAX_DRAFT_COUNT if args.draft_count is None else args.draft_count
        return [_method(found.method, found, count)]
    methods: dict[str, Method] = {}
    for entry in args.methods or ["ngram", *(d.method for d in shipped_for(args.model))]:
        name, colon, count = entry.rpartition(":")
        if not colon or not count.isdecimal():
            name, count = entry, args.draft_count
        found = find_draft(name, target=args.model)
        chosen = DRAFT_COUNTS.get(found.method, MAX_DRAFT_COUNT) if count is None else int(count)
        method = _method(found.method if name in WORDS else Path(name).name, found, chosen)
        if method.kind in methods or found.method == "none" or not chosen:
            raise UserError(f"--methods {entry}: it is target-only, or stands there already")
        methods[method.kind] = method
    return list(methods.values())


def _method(label: str, found: NamedDraft, draft_count: int) -> Method:
    return Method(label=label, name=found.method, draft_model=found.folder, draft_count=draft_count)


@contextmanager
def _kinds(methods: Sequence[Method], args: argparse.Namespace) -> Iterator[list[Kind]]:
    """Start every method's services; yield target-only first, then the methods."""
    kinds: list[Kind] = []
    with (
        tempfile.TemporaryDirectory(prefix="splitspec-") as sockets,
        ExitStack() as stack,
        Waiting() as waiting,
    ):
        logs = new_log_dir(args.cache_dir)
        for number, method in enumerate(methods):
            folder = Path(sockets) / str(number)
            folder.mkdir()
            children = stack.enter_context(
                services(
                    service_commands(_run_config(method, args), folder),
                    log_dir=logs / str(number),
                    timeout_seconds=READY_SECONDS,
                    on_wait=waiting.show,
                )
            )
            address = children[-1].command.address
            for name, count in ((TARGET_ONLY, 0), (method.kind, method.draft_count)):
                if count or not kinds:
                    kinds.append(
                        Kind(name=name, address=address, draft_count=count, children=children)
                    )
        waiting.stop()
        yield kinds


def _run_config(method: Method, args: argparse.Namespace) -> RunConfig:
    return RunConfig(
        model=args.model,
        draft=method.name,
        runtime=args.runtime,
        precision=args.precision,
        threads=args.threads,
        trace_file=None,
        cache_dir=args.cache_dir,
        compare=False,
        draft_model=method.draft_model,
        draft_sampling=args.draft_sampling if method.name in MODEL_METHODS else None,
        block_length=args.block_length if method.name == "dflash" else None,
    )


def _warm_up(kind: Kind, prompt: Prompt, args: argparse.Namespace) -> None:
    """Answer until the coordinator has its drafter, and once more.

    Raises:
        ServiceFailed: it does not find it.
    """
    for _ in range(MAX_WARM_UPS):
        (answer,) = _ask_all([prompt], args, kind)
        if answer.finish.statistics.draft_method:
            _ask_all([prompt], args, kind)
            return
    raise ServiceFailed(f"{kind.name}: the coordinator has no drafter")


def _run_groups(
    prompts: Sequence[Prompt],
    args: argparse.Namespace,
    kinds: Sequence[Kind],
    tallies: dict[str, Tally],
) -> list[str]:
    """Answer groups of `sessions` prompts together, each group once a kind.

    Returns:
        The places of prompts whose texts differ.
    """
    differing = []
    for begin in range(0, len(prompts), args.sessions):
        group = prompts[begin : begin + args.sessions]
        first = (begin // args.sessions) % len(kinds)
        answers: dict[str, list[Answer]] = {}
        for kind in [*kinds[first:], *kinds[:first]]:
            tally, idle = tallies[kind.name], _idle_children(kind, kinds)
            started, idle_before = perf_counter(), _cpu_seconds(idle)
            answers[kind.name] = _ask_all(group, args, kind)
            tally.seconds += perf_counter() - started
            tally.idle_cpu_seconds += _cpu_seconds(idle) - idle_before
            for answer in answers[kind.name]:
                tally.add(answer)
        for prompt, *texts in zip(group, *answers.values(), strict=True):
            if len({(tuple(text.token_ids), text.text) for text in texts}) > 1:
                differing.append(f"{args.prompts}:{prompt.line}")
    return differing


def _ask_all(prompts: Sequence[Prompt], args: argparse.Namespace, kind: Kind) -> list[Answer]:
    questions = [
        Question(
            prompt=prompt.text or "",
            temperature=args.temperature,
            top_p=args.top_p,
            seed=prompt.seed if args.temperature else None,
            max_tokens=args.max_tokens,
            draft_count=kind.draft_count,
        )
        for prompt in prompts
    ]
    with ThreadPoolExecutor(len(questions)) as pool:
        return list(
            pool.map(lambda question: ask(kind.address, question, lambda _text: None), questions)
        )


def _idle_children(kind: Kind, kinds: Sequence[Kind]) -> list[Child]:
    """Return the processes that have nothing to do while `kind` answers."""
    children = {child.process.pid: child for other in kinds for child in other.children}
    for child in kind.children:
        if kind.draft_count or child.command.name != "drafter":
            del children[child.process.pid]
    return list(children.values())


def _cpu_seconds(children: Sequence[Child]) -> float:
    """Return the processor time that processes have taken so far (Linux; 0 elsewhere)."""
    ticks = 0
    for child in children:
        file = Path(f"/proc/{child.process.pid}/stat")
        if file.exists():
            user, system = file.read_text().rpartition(")")[2].split()[11:13]
            ticks += int(user) + int(system)
    return ticks / os.sysconf("SC_CLK_TCK")


def _peak_mib(child: Child) -> int | None:
    """Return the peak resident memory of a service (Linux; None elsewhere)."""
    status = Path(f"/proc/{child.process.pid}/status")
    if not status.exists():
        return None
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


def _print_table(report: dict[str, dict[str, Any]]) -> None:
    """Print a row a kind, and how many of its rounds emitted 1, 2, ... tokens."""
    rows = []
    for name, own in report.items():
        peaks = own.get("peak_mib", {}).values()
        row = {
            "": name,
            "tok/s": f"{own['tokens_per_second']:.1f}",
            "tau": f"{own['tau']:.2f}",
            "speed-up": f"{own['speed_up']:.2f}x" if "speed_up" in own else "",
            "with prefill": f"{own['wall_speed_up']:.2f}x" if "wall_speed_up" in own else "",
            "first token ms": str(own["first_token_ms_median"]),
        }
        row |= {f"{phase} ms": f"{own[f'{phase}_ms']:.2f}" for phase in PHASES}
        row["peak MiB"] = "" if None in peaks or not peaks else str(sum(peaks))
        row["others' CPU %"] = str(own["idle_cpu_percent"])
        rows.append(row)
    print_table(rows)
    print("\nrounds that emitted 1, 2, 3 ... tokens")
    lengths = [own["acceptance_length_counts"] for own in report.values()]
    most = max(map(len, lengths))
    print_table(
        [
            {"": name, **{str(n + 1): str(c) for n, c in enumerate([*own, *[0] * most][:most])}}
            for name, own in zip(report, lengths, strict=True)
        ]
    )
    print()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=None)
    parser.add_argument("--draft", default=None, help="one method alone")
    parser.add_argument("--draft-model", type=Path, default=None, help="its folder")
    parser.add_argument("--draft-sampling", default=None)
    parser.add_argument("--block-length", type=int, default=None)
    parser.add_argument(
        "--draft-count",
        type=int,
        default=None,
        help="with --draft 7, else as `splitspec run` has it for each method",
    )
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
    args = parser.parse_args(argv)
    if args.methods is not None and args.draft is not None:
        parser.error("--draft is one method alone; --methods are several")
    if args.draft_model is not None and args.draft is None:
        args.draft = "auto"
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, ServiceFailed) as error:
        sys.exit(f"error: {error}")
