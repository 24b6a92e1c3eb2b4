"""Compare the precisions of a target on a fixed text: perplexity, and the time of a step.

    python benchmarks/perplexity.py --model smollm2-135m

Every precision sees the same tokens in the same windows. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from graph_runtime.load import load_target
from graph_runtime.target import Span, Target
from splitspec.folders import DEFAULT_CACHE_DIR, model_folder

TEXT = Path(__file__).parent / "text" / "prose.txt"
CHUNK = 128
STEP_ROWS = (1, 5, 8)
STEP_CONTEXT = 200


def perplexity(target: Target, tokens: list[int], window: int) -> float:
    """Return exp of the mean negative log-likelihood of `tokens`, in windows without overlap."""
    total, count = 0.0, 0
    for first in range(0, len(tokens) - 1, window):
        ids = tokens[first : first + window + 1]
        for start in range(0, len(ids) - 1, CHUNK):
            inputs = ids[start : min(start + CHUNK, len(ids) - 1)]
            expected = torch.tensor(ids[start + 1 : start + 1 + len(inputs)])
            (output,) = target.step([_span(start, inputs)])
            total += float(
                torch.nn.functional.cross_entropy(output.logits, expected, reduction="sum")
            )
            count += len(inputs)
    return math.exp(total / count)


def step_seconds(targets: dict[str, Target], tokens: list[int], repeats: int) -> dict[str, list]:
    """Return the median time of steps of STEP_ROWS rows, precisions taking turns."""
    times: dict[str, list[list[float]]] = {name: [[] for _ in STEP_ROWS] for name in targets}
    for target in targets.values():
        for start in range(0, STEP_CONTEXT, CHUNK):
            target.step([_span(start, tokens[start : min(start + CHUNK, STEP_CONTEXT)])])
    for _ in range(repeats):
        for name, target in targets.items():
            for i, rows in enumerate(STEP_ROWS):
                span = _span(STEP_CONTEXT, tokens[:rows])
                target.step([span])  # the shapes change once, outside the measurement
                before = time.perf_counter()
                target.step([span])
                times[name][i].append(time.perf_counter() - before)
    return {name: [statistics.median(of) for of in rows] for name, rows in times.items()}


def _span(start: int, tokens: list[int]) -> Span:
    return Span(slot=0, start=start, token_ids=tokens, logits_count=len(tokens), wants_rows=False)


def main() -> None:
    """Measure, print a table for people and one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR)
    parser.add_argument("--precisions", default="fp32,8da8w,q4_1,8da4w")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=None, help="use only the first so many")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    folder = model_folder(arguments.model, arguments.cache_dir)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids[: arguments.tokens]
    targets: dict[str, Target] = {}
    for precision in arguments.precisions.split(","):
        targets[precision] = load_target(
            folder=folder,
            model_id=arguments.model,
            runtime="executorch",
            precision=precision,
            cache_dir=arguments.cache_dir.expanduser(),
            tap_layers=None,
            max_context_length=1024,
            slot_count=1,
            max_prefill_chunk=CHUNK,
            threads=None,
        )
    results = {name: perplexity(t, tokens, arguments.window) for name, t in targets.items()}
    times = step_seconds(targets, tokens, arguments.repeats)
    base = results.get("fp32", min(results.values()))
    print(f"{len(tokens)} tokens of {TEXT.name}, windows of {arguments.window}")
    print("precision  perplexity  vs fp32   " + "  ".join(f"{r} rows ms" for r in STEP_ROWS))
    for name, value in results.items():
        row = "  ".join(f"{1e3 * seconds:9.2f}" for seconds in times[name])
        print(f"{name:9}  {value:10.3f}  {value / base - 1:+7.1%}  {row}")
    print(json.dumps({"tokens": len(tokens), "perplexity": results, "step_seconds": times}))


if __name__ == "__main__":
    main()
