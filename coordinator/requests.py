"""What a user may ask for: every field checked, nothing ignored."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from coordinator.template import ChatTemplate
from coordinator.text import ModelText
from splitspec.checks import check_sampling, refuse_unknown_within
from splitspec.errors import ContextFull, InvalidArgument
from splitspec.v1 import generation_pb2, sampling_pb2

MAX_EXTRA_BYTES = 1024 * 1024
"""Bytes of a request beside its prompt, at most."""
MAX_CHAR_BYTES = 4
MAX_STOP_COUNT = 16
MAX_STOP_LENGTH = 1000
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True)
class ServedLimits:
    """What bounds a request, from the verifier's handshake and the configuration."""

    vocab_size: int
    max_context_length: int
    max_draft_count: int
    default_draft_count: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked request."""

    prompt_ids: list[int]
    output_limit: int
    """Tokens to emit at most: max_tokens, or what the context holds after the prompt."""
    sampling: sampling_pb2.SamplingParameters
    """As sent to both services; the seed is always set."""
    draft_count: int
    stops: tuple[str, ...]
    stop_token_ids: frozenset[int]
    is_chat: bool


def plan_request(
    request: generation_pb2.GenerateRequest,
    *,
    text: ModelText,
    template: ChatTemplate,
    limits: ServedLimits,
) -> Plan:
    """Check every field of `request`.

    Raises:
        InvalidArgument: names the first field that is wrong, its value and what is accepted.
        ContextFull: the prompt leaves no room for an output token.
    """
    # Megabytes are refused unread: looking at them would hold up every other request.
    least = (request.ByteSize() - MAX_EXTRA_BYTES) // (MAX_CHAR_BYTES * text.longest_token)
    _check_room(least, limits, "at least ")
    refuse_unknown_within("request", request)
    check_sampling(request.sampling)
    max_tokens = request.max_tokens if request.HasField("max_tokens") else None
    if max_tokens == 0:
        raise InvalidArgument.of("max_tokens", 0, "at least 1")
    draft_count = limits.default_draft_count
    if request.HasField("draft_count"):
        draft_count = request.draft_count
        if draft_count > limits.max_draft_count:
            raise InvalidArgument.of("draft_count", draft_count, f"0..{limits.max_draft_count}")
    _check_stops(request, limits.vocab_size)
    prompt_ids = _prompt_ids(request, text, template, limits)
    room = limits.max_context_length - len(prompt_ids)
    stop_token_ids = set(request.stop_token_ids)
    if not request.ignore_eos:
        stop_token_ids |= text.eos_token_ids
    return Plan(
        prompt_ids=prompt_ids,
        output_limit=room if max_tokens is None else min(room, max_tokens),
        sampling=seeded(request.sampling),
        draft_count=draft_count,
        stops=tuple(request.stop),
        stop_token_ids=frozenset(stop_token_ids),
        is_chat=request.WhichOneof("prompt") == "conversation",
    )


def seeded(sampling: sampling_pb2.SamplingParameters) -> sampling_pb2.SamplingParameters:
    """Return a copy of checked parameters with a seed; draw one if there is none."""
    copy = sampling_pb2.SamplingParameters()
    copy.CopyFrom(sampling)
    if not copy.HasField("seed"):
        copy.seed = secrets.randbits(64)
    return copy


def _check_stops(request: generation_pb2.GenerateRequest, vocab_size: int) -> None:
    if len(request.stop) > MAX_STOP_COUNT:
        raise InvalidArgument.of("stop", f"{len(request.stop)} strings", f"<= {MAX_STOP_COUNT}")
    for index, stop in enumerate(request.stop):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            size = f"{len(stop)} characters"
            raise InvalidArgument.of(f"stop[{index}]", size, f"1..{MAX_STOP_LENGTH} characters")
    for index, token in enumerate(request.stop_token_ids):
        if token >= vocab_size:
            raise InvalidArgument.of(f"stop_token_ids[{index}]", token, f"0..{vocab_size - 1}")


def _prompt_ids(
    request: generation_pb2.GenerateRequest,
    text: ModelText,
    template: ChatTemplate,
    limits: ServedLimits,
) -> list[int]:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidArgument.of("prompt", "absent", "text, conversation or token_ids")
    if kind == "token_ids":
        ids = list(request.token_ids.ids)
        _check_ids("token_ids.ids", ids, limits.vocab_size)
    elif kind == "text":
        ids = _encode(request.text, True, text, limits)
    else:
        ids = _encode(_rendered(request.conversation, template), False, text, limits)
    if not ids:
        raise InvalidArgument.of(f"prompt {kind}", "empty", "at least one token")
    _check_ids(f"prompt {kind}", ids, limits.vocab_size)
    _check_room(len(ids), limits)
    return ids


def _check_room(count: int, limits: ServedLimits, at_least: str = "") -> None:
    longest = limits.max_context_length
    if count >= longest:
        raise ContextFull(
            f"the prompt has {at_least}{count} tokens; the context holds {longest}, "
            "one of them for the answer",
            field="prompt",
            value=count,
            expected=f"1..{longest - 1}",
        )


def _encode(prompt: str, specials: bool, text: ModelText, limits: ServedLimits) -> list[int]:
    _check_room(len(prompt) // text.longest_token, limits, "at least ")
    return text.encode(prompt, add_special_tokens=specials)


def _check_ids(field: str, ids: list[int], vocab_size: int) -> None:
    largest: Any = max(ids, default=0)
    if largest >= vocab_size:
        raise InvalidArgument.of(f"{field}[{ids.index(largest)}]", largest, f"0..{vocab_size - 1}")


def _rendered(conversation: generation_pb2.Conversation, template: ChatTemplate) -> str:
    if not conversation.messages:
        raise InvalidArgument.of("conversation.messages", "empty", "at least one message")
    messages = []
    for index, message in enumerate(conversation.messages):
        if message.role not in ROLES:
            field = f"conversation.messages[{index}].role"
            raise InvalidArgument.of(field, repr(message.role), ", ".join(ROLES))
        messages.append({"role": message.role, "content": message.content})
    return template.render(messages)
