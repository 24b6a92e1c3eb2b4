"""A user's message becomes the tokens that a coordinator makes of it, for every kind of folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.template import ChatTemplate
from coordinator.text import ModelText
from drafter_service.training.chat_text import ChatText
from splitspec.errors import InvalidArgument, UserError
from tests.conftest import RealModel
from tests.tiny import CHAT_TEMPLATE, write_tiny_model

MESSAGES = [
    "Hello",
    " spaces at both ends \n",
    "Zwei Zeilen\nund ein 🙂",
    "<|im_end|> inside",
    "\n",
]
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "trimming": "{{ bos_token }}{{ messages[0]['content'] | trim }}{% if true %}\n  {% endif %}",
    "with json": "{{ messages | tojson }}{% for m in messages %}{% break %}{% endfor %}",
    "indented json": "{{ messages | tojson(indent=2) }}",
}


def set_key(folder: Path, file: str, key: str, value: Any) -> None:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def assert_same(folder: Path) -> None:
    served, own = ModelText.load(folder), ChatText.load(folder)
    template = ChatTemplate(served)
    for message in MESSAGES:
        rendered = template.render([{"role": "user", "content": message}])
        assert own.user_turn(message) == served.encode(rendered, add_special_tokens=False)
    assert own.stop_token_ids == served.eos_token_ids


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("place", ["settings", "named", "file"])
def test_a_message_is_rendered_as_the_coordinator_renders_it(
    tmp_path: Path, template: str, place: str
) -> None:
    folder = write_tiny_model(tmp_path / "m")
    if place == "settings":
        set_key(folder, "tokenizer_config.json", "chat_template", template)
    elif place == "named":
        named = [{"name": "tool", "template": "no"}, {"name": "default", "template": template}]
        set_key(folder, "tokenizer_config.json", "chat_template", named)
    else:
        (folder / "chat_template.jinja").write_text(template)
    assert_same(folder)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("generation_config.json", "eos_token_id", [2, 7]),
        ("config.json", "eos_token_id", None),
        ("tokenizer_config.json", "eos_token", {"content": "<|endoftext|>"}),
        ("tokenizer_config.json", "eos_token", None),
        ("tokenizer_config.json", "eos_token", "no token"),
    ],
)
def test_an_answer_ends_with_the_tokens_that_end_it_at_the_coordinator(
    tmp_path: Path, file: str, key: str, value: Any
) -> None:
    folder = write_tiny_model(tmp_path / "m")
    set_key(folder, file, key, value)
    assert_same(folder)


@pytest.mark.real_model
def test_the_real_model_s_chat_is_rendered_as_the_coordinator_renders_it(
    real_model: RealModel,
) -> None:
    assert_same(real_model.folder)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('not you') }}", "{% for", "{{ 1 / 0 }}", "{{ [][1].x }}"]
)
def test_a_template_that_fails_is_told_in_one_line(tmp_path: Path, template: str) -> None:
    folder = write_tiny_model(tmp_path / "m")
    set_key(folder, "tokenizer_config.json", "chat_template", template)
    with pytest.raises((UserError, InvalidArgument)):
        ChatTemplate(ModelText.load(folder)).render([{"role": "user", "content": "x"}])
    with pytest.raises(UserError, match="chat template"):
        ChatText.load(folder).user_turn("x")


def test_a_model_without_a_template_or_tokenizer_is_told(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    set_key(folder, "tokenizer_config.json", "chat_template", None)
    with pytest.raises(UserError, match="no chat template: give prompt_ids"):
        ChatText.load(folder).user_turn("x")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer"):
        ChatText.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        ChatText.load(folder)


@pytest.mark.parametrize("content", ["[]", "{", "\udcff"])
def test_a_broken_settings_file_is_named(tmp_path: Path, content: str) -> None:
    folder = write_tiny_model(tmp_path / "m")
    path = folder / "tokenizer_config.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        ChatText.load(folder)
