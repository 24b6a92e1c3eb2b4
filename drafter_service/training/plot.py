"""Draw a run's metrics: loss, accuracy of each depth or slot, and tau, over steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from splitspec.errors import UserError

METRICS = "metrics.jsonl"
PICTURE = "metrics.png"
_DOTS_PER_INCH = 120
_COLUMNS = ("cross_entropy", "accuracy")
"""Lists of a step's line, a number for each depth or slot."""
_TAUS = {"tau": "o-", "ema_tau": "x--"}
"""Of an evaluation's line, by K: the last weights' tau and that of their average; how drawn."""


def plot_run(folder: Path) -> Path:
    """Draw `folder`/metrics.jsonl; return the PNG that was written beside it.

    Raises:
        UserError: no metrics, damaged ones, or the picture cannot be written.
        ImportError: matplotlib is not installed.
    """
    lines = read_metrics(folder / METRICS)
    figure = _draw(folder.name, lines)
    path = folder / PICTURE
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    return path


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a metrics file, less a last line that a killed run tore.

    Raises:
        UserError: it is not there or empty, or a line is not a step's metrics.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    whole = text.split("\n")[:-1]
    lines = [_parse(path, number, line) for number, line in enumerate(whole, start=1)]
    if not lines:
        raise UserError(f"{path} holds no whole line; expected at least one step's metrics")
    return lines


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}:{number} is no JSON: {error}") from error
    if not isinstance(found, dict) or not _is_metrics(found):
        raise UserError(f"{path}:{number} is {line[:60]!r}; expected a step and its metrics")
    return found


def _is_metrics(line: Mapping[str, Any]) -> bool:
    """Return whether a line says of a step what `trainer.train` writes: a loss, or tau by K."""
    if not _is_number(line.get("step")):
        return False
    if "loss" in line:
        columns = [line.get(field) for field in _COLUMNS]
        return _is_number(line["loss"]) and all(
            isinstance(column, list) and all(_is_number(value) for value in column)
            for column in columns
        )
    return all(
        isinstance(line.get(field), dict)
        and all(k.isdecimal() and _is_number(value) for k, value in line[field].items())
        for field in _TAUS
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _draw(title: str, lines: Sequence[Mapping[str, Any]]) -> Any:
    # NOTE: the figure's own canvas: pyplot would pick a window's backend and keep the figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    loss, accuracy, tau = figure.subplots(1, 3)
    steps = [line for line in lines if "loss" in line]
    loss.plot([line["step"] for line in steps], [line["loss"] for line in steps], label="loss")
    for axes, field in zip((loss, accuracy), _COLUMNS, strict=True):
        _columns(axes, steps, field)
    _taus(tau, [line for line in lines if "loss" not in line])
    for axes, name in ((loss, "loss and cross-entropies"), (accuracy, "accuracy"), (tau, "tau")):
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="small")
    return figure


def _columns(axes: Any, lines: Sequence[Mapping[str, Any]], field: str) -> None:
    """Draw each depth or slot over steps."""
    for i in range(max((len(line[field]) for line in lines), default=0)):
        points = [(line["step"], line[field][i]) for line in lines if i < len(line[field])]
        axes.plot(*zip(*points, strict=True), linewidth=0.8, label=f"{i + 1}")


def _taus(axes: Any, lines: Sequence[Mapping[str, Any]]) -> None:
    """Draw tau of the last weights by K, and dashed that of their average."""
    for field, style in _TAUS.items():
        counts = sorted({int(k) for line in lines for k in line[field]})
        for i, count in enumerate(counts):
            k = str(count)
            points = [(line["step"], line[field][k]) for line in lines if k in line[field]]
            label = f"K = {count}" if field == "tau" else None
            axes.plot(*zip(*points, strict=True), style, color=f"C{i}", label=label)
