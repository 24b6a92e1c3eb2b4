"""Load a target: one door, whichever runtime runs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from graph_runtime.architecture import read_config
from graph_runtime.checkpoint import load_weights
from graph_runtime.limits import check_context_length, check_tap_layers
from graph_runtime.model_files import model_hash, tokenizer_hash
from graph_runtime.target import Target, TargetInfo
from graph_runtime.torch_target import TorchTarget, build_decoder
from splitspec.errors import UserError

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_target(
    *,
    folder: Path,
    model_id: str,
    runtime: str,
    precision: str,
    cache_dir: Path,
    tap_layers: tuple[int, ...] | None,
    max_context_length: int,
    slot_count: int,
    max_prefill_chunk: int,
    threads: int | None,
    device: str = "cpu",
    stop: threading.Event | None = None,
) -> Target:
    """Load the model in `folder`.

    Args:
        folder: HF layout.
        model_id: name a person knows it by.
        runtime: "executorch" (exports the program first when the cache has none) or "torch".
        precision: torch: "fp32" or "bf16"; executorch: see graph_runtime.programs.
        cache_dir: where hashes and exported programs are kept.
        tap_layers: 0-based layer outputs of a raw row; None: `limits.default_tap_layers`.
        max_context_length: KV positions of one slot.
        slot_count: sessions at once.
        max_prefill_chunk: longest span of a step.
        threads: compute threads; None: the runtime's own choice.
        device: torch: "cpu" or "cuda".
        stop: once it is set, an export ends and the load fails.

    Raises:
        UserError: what is wrong with the folder or an argument, in one line.
    """
    if runtime == "executorch":
        if device != "cpu":
            raise UserError(f"device is {device!r}; --runtime executorch runs on cpu only")
        with needing_executorch():
            from graph_runtime.programs import load_program_target
        return load_program_target(
            folder=folder,
            model_id=model_id,
            precision=precision,
            cache_dir=cache_dir,
            tap_layers=tap_layers,
            max_context_length=max_context_length,
            slot_count=slot_count,
            max_prefill_chunk=max_prefill_chunk,
            threads=threads,
            stop=stop,
        )
    if runtime != "torch":
        raise UserError(f"runtime is {runtime!r}; expected executorch or torch")
    return load_torch_target(
        folder=folder,
        model_id=model_id,
        precision=precision,
        cache_dir=cache_dir,
        tap_layers=tap_layers,
        max_context_length=max_context_length,
        slot_count=slot_count,
        max_prefill_chunk=max_prefill_chunk,
        threads=threads,
        device=device,
    )


@contextmanager
def needing_executorch() -> Iterator[None]:
    """Import `graph_runtime.programs` in this block: it is not installed where torch has CUDA.

    Raises:
        UserError: names the package that is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("executorch", "torchao"):
            raise
        raise UserError(
            f"--runtime executorch needs the package {error.name}; try --runtime torch"
        ) from error


def load_torch_target(
    *,
    folder: Path,
    model_id: str,
    precision: str,
    cache_dir: Path,
    tap_layers: tuple[int, ...] | None,
    max_context_length: int,
    slot_count: int,
    max_prefill_chunk: int,
    threads: int | None,
    device: str = "cpu",
) -> TorchTarget:
    """Load the model in `folder` in plain torch; arguments and errors as in `load_target`."""
    if precision not in TORCH_DTYPES:
        raise UserError(f"precision is {precision!r}; --runtime torch has {list(TORCH_DTYPES)}")
    place = torch_device(device)
    config = read_config(folder)
    check_context_length(config, max_context_length)
    taps = check_tap_layers(config, tap_layers)
    if threads is not None:
        torch.set_num_threads(threads)
    dtype = TORCH_DTYPES[precision]
    try:
        decoder, caches, tile = build_decoder(
            config,
            tap_layers=taps,
            max_context_length=max_context_length,
            slot_count=slot_count,
            dtype=dtype,
            device=place,
        )
    except (RuntimeError, MemoryError) as error:  # torch has no class of its own for it on a CPU
        raise UserError(
            f"a model of config.json's shape and the K/V of {slot_count} slots do not fit in the "
            f"memory of {device}"
        ) from error
    load_weights(decoder, folder, tied=config.tied)
    info = TargetInfo(
        model_id=model_id,
        model_hash=model_hash(folder, cache_dir),
        tokenizer_hash=tokenizer_hash(folder),
        vocab_size=config.vocab_size,
        n_layers=config.n_layers,
        tap_layers=taps,
        row_width=len(taps) * config.hidden_size,
        row_dtype=dtype,
        min_prefill_chunk=1,
        max_prefill_chunk=max_prefill_chunk,
        max_context_length=max_context_length,
        slot_count=slot_count,
        precision=precision,
        runtime="torch",
    )
    return TorchTarget(decoder, caches, tile, info)


def torch_device(name: str) -> torch.device:
    """Return the device of a flag like "cpu", "cuda" or "cuda:1".

    Raises:
        UserError: there is no such device here.
    """
    try:
        place = torch.device(name)
    except RuntimeError:
        place = torch.device("meta")
    if place.type not in ("cpu", "cuda"):
        raise UserError(f"device is {name!r}; --runtime torch has cpu and cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place.type == "cuda" and (place.index or 0) >= count:
        raise UserError(f"device is {name!r} but this torch sees {count or 'no'} CUDA device")
    return place
