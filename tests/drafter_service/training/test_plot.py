"""`splitspec train plot`: a PNG of whatever a run has written so far."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

import drafter_service.training.plot as module
from drafter_service.training.commands import plot as command
from drafter_service.training.plot import plot_run, read_metrics
from splitspec.errors import UserError


def step(number: int) -> str:
    """Return the line of a step with three slots."""
    return json.dumps({
        "step": number, "seconds": 0.1 * number, "learning_rate": 1e-3, "loss": 5.0 - number / 100,
        "cross_entropy": [4.0, 5.0, 6.0], "accuracy": [0.5, 0.3, 0.1],
    })  # fmt: skip


def evaluation(number: int) -> str:
    """Return the line of an evaluation."""
    tau = {"3": 2.0, "5": 2.2, "7": 2.3}
    return json.dumps({"step": number, "seconds": 1.0, "tau": tau, "ema_tau": tau})


def write(run: Path, *lines: str, end: str = "\n") -> Path:
    """Write a run's metrics; return its folder."""
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("\n".join(lines) + end)
    return run


@pytest.mark.parametrize(
    "lines",
    [
        [evaluation(0), step(20), step(40), evaluation(40)],
        [step(20)],
        [evaluation(0)],
        ['{"step": 0, "seconds": 0, "tau": {}, "ema_tau": {}}'],
    ],
    ids=["both", "steps", "evaluation", "nothing-held-out"],
)
def test_a_runs_metrics_become_one_picture(tmp_path: Path, lines: list[str]) -> None:
    path = plot_run(write(tmp_path / "run", *lines))
    assert path == tmp_path / "run" / "metrics.png"
    height, width, _ = imread(path).shape
    assert (width, height) == (1560, 480)


def test_every_slot_and_every_k_has_a_curve(tmp_path: Path) -> None:
    lines = [evaluation(0), step(20), step(40), evaluation(40)]
    figure = module._draw("run", read_metrics(write(tmp_path / "run", *lines) / "metrics.jsonl"))
    loss, accuracy, tau = figure.axes
    assert [len(axes.lines) for axes in (loss, accuracy, tau)] == [4, 3, 6]
    assert list(loss.lines[0].get_ydata()) == [4.8, 4.6]
    assert list(accuracy.lines[2].get_ydata()) == [0.1, 0.1]
    assert list(tau.lines[0].get_xdata()) == [0, 40]


def test_a_last_line_that_a_killed_run_tore_is_ignored(tmp_path: Path) -> None:
    run = write(tmp_path / "run", step(20), step(40)[:30], end="")
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [20]
    assert plot_run(run).is_file()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no whole line"),
        (step(20)[:40], "holds no whole line"),
        ("{]\n", r"metrics\.jsonl:1 is no JSON"),
        (step(20) + "\n[1, 2]\n", r"metrics\.jsonl:2 is '\[1, 2\]'; expected a step"),
        ('{"loss": 3.0}\n', r"metrics\.jsonl:1 is .*expected a step"),
        ('{"step": 3, "loss": 3.0}\n', r"metrics\.jsonl:1 is .*expected a step"),
        ('{"step": 3, "tau": {"x": 2}, "ema_tau": {}}\n', r"metrics\.jsonl:1 is .*expected a step"),
    ],
)
def test_damaged_metrics_are_refused_with_the_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=said):
        plot_run(tmp_path)


def test_a_folder_without_metrics_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nowhere.*metrics\.jsonl"):
        plot_run(tmp_path / "nowhere")


def test_the_command_says_where_the_picture_is(tmp_path: Path) -> None:
    write(tmp_path / "run", step(20))
    result = CliRunner().invoke(app(), [str(tmp_path / "run")])
    assert result.exit_code == 0
    assert result.output.strip() == str(tmp_path / "run" / "metrics.png")


def test_without_matplotlib_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: Path) -> Path:
        raise ModuleNotFoundError("No module named 'matplotlib'")

    monkeypatch.setattr(module, "plot_run", missing)
    with pytest.raises(UserError, match="train plot needs matplotlib: pip install matplotlib"):
        command.plot(tmp_path)


def app() -> object:
    """Return the command alone."""
    import typer

    made = typer.Typer()
    made.command()(command.plot)
    return made
