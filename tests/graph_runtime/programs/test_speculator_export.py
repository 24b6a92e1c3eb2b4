"""What a speculator says about itself (E12), and what cannot be exported as one (E23)."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from graph_runtime.architecture import read_config
from graph_runtime.eagle3.checkpoint import Eagle3Source, load_checkpoint
from splitspec.errors import UserError
from tests.eagle3_copy import VOCAB_SIZE, write_copy_head, write_copy_target
from tests.graph_runtime.programs.speculators import export
from tests.tiny import write_tiny_model

pytest.importorskip("executorch")
pytestmark = pytest.mark.usefixtures("exported_here")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of the synthetic target and of the head that copies it."""
    folder = tmp_path_factory.mktemp("copy")
    return write_copy_target(folder / "target"), write_copy_head(folder / "head")


def test_e12_a_missing_metadata_key_is_named(copy: tuple[Path, Path], program_cache: Path) -> None:
    from graph_runtime.programs.load import open_program
    from graph_runtime.programs.speculator_metadata import (
        SpeculatorMetadata,
        read_speculator_metadata,
    )

    path = export(*copy, program_cache)
    program: Any = open_program(path)
    assert read_speculator_metadata(program, path).chain_len == 3
    keys = [f"get_{field.name}" for field in fields(SpeculatorMetadata)]
    assert {"get_chain_len", "get_max_prefill_chunk", "get_min_prefill_chunk"} <= {*keys}
    assert {*keys, "use_kv_cache", "use_sdpa_with_kv_cache", "enable_dynamic_shape"} < {
        *program.method_names
    }
    for key in keys:
        with pytest.raises(UserError, match=rf"lacks the metadata key {key}\b"):
            read_speculator_metadata(Without(program, key), path)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("get_format_version", 1, "2 to 2"),
        ("get_chain_len", 8, "1 to 7"),
        ("get_max_prefill_chunk", 80, "1 to 79"),
        ("get_min_prefill_chunk", 41, "1 to 40"),
    ],
)
def test_a_value_that_no_speculator_has_is_refused(
    key: str, value: int, expected: str, copy: tuple[Path, Path], program_cache: Path
) -> None:
    from graph_runtime.programs.load import open_program
    from graph_runtime.programs.speculator_metadata import read_speculator_metadata

    path = export(*copy, program_cache)
    program: Any = open_program(path)
    with pytest.raises(UserError, match=f"{key} is {value}; expected {expected}"):
        read_speculator_metadata(Saying(program, key, value), path)


class Saying:
    """A program that says something else about itself."""

    def __init__(self, program: Any, key: str, value: int) -> None:
        self.method_names = program.method_names
        self._program, self._key, self._value = program, key, value

    def load_method(self, name: str) -> Any:
        """Return a method; the one key's says the other value."""
        return self if name == self._key else self._program.load_method(name)

    def execute(self, _inputs: list[Any]) -> list[Any]:
        """Return the other value."""
        return [self._value]


class Without:
    """A program without one of its methods."""

    def __init__(self, program: Any, name: str) -> None:
        self.method_names = program.method_names - {name}
        self.load_method = program.load_method


def test_a_program_that_is_no_speculator_is_refused(
    copy: tuple[Path, Path], program_cache: Path
) -> None:
    from graph_runtime.programs.load import open_program
    from graph_runtime.programs.speculator_metadata import read_speculator_metadata
    from graph_runtime.programs.speculator_runner import Speculator

    path = export(*copy, program_cache)
    program: Any = open_program(path)
    metadata = read_speculator_metadata(program, path)
    with pytest.raises(UserError, match="has no method draft_decode"):
        Speculator(Without(program, "draft_decode"), metadata, path)


class Broken:
    """A program whose methods do not load."""

    def __init__(self, program: Any) -> None:
        self.method_names = program.method_names

    def load_method(self, name: str) -> Any:
        """Fail as the runtime does."""
        raise RuntimeError(f"error 0x20: cannot load {name}")


def test_a_program_whose_methods_do_not_load_is_one_line(
    copy: tuple[Path, Path], program_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graph_runtime.programs import speculator_load

    path = export(*copy, program_cache)
    opened = speculator_load.open_program
    monkeypatch.setattr(speculator_load, "open_program", lambda *a, **k: Broken(opened(*a, **k)))
    with pytest.raises(UserError, match=r"program \S+pte is corrupt or of another runtime: error"):
        speculator_load.load_speculator(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chain": 0}, "chain is 0; expected 1 to 7"),
        ({"chain": 8}, "chain is 8; expected 1 to 7"),
        ({"chain": 4, "max_context_length": 5}, "chain is 4; expected 1 to 3 in a context of 5"),
        ({"max_prefill_chunk": 1}, "max prefill chunk is 1 .* expected at least 2"),
        ({"max_context_length": 2, "chain": 1}, "chain is 1; expected 1 to 0"),
        ({"max_context_length": 4096}, "max context length is 4096; expected 1 to the model's"),
        ({"precision": "int3"}, "precision is 'int3'; expected one of fp32"),
        ({"draft_precision": "q4_1"}, "draft precision is 'q4_1'; expected one of fp32"),
    ],
)
def test_e23_what_cannot_be_exported_is_refused_before_it_starts(
    arguments: dict[str, Any], message: str, copy: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        export(*copy, tmp_path, **arguments)


@pytest.mark.parametrize(
    ("context", "asked", "chunk"), [(80, 512, 79), (80, 80, 79), (80, 79, 79), (80, 40, 40)]
)
def test_the_longest_prompt_is_what_the_context_leaves_beside_one_token_of_the_answer(
    context: int,
    asked: int,
    chunk: int,
    copy: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from graph_runtime.programs import speculator_export

    keys: list[speculator_export.SpeculatorKey] = []

    def keep(key: Any, _places: object, **_more: object) -> Path:
        keys.append(key)
        return tmp_path

    monkeypatch.setattr(speculator_export, "ensure", keep)
    export(*copy, tmp_path, max_context_length=context, max_prefill_chunk=asked)
    (key,) = keys
    assert (key.max_context_length, key.max_prefill_chunk) == (context, chunk)


def test_e23_a_draft_of_another_hidden_size_is_refused(
    copy: tuple[Path, Path], tmp_path: Path
) -> None:
    from graph_runtime.programs.speculator_export import check_pair

    other = write_tiny_model(tmp_path / "target", vocab_size=VOCAB_SIZE)
    with pytest.raises(UserError, match=r"fc.weight is \[128, 384\].* of width 64"):
        export(other, copy[1], tmp_path)
    checkpoint = load_checkpoint(Eagle3Source(folder=copy[1], target=copy[0]), tmp_path)
    for name in ("target_hidden_size", "vocab_size"):
        wrong = replace(checkpoint.config, **{name: 72})
        with pytest.raises(UserError, match=f"the draft's {name} is 72; the target's is"):
            check_pair(read_config(copy[0]), replace(checkpoint, config=wrong))


@pytest.mark.parametrize("outside", [-1, VOCAB_SIZE])
def test_e23_draft_ids_outside_the_vocabulary_are_refused(
    outside: int, copy: tuple[Path, Path], tmp_path: Path
) -> None:
    from graph_runtime.programs.speculator_export import check_pair

    checkpoint = load_checkpoint(Eagle3Source(folder=copy[1], target=copy[0]), tmp_path)
    config = read_config(copy[0])
    check_pair(config, checkpoint)
    assert checkpoint.target_ids is not None
    ids = checkpoint.target_ids.clone()
    ids[7] = outside
    with pytest.raises(UserError, match=f"maps to {outside}; the target's ids are 0..299"):
        check_pair(config, replace(checkpoint, target_ids=ids))
