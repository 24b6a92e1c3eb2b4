"""The import rules and size limits of the layout, read from the sources themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePath

import pytest

from drafter_service.training.commands import COMMANDS

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "splitspec": ROOT / "protos" / "splitspec",
    "graph_runtime": ROOT / "graph_runtime",
    "verifier_service": ROOT / "verifier_service",
    "drafter_service": ROOT / "drafter_service",
    "coordinator": ROOT / "coordinator",
}
MAY_IMPORT = {
    "splitspec": {"splitspec"},
    "graph_runtime": {"graph_runtime", "splitspec"},
    "verifier_service": {"verifier_service", "graph_runtime", "splitspec"},
    "drafter_service": {"drafter_service", "graph_runtime", "splitspec"},
    "coordinator": {"coordinator", "splitspec"},
}
"""Ours that a package may import. What is missing here is what the layout forbids."""

HEAVY = {"torch", "torchao", "executorch", "safetensors", "gguf", "transformers"}
WIRE = {"grpc", "grpc_health", "grpc_reflection", "grpc_status"}
SPEAKS_GRPC = {"splitspec.serving", "splitspec.wire_errors", "splitspec.probe"}
MAX_LINES = 400
"""Files are rarely over 300 lines; here the suite stops believing in "rarely"."""


def sources(package: str) -> list[Path]:
    """Return a package's own files, generated stubs left out."""
    files = sorted(PACKAGES[package].rglob("*.py"))
    return [file for file in files if not file.stem.endswith(("_pb2", "_pb2_grpc"))]


ALL_SOURCES = [
    pytest.param(package, file, id=str(file.relative_to(ROOT)))
    for package in PACKAGES
    for file in sources(package)
]


@cache
def imports(file: Path) -> frozenset[str]:
    """Return the dotted names that a file imports anywhere, also inside functions."""
    return frozenset(_imports(ast.parse(file.read_text())))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def roots(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(file)}


@pytest.mark.parametrize(("package", "file"), ALL_SOURCES)
def test_a_package_imports_only_what_the_layout_allows(package: str, file: Path) -> None:
    ours = roots(file) & PACKAGES.keys()
    assert ours <= MAY_IMPORT[package], "services never import each other"
    assert not roots(file) & {"tests", "benchmarks"}


@pytest.mark.parametrize(("package", "file"), ALL_SOURCES)
def test_torch_stays_with_the_models_and_grpc_with_the_wire(package: str, file: Path) -> None:
    if package in {"coordinator", "splitspec"}:
        assert not roots(file) & HEAVY, "the coordinator and the contract know no tensors"
    if package == "graph_runtime":
        assert not roots(file) & WIRE, "graph_runtime knows no grpc"
        assert not imports(file) & SPEAKS_GRPC
    if roots(file) & HEAVY:
        assert not roots(file) & WIRE, "a file holds tensors or speaks grpc, never both"


def reached(file: Path, package: str) -> set[Path]:
    """Return `file` and every file of its package that it imports, directly or not."""
    found, waiting = set(), {file}
    while waiting:
        found |= waiting
        stems = {name.split(".")[1] for one in waiting for name in imports(one) if "." in name}
        waiting = {other for other in sources(package) if other.stem in stems} - found
    return found


@pytest.mark.parametrize("service", ["verifier_service", "drafter_service"])
def test_servers_hold_no_tensors_and_engines_no_grpc(service: str) -> None:
    for name in ("server.py", "__main__.py"):
        assert not roots(PACKAGES[service] / name) & HEAVY, name
    for file in reached(PACKAGES[service] / "engine.py", service):
        assert not roots(file) & WIRE, file
        assert not imports(file) & SPEAKS_GRPC, file


