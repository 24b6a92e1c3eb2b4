"""Every field of a request is checked; nothing is ignored, and the message names what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.requests import Plan, ServedLimits, plan_request
from coordinator.template import ChatTemplate
from coordinator.text import ModelText
from splitspec.errors import ContextFull, InvalidArgument
from splitspec.v1 import generation_pb2 as pb
from tests.tiny import write_tiny_tokenizer

LIMITS = ServedLimits(
    vocab_size=300, max_context_length=128, max_draft_count=7, default_draft_count=5
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    folder = tmp_path_factory.mktemp("requests")
    write_tiny_tokenizer(folder)
    return ModelText.load(folder)


def _plan(model: ModelText, message: pb.GenerateRequest | None = None, /, **fields: Any) -> Plan:
    message = message or pb.GenerateRequest(**fields)
    return plan_request(message, text=model, template=ChatTemplate(model), limits=LIMITS)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "prompt"),
        ({"text": ""}, "prompt text"),
        ({"token_ids": {}}, "token_ids"),
        ({"token_ids": {"ids": [5, 300]}}, r"token_ids\.ids\[1\] is 300; expected 0\.\.299"),
        ({"conversation": {}}, "messages"),
        ({"conversation": {"messages": [{"role": "robot"}]}}, r"messages\[0\]\.role is 'robot'"),
        ({"text": "a", "sampling": {"temperature": -0.1}}, "temperature"),
        ({"text": "a", "sampling": {"temperature": 100.1}}, r"temperature is 100\.1.*0\.\.100"),
        ({"text": "a", "sampling": {"temperature": float("nan")}}, "temperature"),
        ({"text": "a", "sampling": {"temperature": float("inf")}}, "temperature"),
        ({"text": "a", "sampling": {"top_p": 0.0}}, "top_p"),
        ({"text": "a", "sampling": {"top_p": 1.01}}, "top_p"),
        ({"text": "a", "sampling": {"min_p": -0.01}}, "min_p"),
        ({"text": "a", "sampling": {"frequency_penalty": 0.0}}, "frequency_penalty"),
        ({"text": "a", "sampling": {"presence_penalty": 1.0}}, "presence_penalty"),
        ({"text": "a", "sampling": {"repetition_penalty": 1.0}}, "repetition_penalty"),
        ({"text": "a", "sampling": {"logit_bias": {1: 0.0}}}, "logit_bias"),
        ({"text": "a", "sampling": {"grammar": ""}}, "grammar"),
        ({"text": "a", "sampling": {"min_tokens": 0}}, "min_tokens"),
        ({"text": "a", "max_tokens": 0}, "max_tokens"),
        ({"text": "a", "stop": ["a"] * 17}, "stop is 17 strings"),
        ({"text": "a", "stop": ["a", ""]}, r"stop\[1\]"),
        ({"text": "a", "stop": ["a" * 1001]}, r"stop\[0\]"),
        ({"text": "a", "stop_token_ids": [300]}, r"stop_token_ids\[0\]"),
        ({"text": "a", "draft_count": 8}, r"draft_count is 8; expected 0\.\.7"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    text: ModelText, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        _plan(text, **fields)


@pytest.mark.parametrize("path", ["", "sampling", "conversation.messages", "token_ids"])
def test_an_unknown_field_is_refused_wherever_it_is(text: ModelText, path: str) -> None:
    unknown = bytes([0xF8, 0x3F, 0x01])  # field 1023, a varint
    message = pb.GenerateRequest(text="a")
    inner: Any = message
    if path == "sampling":
        inner = message.sampling
    elif path == "token_ids":
        message.token_ids.ids.append(5)
        inner = message.token_ids
    elif path:
        inner = message.conversation.messages.add(role="user", content="a")
    inner.MergeFromString(unknown)
    with pytest.raises(InvalidArgument, match=rf"^request\.?{path} is .*field 1023"):
        _plan(text, message)


def test_a_prompt_needs_room_for_one_token(text: ModelText) -> None:
    assert _plan(text, token_ids=pb.TokenIds(ids=[5] * 127)).output_limit == 1
    with pytest.raises(ContextFull, match=r"128 tokens.*128"):
        _plan(text, token_ids=pb.TokenIds(ids=[5] * 128))


def test_a_text_that_cannot_fit_is_refused_unread(text: ModelText) -> None:
    for fields in (
        {"text": "a" * 4_000_000},
        {"token_ids": pb.TokenIds(ids=[5] * 4_000_000)},
        {"conversation": {"messages": [{"role": "user", "content": "a" * 99}] * 40_000}},
    ):
        with pytest.raises(ContextFull, match="at least"):
            _plan(text, **fields)


def test_defaults_are_greedy_all_the_context_and_the_configured_draft_count(
    text: ModelText,
) -> None:
    plan = _plan(text, text="abc")
    assert plan.output_limit == 128 - len(plan.prompt_ids)
    assert plan.draft_count == 5
    assert not plan.sampling.HasField("temperature")
    assert plan.sampling.HasField("seed")
    assert plan.stop_token_ids == {2}


def test_a_seed_is_kept_and_an_absent_one_is_drawn_afresh(text: ModelText) -> None:
    seeds = {_plan(text, text="a").sampling.seed for _ in range(4)}
    assert len(seeds) == 4
    assert max(seeds) > 2**32
    assert _plan(text, text="a", sampling={"seed": 2**64 - 1}).sampling.seed == 2**64 - 1
    assert _plan(text, text="a", sampling={"seed": 0}).sampling.seed == 0


def test_stop_tokens_join_the_models_own_unless_told_otherwise(text: ModelText) -> None:
    assert _plan(text, text="a", stop_token_ids=[9]).stop_token_ids == {2, 9}
    assert _plan(text, text="a", stop_token_ids=[9], ignore_eos=True).stop_token_ids == {9}


def test_a_conversation_is_rendered_and_tokenized_without_more_special_tokens(
    text: ModelText,
) -> None:
    plan = _plan(text, conversation={"messages": [{"role": "user", "content": "hi"}]})
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert plan.prompt_ids == text.tokenizer.encode(rendered, add_special_tokens=False).ids
    assert plan.is_chat
