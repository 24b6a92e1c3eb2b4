"""Price of bitwise row-invariant attention: our step against the same graph on custom_sdpa.

    python benchmarks/step.py --model smollm2-135m

Both graphs have the model's shapes and random weights, fewer layers than the model (the ratio is a
layer's), no head, and take turns in one process. Ours pads one row to two; the other does not.
The last line is JSON. Goal: at most 1.3 at context 200 and 1.7 at context 1000.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from graph_runtime.architecture import DecoderConfig, read_config
from graph_runtime.decoder import Decoder
from graph_runtime.programs.export import check_digest, write_program
from graph_runtime.programs.load import open_program
from graph_runtime.programs.lowering import lower
from graph_runtime.programs.network import InPlaceAttention, Step, prepare, write_cache
from graph_runtime.programs.slot_cache import MASKED, MIN_ROWS, padded_capacity
from splitspec.folders import DEFAULT_CACHE_DIR, model_folder

CAPACITY = 1088
MAX_ROWS = 8
ROWS = (1, 5, 8)
CONTEXTS = (200, 1000)
GOALS = {200: 1.3, 1000: 1.7}

Run = Callable[[int, int], float]
"""(rows, context) -> seconds of one step."""


class SdpaAttention(InPlaceAttention):
    """The same attention on `llama.custom_sdpa`; caches are [1, C, n_kv_heads, D]."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,  # noqa: ARG002 - as in the decoder
        slot: torch.Tensor | None,  # noqa: ARG002
    ) -> torch.Tensor:
        """Return [N, n_heads * D]."""
        heads, width = self.n_kv_heads, self.head_dim
        k_cache = write_cache(k.view(1, -1, heads, width), self.k_cache, self.start)
        v_cache = write_cache(v.view(1, -1, heads, width), self.v_cache, self.start)
        q = q.view(1, -1, heads * self.group, width)
        mixed = torch.ops.llama.custom_sdpa(
            q, k_cache, v_cache, self.start, None, 0.0, True, width**-0.5
        )
        return mixed.view(-1, heads * self.group * width)


def export(config: DecoderConfig, precision: str, ours: bool, path: Path) -> None:
    """Write a program with the one method `step` to `path`."""
    torch.manual_seed(0)
    make = InPlaceAttention if ours else SdpaAttention
    decoder = Decoder(
        config,
        attentions=[make(config) for _ in range(config.n_layers)],
        tap_layers=(0,),
        max_context_length=CAPACITY,
    ).eval()
    decoder.requires_grad_(False)
    prepare(decoder, config, precision)
    group = config.n_heads // config.n_kv_heads
    inputs = (
        torch.zeros(MAX_ROWS, dtype=torch.int64),
        torch.arange(MAX_ROWS),
        [torch.zeros(1, group * MAX_ROWS, CAPACITY)],
        caches(config, CAPACITY, ours)[: config.n_layers],
        caches(config, CAPACITY, ours)[: config.n_layers],
    )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(Step(decoder, config), inputs)
    write_program(path, lower({"step": program}, {}, lambda _: None))


def caches(config: DecoderConfig, capacity: int, ours: bool) -> list[torch.Tensor]:
    """Return K of every layer, then V of every layer."""
    heads, width = config.n_kv_heads, config.head_dim
    shape = (heads, capacity, 1, width) if ours else (1, capacity, heads, width)
    return [torch.randn(shape) for _ in range(2 * config.n_layers)]


def runner(config: DecoderConfig, path: Path, ours: bool) -> Run:
    """Return a function that times one step of the program at `path`."""
    check_digest(path)
    program = open_program(path)
    step = program.load_method("step")
    assert step is not None
    group = config.n_heads // config.n_kv_heads
    held = {context: caches(config, _capacity(context, ours), ours) for context in CONTEXTS}

    def run(rows: int, context: int) -> float:
        """Return the seconds of one step, its mask included; the first call only warms up."""
        tensors = held[context]
        seconds = 0.0
        for _ in range(2):
            before = time.perf_counter()
            count = max(rows, MIN_ROWS) if ours else rows
            positions = torch.arange(context, context + count)
            if ours:
                columns = torch.arange(_capacity(context, ours))
                hidden = columns[None] > positions[:, None]
                mask = torch.zeros(hidden.shape).masked_fill_(hidden, MASKED)
                mask = mask.repeat(group, 1)[None]
            else:
                mask = torch.zeros(1, group * count, 1)  # not read
            step.execute([torch.zeros(count, dtype=torch.int64), positions, mask, *tensors])
            seconds = time.perf_counter() - before
        assert program  # lives as long as its method
        return seconds

    return run


def _capacity(context: int, ours: bool) -> int:
    return padded_capacity(context + MAX_ROWS) if ours else CAPACITY


@contextmanager
def quiet() -> Iterator[None]:
    """Send the runtime's own log to nowhere: custom_sdpa writes lines at every call."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def main() -> None:
    """Measure, print a table for people and one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR)
    parser.add_argument("--precision", default="8da8w")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    config = read_config(model_folder(arguments.model, arguments.cache_dir))
    config = dataclasses.replace(
        config,
        n_layers=arguments.layers,
        sliding_windows=config.sliding_windows[: arguments.layers],
        vocab_size=256,
    )
    times: dict[tuple[str, int, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, quiet():
        runs: dict[str, Run] = {}
        for name in ("ours", "custom_sdpa"):
            path = Path(folder) / f"{name}.pte"
            export(config, arguments.precision, name == "ours", path)
            runs[name] = runner(config, path, name == "ours")
        for _ in range(arguments.repeats):
            for context in CONTEXTS:
                for rows in ROWS:
                    for name, run in runs.items():
                        times.setdefault((name, context, rows), []).append(run(rows, context))
    report(times, arguments.precision, arguments.layers)


def report(times: dict[tuple[str, int, int], list[float]], precision: str, layers: int) -> None:
    """Print medians a layer and their ratios."""
    print(f"{precision}, {layers} layers, {torch.get_num_threads()} torch threads")
    print("context  rows  ours ms/layer  custom_sdpa ms/layer  ratio  goal")
    results = []
    for context in CONTEXTS:
        for rows in ROWS:
            ours, other = (
                statistics.median(times[name, context, rows]) * 1e3 / layers
                for name in ("ours", "custom_sdpa")
            )
            ratio, goal = ours / other, GOALS[context]
            print(f"{context:7}  {rows:4}  {ours:13.3f}  {other:20.3f}  {ratio:5.2f}  {goal}")
            results.append({"context": context, "rows": rows, "ours_ms": ours, "sdpa_ms": other})
    print(json.dumps({"precision": precision, "layers": layers, "steps": results}))


if __name__ == "__main__":
    main()
