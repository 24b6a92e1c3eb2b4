"""The cache of programs, and what goes wrong with one: one clear line each."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("executorch")

from graph_runtime.programs import export
from graph_runtime.programs.export import ProgramKey, Source
from graph_runtime.programs.kinds import KINDS, Kind, export_here, read_key
from graph_runtime.programs.load import open_program
from graph_runtime.programs.metadata import ProgramMetadata, check_values, read_metadata
from graph_runtime.programs.target_export import TargetKey, ensure_program
from splitspec.errors import UserError
from tests.graph_runtime.programs.conftest import CHUNK, CONTEXT, LoadProgram, MakeModel

Build = Callable[..., bytes]


def ensure(folder: Path, cache_dir: Path, **arguments: Any) -> Path:
    settings: dict[str, Any] = {
        "precision": "8da8w",
        "tap_layers": (0, 1),
        "max_context_length": CONTEXT,
        "max_prefill_chunk": CHUNK,
    }
    return ensure_program(folder=folder, cache_dir=cache_dir, **{**settings, **arguments})


def export_in_this_process(source: Source, path: Path, key: ProgramKey, *_: Any) -> None:
    export_here(source, path, key, lambda _phase: None)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the exporter by one that is quick and counts what it is asked for."""
    asked: list[str] = []

    def build(key: ProgramKey, _source: Source, _report: Any) -> bytes:
        asked.append(key.precision)
        return b"a program"

    monkeypatch.setitem(KINDS, "target", Kind(key=TargetKey, build=build))
    monkeypatch.setattr(export, "_export", export_in_this_process)
    return asked


@pytest.fixture
def program_copy(
    make_model: MakeModel, load_program: LoadProgram, program_cache: Path, tmp_path: Path
) -> Path:
    """Return a real program and its digest in a folder of the test's own."""
    folder = make_model()
    load_program(folder, "8da8w")
    path = ensure(folder, program_cache)
    shutil.copy(path.with_suffix(".sha256"), tmp_path)
    return Path(shutil.copy(path, tmp_path))


def test_a_program_is_exported_once(
    make_model: MakeModel, tmp_path: Path, exports: list[str]
) -> None:
    folder = make_model()
    assert ensure(folder, tmp_path) == ensure(folder, tmp_path)
    assert exports == ["8da8w"]


def test_two_that_need_one_program_at_once_export_it_once(
    make_model: MakeModel, tmp_path: Path, exports: list[str]
) -> None:
    folder = make_model()
    threads = [threading.Thread(target=ensure, args=(folder, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert exports == ["8da8w"]


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "fp32"},
        {"tap_layers": (1,)},
        {"max_context_length": CONTEXT + 1},
        {"max_prefill_chunk": CHUNK + 1},
    ],
)
def test_what_changes_the_program_changes_its_name(
    change: dict[str, Any], make_model: MakeModel, tmp_path: Path, exports: list[str]
) -> None:
    folder = make_model()
    assert ensure(folder, tmp_path) != ensure(folder, tmp_path, **change)
    assert len(exports) == 2


def test_the_exporter_s_process_reads_the_key_that_it_was_given() -> None:
    key = TargetKey(
        model_hash="00",
        precision="fp32",
        tap_layers=(0, 3),
        max_context_length=64,
        max_prefill_chunk=8,
    )
    assert read_key(key.kind, json.loads(json.dumps(asdict(key)))) == key


def test_another_model_has_another_program(
    make_model: MakeModel, tmp_path: Path, exports: list[str]
) -> None:
    assert ensure(make_model(), tmp_path) != ensure(make_model(seed=1), tmp_path)
    assert len(exports) == 2


def test_an_unknown_precision_is_refused_with_those_there_are(
    make_model: MakeModel, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="precision is '4bit'; expected one of fp32, 8da8w"):
        ensure(make_model(), tmp_path, precision="4bit")


def test_q4_1_of_another_model_is_refused_with_the_tensor(
    make_model: MakeModel, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"model\.layers\.0\.\S+ is not: try --precision 8da8w"):
        ensure(make_model(), tmp_path, precision="q4_1")


