from splitspec.v1 import rows_pb2 as _rows_pb2
from splitspec.v1 import sampling_pb2 as _sampling_pb2
from splitspec.v1 import step_pb2 as _step_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftSampling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_SAMPLING_UNSPECIFIED: _ClassVar[DraftSampling]
    DRAFT_SAMPLING_ARGMAX: _ClassVar[DraftSampling]
    DRAFT_SAMPLING_COUPLED: _ClassVar[DraftSampling]
DRAFT_SAMPLING_UNSPECIFIED: DraftSampling
DRAFT_SAMPLING_ARGMAX: DraftSampling
DRAFT_SAMPLING_COUPLED: DraftSampling

class DrafterGetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrafterGetModelResponse(_message.Message):
    __slots__ = ("protocol_version", "method", "model_id", "model_hash", "vocab_size", "tokenizer_hash", "target_model_hash", "row_kind", "tap_layers", "row_width", "row_dtype", "max_draft_count", "max_context_length", "slot_count", "shared_memory_namespace")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    ROW_KIND_FIELD_NUMBER: _ClassVar[int]
    TAP_LAYERS_FIELD_NUMBER: _ClassVar[int]
    ROW_WIDTH_FIELD_NUMBER: _ClassVar[int]
    ROW_DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    method: str
    model_id: str
    model_hash: str
    vocab_size: int
    tokenizer_hash: str
    target_model_hash: str
    row_kind: _rows_pb2.RowKind
    tap_layers: _containers.RepeatedScalarFieldContainer[int]
    row_width: int
    row_dtype: _rows_pb2.RowDtype
    max_draft_count: int
    max_context_length: int
    slot_count: int
    shared_memory_namespace: str
    def __init__(self, protocol_version: _Optional[int] = ..., method: _Optional[str] = ..., model_id: _Optional[str] = ..., model_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_hash: _Optional[str] = ..., target_model_hash: _Optional[str] = ..., row_kind: _Optional[_Union[_rows_pb2.RowKind, str]] = ..., tap_layers: _Optional[_Iterable[int]] = ..., row_width: _Optional[int] = ..., row_dtype: _Optional[_Union[_rows_pb2.RowDtype, str]] = ..., max_draft_count: _Optional[int] = ..., max_context_length: _Optional[int] = ..., slot_count: _Optional[int] = ..., shared_memory_namespace: _Optional[str] = ...) -> None: ...

class DrafterRunStepsRequest(_message.Message):
    __slots__ = ("step", "items")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    step: int
    items: _containers.RepeatedCompositeFieldContainer[DraftItem]
    def __init__(self, step: _Optional[int] = ..., items: _Optional[_Iterable[_Union[DraftItem, _Mapping]]] = ...) -> None: ...

class DraftItem(_message.Message):
    __slots__ = ("session", "context_length", "traceparent", "open", "draft", "release")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    session: int
    context_length: int
    traceparent: str
    open: OpenDraftSession
    draft: Draft
    release: ReleaseDraftSession
    def __init__(self, session: _Optional[int] = ..., context_length: _Optional[int] = ..., traceparent: _Optional[str] = ..., open: _Optional[_Union[OpenDraftSession, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., release: _Optional[_Union[ReleaseDraftSession, _Mapping]] = ...) -> None: ...

class OpenDraftSession(_message.Message):
    __slots__ = ("sampling", "draft_sampling")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    sampling: _sampling_pb2.SamplingParameters
    draft_sampling: DraftSampling
    def __init__(self, sampling: _Optional[_Union[_sampling_pb2.SamplingParameters, _Mapping]] = ..., draft_sampling: _Optional[_Union[DraftSampling, str]] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("token_ids", "rows", "pending_token_id", "draft_count")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PENDING_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFT_COUNT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    rows: _rows_pb2.Rows
    pending_token_id: int
    draft_count: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., rows: _Optional[_Union[_rows_pb2.Rows, _Mapping]] = ..., pending_token_id: _Optional[int] = ..., draft_count: _Optional[int] = ...) -> None: ...

class ReleaseDraftSession(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrafterRunStepsResponse(_message.Message):
    __slots__ = ("step", "results", "timings")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    step: int
    results: _containers.RepeatedCompositeFieldContainer[DraftItemResult]
    timings: _step_pb2.StepTimings
    def __init__(self, step: _Optional[int] = ..., results: _Optional[_Iterable[_Union[DraftItemResult, _Mapping]]] = ..., timings: _Optional[_Union[_step_pb2.StepTimings, _Mapping]] = ...) -> None: ...

class DraftItemResult(_message.Message):
    __slots__ = ("session", "context_length", "error", "draft")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    session: int
    context_length: int
    error: _step_pb2.ItemError
    draft: DraftResult
    def __init__(self, session: _Optional[int] = ..., context_length: _Optional[int] = ..., error: _Optional[_Union[_step_pb2.ItemError, _Mapping]] = ..., draft: _Optional[_Union[DraftResult, _Mapping]] = ...) -> None: ...

class DraftResult(_message.Message):
    __slots__ = ("draft_token_ids",)
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, draft_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...
