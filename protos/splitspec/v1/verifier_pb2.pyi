from splitspec.v1 import rows_pb2 as _rows_pb2
from splitspec.v1 import sampling_pb2 as _sampling_pb2
from splitspec.v1 import step_pb2 as _step_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifierGetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifierGetModelResponse(_message.Message):
    __slots__ = ("protocol_version", "model_id", "model_hash", "tokenizer_hash", "vocab_size", "tap_layers", "row_layouts", "max_draft_count", "min_prefill_chunk", "max_prefill_chunk", "max_context_length", "slot_count", "precision", "runtime", "shared_memory_namespace", "fused_model_hash")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TAP_LAYERS_FIELD_NUMBER: _ClassVar[int]
    ROW_LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_COUNT_FIELD_NUMBER: _ClassVar[int]
    MIN_PREFILL_CHUNK_FIELD_NUMBER: _ClassVar[int]
    MAX_PREFILL_CHUNK_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FUSED_MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model_id: str
    model_hash: str
    tokenizer_hash: str
    vocab_size: int
    tap_layers: _containers.RepeatedScalarFieldContainer[int]
    row_layouts: _containers.RepeatedCompositeFieldContainer[RowLayout]
    max_draft_count: int
    min_prefill_chunk: int
    max_prefill_chunk: int
    max_context_length: int
    slot_count: int
    precision: str
    runtime: str
    shared_memory_namespace: str
    fused_model_hash: str
    def __init__(self, protocol_version: _Optional[int] = ..., model_id: _Optional[str] = ..., model_hash: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tap_layers: _Optional[_Iterable[int]] = ..., row_layouts: _Optional[_Iterable[_Union[RowLayout, _Mapping]]] = ..., max_draft_count: _Optional[int] = ..., min_prefill_chunk: _Optional[int] = ..., max_prefill_chunk: _Optional[int] = ..., max_context_length: _Optional[int] = ..., slot_count: _Optional[int] = ..., precision: _Optional[str] = ..., runtime: _Optional[str] = ..., shared_memory_namespace: _Optional[str] = ..., fused_model_hash: _Optional[str] = ...) -> None: ...

class RowLayout(_message.Message):
    __slots__ = ("kind", "width", "dtype")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    kind: _rows_pb2.RowKind
    width: int
    dtype: _rows_pb2.RowDtype
    def __init__(self, kind: _Optional[_Union[_rows_pb2.RowKind, str]] = ..., width: _Optional[int] = ..., dtype: _Optional[_Union[_rows_pb2.RowDtype, str]] = ...) -> None: ...

class VerifierRunStepsRequest(_message.Message):
    __slots__ = ("step", "items")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    step: int
    items: _containers.RepeatedCompositeFieldContainer[VerifyItem]
    def __init__(self, step: _Optional[int] = ..., items: _Optional[_Iterable[_Union[VerifyItem, _Mapping]]] = ...) -> None: ...

class VerifyItem(_message.Message):
    __slots__ = ("session", "committed_length", "traceparent", "open", "prefill", "verify", "fork", "release")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    session: int
    committed_length: int
    traceparent: str
    open: OpenSession
    prefill: PrefillChunk
    verify: VerifyWindow
    fork: ForkSession
    release: ReleaseSession
    def __init__(self, session: _Optional[int] = ..., committed_length: _Optional[int] = ..., traceparent: _Optional[str] = ..., open: _Optional[_Union[OpenSession, _Mapping]] = ..., prefill: _Optional[_Union[PrefillChunk, _Mapping]] = ..., verify: _Optional[_Union[VerifyWindow, _Mapping]] = ..., fork: _Optional[_Union[ForkSession, _Mapping]] = ..., release: _Optional[_Union[ReleaseSession, _Mapping]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("sampling", "row_kind")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROW_KIND_FIELD_NUMBER: _ClassVar[int]
    sampling: _sampling_pb2.SamplingParameters
    row_kind: _rows_pb2.RowKind
    def __init__(self, sampling: _Optional[_Union[_sampling_pb2.SamplingParameters, _Mapping]] = ..., row_kind: _Optional[_Union[_rows_pb2.RowKind, str]] = ...) -> None: ...

class PrefillChunk(_message.Message):
    __slots__ = ("token_ids", "final")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    final: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., final: bool = ...) -> None: ...

class VerifyWindow(_message.Message):
    __slots__ = ("pending_token_id", "draft_token_ids")
    PENDING_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    pending_token_id: int
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pending_token_id: _Optional[int] = ..., draft_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ForkSession(_message.Message):
    __slots__ = ("source_session", "length", "open")
    SOURCE_SESSION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    source_session: int
    length: int
    open: OpenSession
    def __init__(self, source_session: _Optional[int] = ..., length: _Optional[int] = ..., open: _Optional[_Union[OpenSession, _Mapping]] = ...) -> None: ...

class ReleaseSession(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifierRunStepsResponse(_message.Message):
    __slots__ = ("step", "results", "timings")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    step: int
    results: _containers.RepeatedCompositeFieldContainer[VerifyItemResult]
    timings: _step_pb2.StepTimings
    def __init__(self, step: _Optional[int] = ..., results: _Optional[_Iterable[_Union[VerifyItemResult, _Mapping]]] = ..., timings: _Optional[_Union[_step_pb2.StepTimings, _Mapping]] = ...) -> None: ...

class VerifyItemResult(_message.Message):
    __slots__ = ("session", "committed_length", "error", "prefill", "verify")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    session: int
    committed_length: int
    error: _step_pb2.ItemError
    prefill: PrefillResult
    verify: VerifyResult
    def __init__(self, session: _Optional[int] = ..., committed_length: _Optional[int] = ..., error: _Optional[_Union[_step_pb2.ItemError, _Mapping]] = ..., prefill: _Optional[_Union[PrefillResult, _Mapping]] = ..., verify: _Optional[_Union[VerifyResult, _Mapping]] = ...) -> None: ...

class PrefillResult(_message.Message):
    __slots__ = ("bonus_token_id", "rows")
    BONUS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    bonus_token_id: int
    rows: _rows_pb2.Rows
    def __init__(self, bonus_token_id: _Optional[int] = ..., rows: _Optional[_Union[_rows_pb2.Rows, _Mapping]] = ...) -> None: ...

class VerifyResult(_message.Message):
    __slots__ = ("accepted_count", "bonus_token_id", "rows")
    ACCEPTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    BONUS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    accepted_count: int
    bonus_token_id: int
    rows: _rows_pb2.Rows
    def __init__(self, accepted_count: _Optional[int] = ..., bonus_token_id: _Optional[int] = ..., rows: _Optional[_Union[_rows_pb2.Rows, _Mapping]] = ...) -> None: ...
