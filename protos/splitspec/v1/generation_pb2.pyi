import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from splitspec.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("text", "conversation", "token_ids", "sampling", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "draft_count")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_COUNT_FIELD_NUMBER: _ClassVar[int]
    text: str
    conversation: Conversation
    token_ids: TokenIds
    sampling: _sampling_pb2.SamplingParameters
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    draft_count: int
    def __init__(self, text: _Optional[str] = ..., conversation: _Optional[_Union[Conversation, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParameters, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., draft_count: _Optional[int] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token_ids", "text_delta", "finish")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text_delta: str
    finish: Finish
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text_delta: _Optional[str] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "seed", "statistics")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    seed: int
    statistics: GenerationStatistics
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., seed: _Optional[int] = ..., statistics: _Optional[_Union[GenerationStatistics, _Mapping]] = ...) -> None: ...

class GenerationStatistics(_message.Message):
    __slots__ = ("prompt_token_count", "output_token_count", "round_count", "target_only_round_count", "draft_token_count", "accepted_token_count", "acceptance_length_counts", "replay_count", "time_to_first_token", "total_time", "tokens_per_second", "mean_acceptance_length", "round_times", "draft_method")
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROUND_COUNT_FIELD_NUMBER: _ClassVar[int]
    TARGET_ONLY_ROUND_COUNT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_LENGTH_COUNTS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_COUNT_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TIME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ROUND_TIMES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_METHOD_FIELD_NUMBER: _ClassVar[int]
    prompt_token_count: int
    output_token_count: int
    round_count: int
    target_only_round_count: int
    draft_token_count: int
    accepted_token_count: int
    acceptance_length_counts: _containers.RepeatedScalarFieldContainer[int]
    replay_count: int
    time_to_first_token: _duration_pb2.Duration
    total_time: _duration_pb2.Duration
    tokens_per_second: float
    mean_acceptance_length: float
    round_times: RoundTimes
    draft_method: str
    def __init__(self, prompt_token_count: _Optional[int] = ..., output_token_count: _Optional[int] = ..., round_count: _Optional[int] = ..., target_only_round_count: _Optional[int] = ..., draft_token_count: _Optional[int] = ..., accepted_token_count: _Optional[int] = ..., acceptance_length_counts: _Optional[_Iterable[int]] = ..., replay_count: _Optional[int] = ..., time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., tokens_per_second: _Optional[float] = ..., mean_acceptance_length: _Optional[float] = ..., round_times: _Optional[_Union[RoundTimes, _Mapping]] = ..., draft_method: _Optional[str] = ...) -> None: ...

class RoundTimes(_message.Message):
    __slots__ = ("draft", "verify", "wire", "coordinator")
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    draft: _duration_pb2.Duration
    verify: _duration_pb2.Duration
    wire: _duration_pb2.Duration
    coordinator: _duration_pb2.Duration
    def __init__(self, draft: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., verify: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., wire: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., coordinator: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GenerationGetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GenerationGetModelResponse(_message.Message):
    __slots__ = ("protocol_version", "model_id", "model_hash", "max_context_length", "vocab_size", "draft_method", "max_draft_count", "precision", "slot_count")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_METHOD_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_COUNT_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model_id: str
    model_hash: str
    max_context_length: int
    vocab_size: int
    draft_method: str
    max_draft_count: int
    precision: str
    slot_count: int
    def __init__(self, protocol_version: _Optional[int] = ..., model_id: _Optional[str] = ..., model_hash: _Optional[str] = ..., max_context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., draft_method: _Optional[str] = ..., max_draft_count: _Optional[int] = ..., precision: _Optional[str] = ..., slot_count: _Optional[int] = ...) -> None: ...
