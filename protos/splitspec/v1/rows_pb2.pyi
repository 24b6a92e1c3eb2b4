from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RowKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_KIND_UNSPECIFIED: _ClassVar[RowKind]
    ROW_KIND_NONE: _ClassVar[RowKind]
    ROW_KIND_RAW_TAPS: _ClassVar[RowKind]
    ROW_KIND_FUSED: _ClassVar[RowKind]

class RowDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_DTYPE_UNSPECIFIED: _ClassVar[RowDtype]
    ROW_DTYPE_FLOAT32: _ClassVar[RowDtype]
    ROW_DTYPE_BFLOAT16: _ClassVar[RowDtype]
    ROW_DTYPE_FLOAT16: _ClassVar[RowDtype]
ROW_KIND_UNSPECIFIED: RowKind
ROW_KIND_NONE: RowKind
ROW_KIND_RAW_TAPS: RowKind
ROW_KIND_FUSED: RowKind
ROW_DTYPE_UNSPECIFIED: RowDtype
ROW_DTYPE_FLOAT32: RowDtype
ROW_DTYPE_BFLOAT16: RowDtype
ROW_DTYPE_FLOAT16: RowDtype

class Rows(_message.Message):
    __slots__ = ("kind", "dtype", "width", "start", "count", "inline", "shared_memory")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    kind: RowKind
    dtype: RowDtype
    width: int
    start: int
    count: int
    inline: bytes
    shared_memory: SharedMemoryRegion
    def __init__(self, kind: _Optional[_Union[RowKind, str]] = ..., dtype: _Optional[_Union[RowDtype, str]] = ..., width: _Optional[int] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., inline: _Optional[bytes] = ..., shared_memory: _Optional[_Union[SharedMemoryRegion, _Mapping]] = ...) -> None: ...

class SharedMemoryRegion(_message.Message):
    __slots__ = ("name", "offset_bytes", "length_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset_bytes: int
    length_bytes: int
    def __init__(self, name: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., length_bytes: _Optional[int] = ...) -> None: ...
