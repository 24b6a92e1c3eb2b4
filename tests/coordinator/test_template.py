"""Chat templates run as models expect them, in a sandbox, and refuse with one line."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from coordinator.template import ChatTemplate
from coordinator.text import ModelText
from splitspec.errors import InvalidArgument, UserError
from tests.tiny import write_tiny_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    folder = tmp_path_factory.mktemp("template")
    write_tiny_tokenizer(folder)
    return ModelText.load(folder)


def _render(text: ModelText, template: str, messages: list[dict[str, str]] = HELLO) -> str:
    return ChatTemplate(replace(text, chat_template=template)).render(messages)


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ bos_token }}{% for m in messages %}\n  {%- if m.role == 'user' %}U{% endif %}\n"
        "{{ m['content'] | trim }}{{ eos_token }}{% endfor %}\n{%- if add_generation_prompt -%}\nA:"
        "{% endif %}",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m | tojson }}"
        "{% endfor %}{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}",
    ],
)
def test_a_template_renders_as_in_transformers(
    tmp_path: Path, text: ModelText, template: str | None
) -> None:
    write_tiny_tokenizer(tmp_path)
    messages = [
        {"role": "system", "content": "<be> & kind"},
        {"role": "user", "content": "hé "},
    ]
    template = template or text.chat_template
    assert template is not None
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), **text.special_tokens
    )
    expected = reference.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    assert _render(text, template, messages) == expected


def test_raise_exception_is_the_users_to_read(text: ModelText) -> None:
    with pytest.raises(InvalidArgument, match="roles must alternate"):
        _render(text, "{{ raise_exception('roles must alternate') }}")


def test_strftime_now_gives_the_date(text: ModelText) -> None:
    assert _render(text, "{{ strftime_now('%Y') }}") == str(datetime.now().year)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages[0]['content'].foo.bar }}",
        "{{ 1 // 0 }}",
        "{{ messages[0] + 1 }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(text: ModelText, template: str) -> None:
    with pytest.raises(InvalidArgument, match="chat template refused"):
        _render(text, template)


def test_a_broken_template_refuses_to_start(text: ModelText) -> None:
    with pytest.raises(UserError, match="chat template is broken"):
        _render(text, "{% for %}")


def test_a_model_without_a_template_takes_no_conversation(text: ModelText) -> None:
    with pytest.raises(InvalidArgument, match="no chat template"):
        ChatTemplate(replace(text, chat_template=None)).render(HELLO)
