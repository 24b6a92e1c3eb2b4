"""What the README says exists and runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from coordinator.cli import app
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


def test_every_named_target_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets
