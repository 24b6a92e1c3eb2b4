"""How many tokens a round of a draft yields (tau), through three processes that serve.

    python benchmarks/acceptance.py --prompts FILE [--draft-counts 3,5,7] [--temperatures 0,0.7]
    python benchmarks/acceptance.py --prompts FILE --draft dflash
    python benchmarks/acceptance.py --prompts FILE --draft FOLDER

FILE is JSONL with `prompt` (a message of a chat) or `prompt_ids` a line, and `class` if it likes.
Each prompt is answered once a temperature and K through the three processes, until the model's own
end token or `--max-tokens`. tau counts every answer's tokens after the first over its rounds,
pooled over all answers: the prefill bonus is free. It is told by class too, and without answers
that loop. `splitspec train evaluate` counts the same in one process.

Prints tables for people, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc

from coordinator.launch import Child, ServiceCommand, ServiceFailed, new_log_dir, services
from coordinator.run import MAX_DRAFT_COUNT, Waiting
from drafter_service.training import answers as measured
from drafter_service.training.answers import Prompt, print_results, read_prompts
from drafter_service.training.evaluate_config import parse_counts, parse_temperatures
from splitspec.channels import CLIENT_OPTIONS
from splitspec.drafts import MODEL_METHODS, find_draft
from splitspec.errors import UserError
from splitspec.folders import DEFAULT_CACHE_DIR
from splitspec.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2

READY_SECONDS = 1800.0
"""Programs of the target and of the draft may have to be exported first."""
PATIENCE_SECONDS = 120.0
"""How long the coordinator waits for a step: a late draft would count as a draft that is wrong."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer and what it cost."""

    prompt: Prompt
    token_ids: list[int]
    statistics: generation_pb2.GenerationStatistics

    def measured(self) -> measured.Answer:
        """Return it as far as tau wants to know."""
        return measured.Answer(
            prompt_class=self.prompt.prompt_class,
            token_ids=self.token_ids,
            round_count=self.statistics.round_count,
        )


@dataclass(frozen=True, kw_only=True)
class Tally:
    """The answers of one temperature and K."""

    temperature: float
    draft_count: int
    answers: list[Answer]
    seconds: float

    def report(self) -> dict[str, Any]:
        """Return the figures."""
        costs = [answer.statistics for answer in self.answers]
        drafted = sum(cost.draft_token_count for cost in costs)
        accepted = sum(cost.accepted_token_count for cost in costs)
        counts = [0] * max(len(cost.acceptance_length_counts) for cost in costs)
        for cost in costs:
            for index, count in enumerate(cost.acceptance_length_counts):
                counts[index] += count
        counted = measured.report([answer.measured() for answer in self.answers])
        return {
            "temperature": self.temperature,
            "draft_count": self.draft_count,
            **counted,
            "acceptance": _by_position(counts),
            "target_only_rounds": sum(cost.target_only_round_count for cost in costs),
            "drafted": drafted,
            "accepted": accepted,
            "acceptance_length_counts": counts,
            "tokens_per_second": round(counted["tokens_after_first"] / self.seconds, 1),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = _parse(argv)
    prompts = read_prompts(args.prompts, args.prompt_count)
    tallies = []
    with (
        tempfile.TemporaryDirectory(prefix="splitspec-") as sockets,
        Waiting() as waiting,
        services(
            _commands(args, Path(sockets)),
            log_dir=new_log_dir(args.cache_dir),
            timeout_seconds=READY_SECONDS,
            on_wait=waiting.show,
        ) as children,
        grpc.insecure_channel(children[-1].command.address, CLIENT_OPTIONS) as channel,
    ):
        waiting.stop()
        stub = generation_pb2_grpc.GenerationStub(channel)
        warm = argparse.Namespace(**{**vars(args), "max_tokens": 8})
        _answer_all(stub, warm, prompts[: args.sessions], 0.0, args.draft_counts[0])
        for temperature, draft_count in product(args.temperatures, args.draft_counts):
            tallies.append(_answer_all(stub, args, prompts, temperature, draft_count))
            _check_alive(children)
            print(_line(tallies[-1].report()), file=sys.stderr)
    reports = [tally.report() for tally in tallies]
    print_results(reports)
    print(json.dumps({**_settings(args, len(prompts)), **_differing(tallies), "results": reports}))
    return 0


def _by_position(counts: Sequence[int]) -> list[float | None]:
    """Return how often the draft token at each position stood, given that those before it did.

    A round that drafted fewer than K tokens, as the last ones of an answer, counts as if the next
    one had been wrong: `splitspec train evaluate`, which leaves it out, tells a little more.

    Args:
        counts: rounds by accepted tokens, from 0.
    """
    reached = [sum(counts[accepted:]) for accepted in range(len(counts))]
    return [round(one / before, 4) if before else None for before, one in pairwise(reached)]


def _check_alive(children: Sequence[Child]) -> None:
    """Refuse to count rounds that nobody drafted for: without a drafter every answer goes on."""
    for child in children:
        if child.process.poll() is not None:
            raise ServiceFailed(f"the {child.command.name} ended: {child.last_line()}")


def _answer_all(
    stub: generation_pb2_grpc.GenerationStub,
    args: argparse.Namespace,
    prompts: Sequence[Prompt],
    temperature: float,
    draft_count: int,
) -> Tally:
    ask = partial(_ask, stub, args, temperature, draft_count)
    started = perf_counter()

    def in_time(index: int) -> Answer | None:
        late = perf_counter() - started > args.time_limit
        return None if late else ask(prompts[index])

    with ThreadPoolExecutor(args.sessions) as pool:
        asked = list(pool.map(in_time, range(len(prompts))))
    answers = [answer for answer in asked if answer is not None]
    if not answers:
        raise UserError(f"--time-limit {args.time_limit} leaves no answer")
    return Tally(
        temperature=temperature,
        draft_count=draft_count,
        answers=answers,
        seconds=max(1e-9, perf_counter() - started),
    )


def _ask(
    stub: generation_pb2_grpc.GenerationStub,
    args: argparse.Namespace,
    temperature: float,
    draft_count: int,
    prompt: Prompt,
) -> Answer:
    """Answer one prompt; its place in the file is its seed, whatever K is."""
    request = generation_pb2.GenerateRequest(
        sampling=sampling_pb2.SamplingParameters(
            temperature=temperature, top_p=args.top_p, seed=prompt.seed
        ),
        max_tokens=args.max_tokens,
        draft_count=draft_count,
    )
    if prompt.text is None:
        request.token_ids.ids.extend(prompt.token_ids)
    else:
        request.conversation.messages.add(role="user", content=prompt.text)
    token_ids: list[int] = []
    for response in stub.Generate(request):
        token_ids += response.token_ids
        if response.HasField("finish"):
            cost = response.finish.statistics
            return Answer(prompt=prompt, token_ids=token_ids, statistics=cost)
    raise RuntimeError("the answer broke off")


def _commands(args: argparse.Namespace, sockets: Path) -> list[ServiceCommand]:
    names = ("verifier", "drafter", "coordinator")
    address = {name: f"unix:{sockets}/{name}.sock" for name in names}
    flags: dict[str, dict[str, object]] = {
        "verifier": {
            "model": args.model,
            "runtime": args.runtime,
            "precision": args.precision,
            "device": args.device,
            "threads": args.threads,
            "fuse-for": args.draft_model,
            "slot-count": args.sessions,
            "max-context-length": args.max_context_length,
            "max-draft-count": _most_drafts(args),
        },
        "drafter": {
            "draft": args.draft,
            "slot-count": args.sessions + 2,
            "max-draft-count": _most_drafts(args),
            **_draft_flags(args),
        },
        "coordinator": {
            "model": args.model,
            "verifier": address["verifier"],
            "drafter": address["drafter"],
            "step-seconds": PATIENCE_SECONDS,
            "draft-seconds": PATIENCE_SECONDS,
            "queue-seconds": 86_400,
            "queue-limit": 100_000,
        },
    }
    modules = dict(zip(names, ("verifier_service", "drafter_service", "coordinator"), strict=True))
    commands = []
    for name in names:
        given = {"address": address[name], "cache-dir": args.cache_dir, **flags[name]}
        values = [f"--{flag}={value}" for flag, value in given.items() if value is not None]
        arguments = ("-m", modules[name], "serve", *values)
        commands.append(ServiceCommand(name=name, address=address[name], arguments=arguments))
    return commands


def _most_drafts(args: argparse.Namespace) -> int | None:
    """Return the K that the services must allow; None: their default is enough."""
    most = max(args.draft_counts)
    return most if most > MAX_DRAFT_COUNT else None


def _draft_flags(args: argparse.Namespace) -> dict[str, object]:
    if args.draft not in MODEL_METHODS:
        return {}
    return {
        "draft-model": args.draft_model,
        "target": args.model,
        "rows": args.rows,
        "row-dtype": args.row_dtype,
        "runtime": args.draft_runtime,
        "precision": args.draft_precision,
        "device": args.draft_device,
        "threads": args.threads,
        "draft-sampling": args.draft_sampling,
        "block-length": args.block_length,
        "max-context-length": args.max_context_length,
    }


def _settings(args: argparse.Namespace, prompt_count: int) -> dict[str, object]:
    hidden = {"prompts", "cache_dir", "prompt_count"}
    given = {name: value for name, value in vars(args).items() if name not in hidden}
    given["prompt_file"] = args.prompts.name
    given["draft_model"] = None if args.draft_model is None else args.draft_model.name
    return {"benchmark": "acceptance", "prompts": prompt_count, **given}


def _differing(tallies: Sequence[Tally]) -> dict[str, int]:
    """Count prompts whose answers are not the same for every K: 0 by law L4, bf16 apart."""
    texts: dict[tuple[float, int], set[tuple[int, ...]]] = {}
    for tally in tallies:
        for answer in tally.answers:
            own = texts.setdefault((tally.temperature, answer.prompt.line), set())
            own.add(tuple(answer.token_ids))
    return {"differing_answers": sum(len(own) > 1 for own in texts.values())}


def _line(report: dict[str, Any]) -> str:
    keys = ("temperature", "draft_count", "answers", "tau", "drafted", "tokens_per_second")
    return "  ".join(f"{key} {report[key]}" for key in keys)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL: prompt or prompt_ids")
    parser.add_argument("--prompt-count", type=int, default=None, help="the first ones only")
    parser.add_argument("--model", default="smollm2-135m", help="pulled model, or a folder")
    parser.add_argument("--draft", default=None, help="auto, eagle3, dflash, ngram or a folder")
    parser.add_argument("--draft-model", type=Path, default=None, help="the draft's folder")
    parser.add_argument("--draft-counts", default="3,5,7", help="K, with commas")
    parser.add_argument("--draft-sampling", default=None, help="argmax or coupled")
    parser.add_argument("--block-length", type=int, default=None, help="dflash: slots of a block")
    parser.add_argument("--temperatures", default="0", help="with commas; 0 is greedy")
    parser.add_argument("--top-p", type=float, default=None)
    parser.add_argument("--max-tokens", type=int, default=240)
    parser.add_argument("--max-context-length", type=int, default=1024)
    parser.add_argument("--sessions", type=int, default=1, help="answers at once")
    parser.add_argument(
        "--time-limit", type=float, default=86_400, help="seconds a K after which no prompt starts"
    )
    parser.add_argument("--rows", default="fused", help="raw or fused")
    parser.add_argument("--row-dtype", default=None, help="what the verifier's rows come in")
    parser.add_argument("--runtime", default=None, help="the verifier's: executorch or torch")
    parser.add_argument("--precision", default=None, help="the verifier's")
    parser.add_argument("--device", default=None, help="the verifier's, with --runtime torch")
    parser.add_argument("--draft-runtime", default=None, help="the drafter's")
    parser.add_argument("--draft-precision", default=None, help="the drafter's")
    parser.add_argument("--draft-device", default=None, help="the drafter's")
    parser.add_argument("--threads", type=int, default=None, help="of the verifier and the drafter")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR)
    args = parser.parse_args(argv)
    args.cache_dir = args.cache_dir.expanduser()
    args.draft_counts = parse_counts(args.draft_counts)
    args.temperatures = parse_temperatures(args.temperatures)
    found = find_draft(args.draft or "auto", args.draft_model, target=args.model)
    args.draft, args.draft_model = found.method, found.folder
    if args.draft == "none":
        parser.error("--draft none drafts nothing to be accepted")
    if args.draft != "dflash" and args.block_length is not None:
        parser.error(f"--block-length goes with --draft dflash; it is {args.draft}")
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, ServiceFailed) as error:
        sys.exit(f"error: {error}")