def test_training_speaks_no_grpc_and_no_service_loads_it() -> None:
    training = PACKAGES["drafter_service"] / "training"
    for file in sources("drafter_service"):
        if training in file.parents:
            assert not roots(file) & WIRE, file
            assert not imports(file) & SPEAKS_GRPC, file
        else:
            used = {name for name in imports(file) if name.startswith("drafter_service.training")}
            allowed = {"drafter_service.training.commands"}  # the command line offers them
            assert {name.rpartition(".build_app")[0] or name for name in used} <= (
                allowed if file.name == "__main__.py" else set()
            ), file


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("drafter_service", ["serve"]),
        ("drafter_service", ["export", "eagle3"]),
        *(("drafter_service", ["train", name]) for name in COMMANDS),
        ("graph_runtime", ["model", "list"]),
        ("coordinator", ["serve"]),
    ],
)
def test_help_is_shown_without_torch(module: str, arguments: list[str]) -> None:
    """Guards: a user who asks what a command takes waited seconds for torch."""
    heavy = dict.fromkeys(("torch", "executorch", "matplotlib"))
    script = f"import sys; sys.modules.update({heavy}); import runpy; sys.argv[0] = 'x'; "
    script += f"runpy.run_module('{module}', run_name='__main__', alter_sys=True)"
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments, "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage" in done.stdout


def test_executorch_is_imported_only_where_programs_are_made_and_run() -> None:
    allowed = PACKAGES["graph_runtime"] / "programs"
    for package in PACKAGES:
        for file in sources(package):
            if roots(file) & {"executorch", "torchao"}:
                assert allowed in file.parents, file


@pytest.mark.parametrize(("package", "file"), ALL_SOURCES)
def test_files_are_short_and_named_for_what_they_do(package: str, file: Path) -> None:
    del package
    assert len(file.read_text().splitlines()) <= MAX_LINES
    assert file.stem not in {"utils", "helpers", "common", "misc", "manager", "base"}


SYNONYMS = {"acc_len", "accept_len", "bs", "num_tokens", "batch_size"}


def names(tree: ast.AST) -> Iterator[str]:
    """Return every name that a source gives or uses."""
    for node in ast.walk(tree):
        match node:
            case ast.Name():
                yield node.id
            case ast.Attribute():
                yield node.attr
            case ast.arg() | ast.keyword():
                yield node.arg or ""
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.alias():
                yield node.asname or ""


@pytest.mark.parametrize(
    "source",
    [
        "bs = 1",
        "x.bs = 1",
        "f(bs=1)",
        "f = lambda *bs: 0",
        "import numpy as bs",
        "class bs: ...",
        "def bs(): ...",
        "async def bs(): ...",
        "def f(bs): ...",
        "def f(*, bs=1): ...",
    ],
)
def test_a_synonym_is_seen_wherever_it_stands(source: str) -> None:
    assert set(names(ast.parse(source))) & SYNONYMS == {"bs"}


@pytest.mark.parametrize(("package", "file"), ALL_SOURCES)
def test_the_glossary_has_no_synonyms(package: str, file: Path) -> None:
    del package
    assert not set(names(ast.parse(file.read_text()))) & SYNONYMS


@pytest.mark.parametrize(("package", "file"), ALL_SOURCES)
def test_the_environment_is_read_only_where_a_process_starts(package: str, file: Path) -> None:
    del package
    # `launch.py` reads nothing of it: it hands the environment on to the processes it starts.
    if file.name not in {"__main__.py", "cli.py", "launch.py"}:
        assert not imports(file) & {"os.environ", "os.getenv"}
        attributes = {
            node.attr
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Attribute)
        }
        assert not attributes & {"environ", "getenv"}


def test_every_package_is_in_the_distribution() -> None:
    # Guards an image without `graph_runtime.programs`; an editable install hides what is missing.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {
        ".".join((name, *init.parent.relative_to(folder).parts))
        for name, folder in PACKAGES.items()
        for init in folder.rglob("*.py")
    }
    assert folders == set(project["tool"]["setuptools"]["packages"])


@pytest.mark.parametrize(
    "name", ["config.json", "training.json", "README.md", "model-00001-of-00002.safetensors"]
)
def test_a_trained_draft_is_in_the_distribution_and_in_the_image(name: str) -> None:
    file = PurePath("drafter_service/weights/smollm2-135m-eagle3", name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["package-data"]["drafter_service"]
    assert any(file.match(f"drafter_service/{pattern}") for pattern in data)
    assert "COPY drafter_service/ " in (ROOT / "deploy" / "Dockerfile").read_text()
    taken, dropped = [], []
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        (taken if line.startswith("!") else dropped).append(line.removeprefix("!"))
    assert "drafter_service" in taken
    dropped += (ROOT / ".gitignore").read_text().splitlines()
    for pattern in set(dropped) - {"*", ""}:
        if not pattern.startswith("#"):
            assert not any(part.match(pattern.rstrip("/")) for part in (file, *file.parents))
