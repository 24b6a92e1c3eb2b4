"""Contract prose: every service, rpc, message, field, enum, value and oneof has a comment."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

PROTOS = Path(__file__).parents[2] / "protos"
INCLUDES = [f"-I{PROTOS}", f"-I{resources.files('grpc_tools') / '_proto'}"]
FILE = descriptor_pb2.FileDescriptorProto
MESSAGE = descriptor_pb2.DescriptorProto
ENUM = descriptor_pb2.EnumDescriptorProto
SERVICE = descriptor_pb2.ServiceDescriptorProto


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[descriptor_pb2.FileDescriptorProto]:
    """Parse the protos with their comments."""
    out = tmp_path_factory.mktemp("descriptors") / "all.binpb"
    names = [str(file.relative_to(PROTOS)) for file in PROTOS.glob("splitspec/v1/*.proto")]
    flags = [*INCLUDES, "--include_source_info", f"--descriptor_set_out={out}"]
    assert protoc.main(["protoc", *flags, *names]) == 0
    return list(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file)


Path_ = tuple[int, ...]


def _commented(file: descriptor_pb2.FileDescriptorProto) -> set[Path_]:
    return {
        tuple(location.path)
        for location in file.source_code_info.location
        if location.leading_comments.strip() or location.trailing_comments.strip()
    }


def _walk(file: descriptor_pb2.FileDescriptorProto) -> dict[str, Path_]:
    """Return the source path of everything that needs a comment, by name."""
    found: dict[str, Path_] = {}
    for i, service in enumerate(file.service):
        path = (FILE.SERVICE_FIELD_NUMBER, i)
        found[service.name] = path
        for j, method in enumerate(service.method):
            name = f"{service.name}.{method.name}"
            found[name] = (*path, SERVICE.METHOD_FIELD_NUMBER, j)
    for i, enum in enumerate(file.enum_type):
        _walk_enum(enum, (FILE.ENUM_TYPE_FIELD_NUMBER, i), "", found)
    for i, message in enumerate(file.message_type):
        _walk_message(message, (FILE.MESSAGE_TYPE_FIELD_NUMBER, i), "", found)
    return found


def _walk_message(
    message: descriptor_pb2.DescriptorProto, path: Path_, prefix: str, found: dict[str, Path_]
) -> None:
    name = prefix + message.name
    found[name] = path
    for i, field in enumerate(message.field):
        found[f"{name}.{field.name}"] = (*path, MESSAGE.FIELD_FIELD_NUMBER, i)
    synthetic = {f.oneof_index for f in message.field if f.proto3_optional}
    for i, oneof in enumerate(message.oneof_decl):
        if i not in synthetic:
            found[f"{name}.{oneof.name}"] = (*path, MESSAGE.ONEOF_DECL_FIELD_NUMBER, i)
    for i, enum in enumerate(message.enum_type):
        _walk_enum(enum, (*path, MESSAGE.ENUM_TYPE_FIELD_NUMBER, i), f"{name}.", found)
    for i, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            _walk_message(nested, (*path, MESSAGE.NESTED_TYPE_FIELD_NUMBER, i), f"{name}.", found)


def _walk_enum(
    enum: descriptor_pb2.EnumDescriptorProto, path: Path_, prefix: str, found: dict[str, Path_]
) -> None:
    found[prefix + enum.name] = path
    for i, value in enumerate(enum.value):
        found[f"{prefix}{enum.name}.{value.name}"] = (*path, ENUM.VALUE_FIELD_NUMBER, i)


def test_everything_in_the_protos_has_a_comment(
    files: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    names: set[str] = set()
    for file in files:
        found, commented = _walk(file), _commented(file)
        assert [name for name, path in found.items() if path not in commented] == []
        names |= found.keys()
    # Guard against a walk that finds nothing.
    assert {"Drafter.RunSteps", "DraftItem.action", "RowKind.ROW_KIND_NONE", "Rows.start"} <= names
    assert len(names) > 150


def _fields(message: descriptor_pb2.DescriptorProto) -> list[str]:
    nested = [name for inner in message.nested_type for name in _fields(inner)]
    return [field.name for field in message.field] + nested


def test_fields_are_counts_not_num_and_use_the_glossarys_words(
    files: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    names = [name for file in files for message in file.message_type for name in _fields(message)]
    assert len(names) > 100
    assert [name for name in names if name.startswith("num_")] == []
    assert set(names) & {"acc_len", "accept_len", "bs", "batch_size", "block_size"} == set()


def test_the_first_value_of_every_enum_is_unspecified(
    files: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    enums = [enum for file in files for enum in file.enum_type]
    assert enums
    for enum in enums:
        assert enum.value[0].number == 0
        assert enum.value[0].name.endswith("_UNSPECIFIED")


def test_every_rpc_has_a_request_and_a_response_of_its_own(
    files: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    messages = [
        kind.rpartition(".")[2]
        for file in files
        for service in file.service
        for method in service.method
        for kind in (method.input_type, method.output_type)
    ]
    assert len(set(messages)) == len(messages) >= 12
    assert all(name.endswith(("Request", "Response")) for name in messages)
