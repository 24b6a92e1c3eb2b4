"""`export target` makes the program that `serve` would look for, and loads nothing."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.eagle3_layouts import random_weights, write_draft
from tests.tiny import write_tiny_model
from verifier_service.config import VerifierConfig

pytest.importorskip("executorch")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # executorch says on import that it is experimental
    from graph_runtime.programs import ensure_program, export

ROOT = Path(__file__).parents[2]
FLAGS = ("--max-context-length", "128", "--tap-layers", "0,2")


def export_target(model: Path, cache_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verifier_service", "export", "target", "--model", str(model)]
    return subprocess.run(
        [*command, "--cache-dir", str(cache_dir), *FLAGS, *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_path_of_a_program_that_is_there_is_printed_and_the_program_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_source: Any, path: Path, *_others: Any) -> None:
        export.write_program(path, b"no program that could be loaded")

    monkeypatch.setattr(export, "_export", write)
    model = write_tiny_model(tmp_path / "tiny")
    path = ensure_program(
        folder=model,
        precision="8da8w",
        cache_dir=tmp_path,
        tap_layers=(0, 2),
        max_context_length=128,
        max_prefill_chunk=VerifierConfig.max_prefill_chunk,
    )
    done = export_target(model, tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{path}\n"), done.stderr
    path.write_bytes(b"no program that was exported")
    done = export_target(model, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: program {path} is corrupt or truncated: delete it to" in done.stderr


def test_the_program_of_a_target_that_fuses_for_a_draft_is_that_of_the_drafts_taps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        export, "_export", lambda _source, path, *_: export.write_program(path, b"-")
    )
    model = write_tiny_model(tmp_path / "tiny")
    draft = write_draft(
        tmp_path / "draft", layout="specforge", weights=random_weights(0), tap_layers=(0, 1, 3)
    )
    path = ensure_program(
        folder=model,
        precision="8da8w",
        cache_dir=tmp_path,
        tap_layers=(0, 1, 3),
        max_context_length=128,
        max_prefill_chunk=VerifierConfig.max_prefill_chunk,
    )
    context = ("--max-context-length", "128")
    command = [sys.executable, "-m", "verifier_service", "export", "target", "--model", str(model)]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path), *context, "--fuse-for", str(draft)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{path}\n"), done.stderr


def test_a_program_that_is_not_there_is_exported_first(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", n_layers=3)
    done = export_target(model, tmp_path)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.removesuffix("\n"))
    assert path.stat().st_size > 1000
    assert path.parent == tmp_path / "programs"


def test_a_mistake_is_one_line_and_stdout_is_empty(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    done = export_target(model, tmp_path, "--precision", "4bit")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("error: precision is '4bit'; expected one of")
