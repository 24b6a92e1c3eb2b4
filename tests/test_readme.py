"""What the README says exists and runs."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from coordinator.cli import VERBS, app
from tests.coordinator.fake_service import WORDS, FakeGeneration, fake_server

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_python_example_runs_as_it_stands(tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert example is not None
    address = f"unix:{tmp_path}/generation.sock"
    server = fake_server(address, FakeGeneration())
    try:
        done = subprocess.run(
            [sys.executable, "-c", example[1].replace("127.0.0.1:7100", address)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        server.stop(0).wait()
    assert done.stdout == "".join(WORDS) + "\ntau 2.0\n", done.stderr


def test_every_linked_file_is_there() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_named_verb_is_one() -> None:
    for verb in re.findall(r"`(serve \w+|model \w+|export \w+|health|run|generate)[` ]", README):
        result = CliRunner().invoke(app, [verb.split()[0], "--help"])
        assert result.exit_code == 0, verb
        assert verb.split()[-1] in result.output


def test_every_command_has_flags_that_its_verb_takes() -> None:
    commands = re.findall(r"^`?splitspec (serve|export) (\w+)([^`\n]*)", README, re.MULTILINE)
    assert {(group, verb) for group, verb, _ in commands} >= {
        ("serve", "verifier"),
        ("serve", "drafter"),
        ("serve", "coordinator"),
        ("export", "dflash"),
    }
    for group, verb, rest in commands:
        module, path, _ = VERBS[group, verb]
        command: Any = typer.main.get_command(importlib.import_module(f"{module}.__main__").app)
        for name in path.split():
            command = command.commands[name]
        taken = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[\w-]+", rest.partition("#")[0])) <= taken, (group, verb)


def test_every_named_target_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets
