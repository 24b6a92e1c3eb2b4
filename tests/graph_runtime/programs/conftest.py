"""Programs of tiny models, exported once by content hash and shared by all tests and runs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graph_runtime.eagle3.checkpoint import Eagle3Source
from tests.eagle3_layouts import weights_for, write_draft
from tests.tiny import write_tiny_model

with warnings.catch_warnings(), contextlib.suppress(ModuleNotFoundError):
    warnings.simplefilter("ignore")  # deprecations inside executorch, which tests make errors
    import graph_runtime.programs.lowering  # noqa: F401

CONTEXT = 200
"""Crosses three borders between capacity blocks of 64."""
CHUNK = 96

BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 70}
DRAFTS: dict[str, dict[str, Any]] = {
    "safeailab": {},
    "specforge with biases": {"layout": "specforge", "sizes": BIASES},
    "specforge, one K/V head a head": {"layout": "specforge", "sizes": {"n_kv_heads": 4}},
    "eagle-3.1, post-norm feedback": {"layout": "eagle-3.1"},
    "speculators, q/k norm and normed residual": {
        "layout": "speculators", "written": {"norm_before_residual": True},
    },
    "speculators with a window": {"layout": "speculators", "written": {"nested": WINDOW}},
    "modelopt without taps": {
        "layout": "modelopt", "sizes": {"n_taps": 0, "hidden_norm": False},
    },
    "deepspec, five taps and all ids": {"layout": "deepspec"},
}  # fmt: skip

MakeModel = Callable[..., Path]
MakeSource = Callable[..., Eagle3Source]
LoadProgram = Callable[..., Any]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Return a function that writes the tiny model with the given arguments."""

    def make(*, q4_1: bool = False, **arguments: Any) -> Path:
        folder = write_tiny_model(tmp_path_factory.mktemp("model"), **{"n_layers": 2, **arguments})
        if q4_1:
            _round_to_q4_1(folder / "model.safetensors")
        return folder

    return make


@pytest.fixture
def exported_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export in the test's process: one of its own imports the exporter anew, for seconds.

    The exporter's process is what test_exporter.py, the services' tests and the system tests run.
    """
    pytest.importorskip("executorch")
    from graph_runtime.programs import export
    from graph_runtime.programs.kinds import export_here

    def here(source: Any, path: Path, key: Any, *_: Any) -> None:
        export_here(source, path, key, lambda _phase: None)

    monkeypatch.setattr(export, "_export", here)


@pytest.fixture
def load_program(program_cache: Path, request: pytest.FixtureRequest) -> LoadProgram:
    """Return a function that loads a model's program, exported into the shared cache."""
    pytest.importorskip("executorch")
    request.getfixturevalue("exported_here")
    from graph_runtime.programs import load_program_target

    def load(folder: Path, precision: str, **arguments: Any) -> Any:
        settings = {
            "cache_dir": program_cache,
            "tap_layers": (0, 1),
            "max_context_length": CONTEXT,
            "slot_count": 3,
            "max_prefill_chunk": CHUNK,
            "threads": None,
        }
        return load_program_target(
            folder=folder, model_id="tiny", precision=precision, **{**settings, **arguments}
        )

    return load


@pytest.fixture(scope="session")
def draft_target(make_model: MakeModel) -> Path:
    """Return the target that drafts take from what they lack."""
    return make_model(n_layers=8)


@pytest.fixture
def make_source(tmp_path: Path, draft_target: Path) -> MakeSource:
    """Return a function that writes a draft of a case."""

    def make(case: str = "safeailab", seed: int = 3, **sizes: Any) -> Eagle3Source:
        arguments = DRAFTS[case]
        layout = arguments.get("layout", "safeailab")
        weights = weights_for(layout, seed, **{**arguments.get("sizes", {}), **sizes})
        for name in ("layer.self_attn.o_proj.weight", "layer.mlp.down_proj.weight"):
            weights.tensors[name] *= 0.3  # as where float32's rounding does not grow in a chain
        folder = write_draft(
            tmp_path / f"{case} {seed}",
            layout=layout,
            weights=weights,
            **arguments.get("written", {}),
        )
        own = layout in ("speculators", "deepspec")
        return Eagle3Source(folder=folder, target=draft_target, embeddings="own" if own else "auto")

    return make


def _round_to_q4_1(path: Path) -> None:
    """Make every layer's matrix what dequantising Q4_1 gives: d * q + m, d and m float16."""
    tensors = load_file(path)
    for name, weight in tensors.items():
        if weight.dim() == 2 and ".layers." in name:
            tensors[name] = q4_1_of(weight)
    save_file(tensors, path, {"format": "pt"})


def q4_1_of(weight: torch.Tensor) -> torch.Tensor:
    """Return weight [out, in] as GGUF's Q4_1 stores it, by the format's own definition."""
    groups = weight.reshape(-1, 32)
    low, high = groups.amin(dim=1, keepdim=True), groups.amax(dim=1, keepdim=True)
    step = (high - low) / 15
    q = torch.clamp((groups - low) / step + 0.5, max=15).floor()
    return (step.half().float() * q + low.half().float()).reshape(weight.shape)
