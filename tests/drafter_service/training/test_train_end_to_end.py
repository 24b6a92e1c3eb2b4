"""`splitspec train`, from the target's own text to a draft that is served: real processes, a tiny
random target, seconds on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from drafter_service.training.trainer import CHECKPOINT
from tests.drafter_service.training.chat_templates import TEMPLATES, write_templated_model

ROOT = Path(__file__).parents[3]
LIMIT_SECONDS = 240.0
STEPS = {"eagle3": 60, "dflash": 60}
PNG = b"\x89PNG\r\n\x1a\n"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
"""Tests run side by side, and bits must not depend on how many do."""


class Workplace:
    """A folder with a target, its text, and the runs on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = write_templated_model(
            folder / "target",
            TEMPLATES["plain"],
            logit_scale=0.6,
            hidden=32,
            n_layers=2,
            intermediate=48,
        )

    def command(self, verb: str, *arguments: object) -> list[str]:
        """Return the command line of `splitspec train VERB` for this target."""
        own = ["--target", self.target, "--cache-dir", self.folder / "cache"]
        command = [sys.executable, "-m", "drafter_service", "train", verb, *arguments, *own]
        return [str(argument) for argument in command]

    def training(self, method: str, name: str, *, seed: int = 0) -> list[str]:
        """Return the command line that trains `method` in the run `name`."""
        return self.command(
            method,
            *("--rollouts", self.folder / "rollouts", "--run", self.folder / name),
            *("--steps", STEPS[method], "--batch-rows", 8, "--learning-rate", 5e-3),
            *("--seed", seed, "--checkpoint-seconds", 0),
        )

    def record(self, name: str) -> dict[str, Any]:
        """Return run.json of the run `name`."""
        record: dict[str, Any] = json.loads((self.folder / name / "run.json").read_text())
        return record

    def trained(self, method: str) -> Path:
        """Return the folder of a finished run of `method`, trained at the first call."""
        if not (self.folder / method).exists():
            result = run(self.training(method, method))
            assert result.returncode == 0, result.stderr
        return self.folder / method


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Return a target that has written its own text."""
    workplace = Workplace(tmp_path_factory.mktemp("train"))
    command = workplace.command(
        "rollouts",
        *("--out", workplace.folder / "rollouts", "--device", "cpu"),
        *("--passes", 1, "--rows", 96, "--length", 96),
        # A tiny random target's greedy answers are short, and loop.
        *("--min-answer-tokens", 8, "--max-loop-share", 1, "--held-out-share", 0.2),
    )
    result = run(command)
    assert result.returncode == 0, result.stderr
    return workplace


@pytest.mark.parametrize("method", STEPS)
def test_loss_falls_and_tau_rises_above_the_untrained_drafts(
    workplace: Workplace, method: str
) -> None:
    folder = workplace.trained(method)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    losses = [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0], losses
    record = workplace.record(method)
    assert record["steps"] == STEPS[method]
    for draft_count, tau in record["tau"].items():
        assert tau > 1.05 * record["untrained_tau"][draft_count], record


@pytest.mark.parametrize("method", STEPS)
def test_a_run_leaves_a_draft_a_card_a_plot_and_no_checkpoint(
    workplace: Workplace, method: str
) -> None:
    folder = workplace.trained(method)
    assert (folder / "metrics.png").read_bytes().startswith(PNG)
    assert not (folder / CHECKPOINT).exists()
    record = workplace.record(method)
    card = (folder / "draft" / "README.md").read_text()
    assert f"{record['tau']['7']:.2f}" in card
    assert record["target_model_hash"][:12] in card


@pytest.mark.parametrize("method", STEPS)
def test_the_draft_is_loaded_as_it_is_served_and_evaluated(
    workplace: Workplace, method: str
) -> None:
    prompts = workplace.folder / "prompts.jsonl"
    asked = [{"prompt": text} for text in ("the other way", "and so on", "listen")]
    prompts.write_text("".join(json.dumps(one) + "\n" for one in asked))
    command = workplace.command(
        "evaluate",
        *("--prompts", prompts, "--draft-model", workplace.trained(method) / "draft"),
        *("--runtime", "torch", "--draft-runtime", "torch"),
        *("--draft-counts", "3,7", "--max-tokens", 48),
    )
    result = run(command)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    taus = {one["draft_count"]: one["tau"] for one in figures["results"]}
    assert taus.keys() == {3, 7}
    assert all(tau > 1.05 for tau in taus.values()), figures


def test_a_finished_run_is_not_trained_again(workplace: Workplace) -> None:
    workplace.trained("eagle3")
    result = run(workplace.training("eagle3", "eagle3"))
    assert (result.returncode, result.stdout) == (2, "")
    assert "is finished; give another folder" in result.stderr


def test_a_run_that_is_killed_resumes_to_the_same_bits(workplace: Workplace) -> None:
    """SIGKILL after the first checkpoint; what cannot resume it is refused in one line."""
    whole = workplace.trained("eagle3")
    killed = workplace.folder / "killed"
    checkpoint = killed / CHECKPOINT
    command = workplace.training("eagle3", killed.name)
    child = subprocess.Popen(command, cwd=ROOT, env=ONE_THREAD, stderr=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + LIMIT_SECONDS
        while not checkpoint.exists():
            assert child.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    assert "tau" not in workplace.record("killed"), "it was killed before its end"

    kept = checkpoint.read_bytes()
    other = run(workplace.training("eagle3", killed.name, seed=1))
    assert other.returncode == 2
    assert "was begun with parameters.seed 0, not 1" in other.stderr
    checkpoint.write_bytes(kept[: len(kept) // 2])
    damaged = run(command)
    assert damaged.returncode == 2
    assert f"{checkpoint} is damaged" in damaged.stderr
    checkpoint.write_bytes(kept)

    resumed = run(command)
    assert resumed.returncode == 0, resumed.stderr
    files = sorted(path.name for path in (whole / "draft").glob("*.safetensors"))
    assert files
    for name in files:
        assert (whole / "draft" / name).read_bytes() == (killed / "draft" / name).read_bytes()
    assert workplace.record("killed")["tau"] == workplace.record("eagle3")["tau"]
