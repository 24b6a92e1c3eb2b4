"""How processes are started and end."""

from __future__ import annotations

import math
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from splitspec.commands import check_range, flag, parse_tap_layers, run_app
from splitspec.errors import EngineFailed, UserError


def test_a_flag_is_also_a_variable_and_the_flag_wins() -> None:
    app = typer.Typer()

    @app.command()
    def show(slot_count: Annotated[int, flag("slot-count", "Sessions.")] = 8) -> None:
        print(slot_count)

    def shown(arguments: list[str], variables: dict[str, str]) -> str:
        return CliRunner().invoke(app, arguments, env=variables).stdout.strip()

    assert shown([], {}) == "8"
    assert shown([], {"SPLITSPEC_SLOT_COUNT": "3"}) == "3"
    assert shown(["--slot-count", "5"], {"SPLITSPEC_SLOT_COUNT": "3"}) == "5"


@pytest.mark.parametrize("value", [0, 9, math.nan, math.inf])
def test_a_value_out_of_range_is_refused_with_the_flag_and_the_range(value: float) -> None:
    with pytest.raises(UserError, match=r"^--slot-count .* is not in 1\.\.8$"):
        check_range("--slot-count", value, 1, 8)


@pytest.mark.parametrize(
    ("error", "code"), [(UserError("no such model"), 2), (EngineFailed("the device failed"), 1)]
)
def test_a_mistake_and_a_fault_are_one_line_and_a_code_each(
    error: Exception,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr("sys.argv", ["process"])
    with pytest.raises(SystemExit) as ended:
        run_app(app, "process")
    assert ended.value.code == code
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--slot-cuont", "1"], "no such option --slot-cuont (did you mean --slot-count?)"),
        (["--zzz"], "no such option --zzz"),
        (["--slot-count"], "option '--slot-count' requires an argument"),
        (["extra", "--slot-count", "1"], "got unexpected extra argument"),
        ([], "missing option '--slot-count' (env var: 'SPLITSPEC_SLOT_COUNT')"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def show(slot_count: Annotated[int, flag("slot-count", "Sessions.")]) -> None:
        print(slot_count)

    monkeypatch.setattr("sys.argv", ["process", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_app(app, "process")
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith(f"error: {line}")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "code"),
    [(KeyboardInterrupt(), 130), (typer.Exit(3), 3), (typer.Abort(), 1), (SystemExit(143), 143)],
    ids=repr,
)
def test_other_ends_of_a_command_keep_their_codes(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def end() -> None:
        raise raised

    monkeypatch.setattr("sys.argv", ["process"])
    with pytest.raises(SystemExit) as ended:
        run_app(app, "process")
    assert ended.value.code == code


def test_tap_layers_are_a_list_of_numbers() -> None:
    assert parse_tap_layers(None) is None
    assert parse_tap_layers("1,14, 26") == (1, 14, 26)
    for wrong in ("", "a", "1,,2", "-1", "\u0661", "1" * 5000):
        with pytest.raises(UserError, match="--tap-layers"):
            parse_tap_layers(wrong)
