"""The committed stubs are what the protos generate."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
from grpc_tools import protoc

PROTOS = Path(__file__).parents[2] / "protos"
INCLUDES = [f"-I{PROTOS}", f"-I{files('grpc_tools') / '_proto'}"]
SOURCES = sorted(file.relative_to(PROTOS) for file in PROTOS.glob("splitspec/v1/*.proto"))
SERVICES = ("verifier", "drafter", "generation")


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generate every stub anew, into a folder of its own."""
    folder = tmp_path_factory.mktemp("stubs")
    names = [str(source) for source in SOURCES]
    plain = ["protoc", *INCLUDES, f"--python_out={folder}", f"--pyi_out={folder}", *names]
    assert protoc.main(plain) == 0
    services = [f"splitspec/v1/{name}.proto" for name in SERVICES]
    assert protoc.main(["protoc", *INCLUDES, f"--grpc_python_out={folder}", *services]) == 0
    return folder


def test_committed_stubs_are_current_and_nothing_else_is_committed(generated: Path) -> None:
    fresh = {file.name: file.read_text() for file in (generated / "splitspec/v1").iterdir()}
    committed = {
        file.name: file.read_text()
        for file in (PROTOS / "splitspec/v1").iterdir()
        if "_pb2" in file.name
    }
    assert committed.keys() == fresh.keys()
    for name, text in fresh.items():
        assert committed[name] == text, f"{name} is out of date: make protos"
