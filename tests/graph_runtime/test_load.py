"""The loader: arguments are checked, defaults fit tiny models, no executorch is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from graph_runtime.limits import default_tap_layers
from graph_runtime.load import load_target
from graph_runtime.target import Span
from splitspec.errors import UserError
from tests.tiny import write_tiny_model


def load(folder: Path, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "folder": folder,
        "model_id": "tiny",
        "runtime": "torch",
        "precision": "fp32",
        "cache_dir": folder / "cache",
        "tap_layers": None,
        "max_context_length": 64,
        "slot_count": 2,
        "max_prefill_chunk": 32,
        "threads": None,
    }
    return load_target(**(arguments | changes))


def test_what_is_loaded_is_described(tmp_path: Path) -> None:
    info = load(write_tiny_model(tmp_path), tap_layers=(0, 3)).info
    assert (info.model_id, info.precision, info.runtime) == ("tiny", "fp32", "torch")
    assert (info.vocab_size, info.n_layers) == (300, 4)
    assert (info.tap_layers, info.row_width, info.row_dtype) == ((0, 3), 128, torch.float32)
    assert (info.max_context_length, info.slot_count, info.max_prefill_chunk) == (64, 2, 32)
    assert info.min_prefill_chunk == 1
    assert len(info.model_hash) == len(info.tokenizer_hash) == 64


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"runtime": "onnx"}, "runtime is 'onnx'"),
        ({"precision": "8da8w"}, "precision is '8da8w'"),
        ({"tap_layers": ()}, r"tap layers are \[\]"),
        ({"tap_layers": (1, 4)}, r"tap layers are \[1, 4\]; .* \[0, 3\]"),
        ({"tap_layers": (2, 1)}, r"tap layers are \[2, 1\]"),
        ({"max_context_length": 0}, "max context length is 0"),
        (
            {"max_context_length": 4096},
            "max context length is 4096; expected 1 to the model's 2048",
        ),
    ],
)
def test_a_wrong_argument_is_named(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=named):
        load(write_tiny_model(tmp_path), **changes)


@pytest.mark.parametrize("device", ["banana", "", "meta", "cuda:", "cuda:-1", "cuda:9999999999"])
def test_a_device_that_torch_does_not_know_is_named(device: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"device is '{device}'; --runtime torch has cpu and cuda"):
        load(write_tiny_model(tmp_path), device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'cuda' but this torch sees no CUDA device"):
        load(write_tiny_model(tmp_path), device="cuda")
    with pytest.raises(UserError, match="'cuda:63' but this torch sees"):
        load(write_tiny_model(tmp_path), device="cuda:63")


def test_slots_that_no_memory_holds_are_one_clear_line(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    with pytest.raises(UserError, match=f"K/V of {2**40} slots do not fit in the memory of cpu"):
        load(folder, slot_count=2**40)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_computes_what_the_cpu_does(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    span = Span(slot=1, start=0, token_ids=range(20), logits_count=20, wants_rows=True)
    (here,) = load(folder).step([span])
    (there,) = load(folder, device="cuda").step([span])
    torch.testing.assert_close(there.logits.cpu(), here.logits, atol=1e-3, rtol=0)


def test_bfloat16_is_close_to_float32_and_its_rows_are_bfloat16(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    span = Span(slot=1, start=0, token_ids=range(20), logits_count=20, wants_rows=True)
    (exact,) = load(folder).step([span])
    (rounded,) = load(folder, precision="bf16").step([span])
    assert rounded.rows.dtype == torch.bfloat16
    assert rounded.logits.dtype == torch.float32
    assert (rounded.logits - exact.logits).abs().max() < 0.5


@pytest.mark.parametrize(
    ("n_layers", "taps"),
    [(1, (0,)), (2, (0, 1)), (3, (0, 1)), (4, (0, 1)), (8, (1, 3, 4)), (30, (1, 14, 26))],
)
def test_default_taps_are_low_middle_and_high(n_layers: int, taps: tuple[int, ...]) -> None:
    assert default_tap_layers(n_layers) == taps


def test_the_torch_runtime_imports_neither_executorch_nor_grpc() -> None:
    code = (
        "import sys, graph_runtime.load, graph_runtime.model_store; "
        "print(sorted({'executorch', 'torchao', 'grpc', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "[]"