def test_a_full_disk_is_one_line_and_leaves_nothing(
    make_model: MakeModel, tmp_path: Path, exports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write program \S+\.pte: No space left on device"):
        ensure(make_model(), tmp_path)
    assert exports
    assert [path.suffix for path in (tmp_path / "programs").iterdir()] == [".lock"]


def test_what_a_killed_export_left_is_cleared_by_the_next(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(arguments: Sequence[str], **_: Any) -> None:
        path = Path(arguments[1])
        assert not list(path.parent.glob("*.partial"))
        for name in (path.name, path.with_suffix(".sha256").name):
            path.with_name(f"{name}.123.partial").write_bytes(b"half a fi")
        raise UserError("it was killed")

    monkeypatch.setattr(export, "run_exporter", left)
    folder = make_model()
    for _ in range(2):
        with pytest.raises(UserError, match="it was killed"):
            ensure(folder, tmp_path)


def test_a_truncated_program_is_refused(program_copy: Path) -> None:
    with program_copy.open("r+b") as file:
        file.truncate(program_copy.stat().st_size // 2)
    with pytest.raises(UserError, match="corrupt or truncated: delete it to export it again"):
        open_program(program_copy)


def test_a_program_with_a_flipped_bit_is_refused(program_copy: Path) -> None:
    data = bytearray(program_copy.read_bytes())
    data[len(data) // 2] ^= 1
    program_copy.write_bytes(data)
    with pytest.raises(UserError, match="corrupt or truncated"):
        open_program(program_copy)


def test_a_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pte"
    path.write_bytes(b"not a program at all")
    path.with_suffix(".sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(UserError, match="is not a program that this runtime can load"):
        open_program(path)


def test_a_missing_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read program \S+: No such file"):
        open_program(tmp_path / "x.pte")


def test_a_program_without_its_digest_is_refused_and_said_to_be(program_copy: Path) -> None:
    program_copy.with_suffix(".sha256").unlink()
    with pytest.raises(UserError, match=r"has no digest beside it: delete it to export it again"):
        open_program(program_copy)
    program_copy.with_suffix(".sha256").write_bytes(b"\xff" * 64)
    with pytest.raises(UserError, match="corrupt or truncated"):
        open_program(program_copy)


def test_metadata_survives_the_program(program_copy: Path) -> None:
    metadata = read_metadata(open_program(program_copy), program_copy)
    assert metadata.precision == "8da8w"
    assert (metadata.max_seq_len, metadata.max_prefill_chunk) == (CONTEXT, CHUNK)
    assert (metadata.tap_layers, metadata.windows) == ((0, 1), (0,))


class WithoutKey:
    """A loaded program that lacks one constant method."""

    def __init__(self, program: Any, key: str) -> None:
        self.method_names = program.method_names - {key}
        self.load_method = program.load_method


@pytest.mark.parametrize("field", ProgramMetadata.__dataclass_fields__)
def test_a_missing_key_is_named(field: str, program_copy: Path) -> None:
    program: Any = WithoutKey(open_program(program_copy), f"get_{field}")
    with pytest.raises(UserError, match=f"lacks the metadata key get_{field}: export it again"):
        read_metadata(program, program_copy)


def test_a_program_that_was_written_without_a_key_is_refused_at_load(
    make_model: MakeModel,
    load_program: LoadProgram,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    complete = ProgramMetadata.constant_methods

    def incomplete(metadata: ProgramMetadata) -> dict[str, Any]:
        methods = complete(metadata)
        del methods["get_row_width"]
        return methods

    monkeypatch.setattr(ProgramMetadata, "constant_methods", incomplete)
    monkeypatch.setattr(
        export, "_export", export_in_this_process
    )  # in this process, where the key is missing
    with pytest.raises(UserError, match="lacks the metadata key get_row_width"):
        load_program(make_model(n_layers=1), "fp32", tap_layers=(0,), cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("model_hash", "precision", "message"),
    [("0" * 64, "8da8w", "model hash .* expected 0000"), (None, "fp32", "8da8w; expected fp32")],
)
def test_a_program_of_another_model_is_refused_with_both_values(
    model_hash: str | None, precision: str, message: str, program_copy: Path
) -> None:
    metadata = read_metadata(open_program(program_copy), program_copy)
    with pytest.raises(UserError, match=message):
        check_values(
            metadata,
            program_copy,
            {"model_hash": model_hash or metadata.model_hash, "precision": precision},
        )
