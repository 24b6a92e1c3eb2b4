"""Chat templates cut into turns, against what `transformers` renders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from drafter_service.training.turns import read_turns
from splitspec.errors import UserError
from tests.conftest import RealModel
from tests.drafter_service.training.chat_templates import (
    SYSTEM,
    TEMPLATES,
    write_templated_model,
)
from tests.tiny import CHAT_TEMPLATE

MESSAGES = [
    {"role": "user", "content": "How do I bake bread?"},
    {"role": "assistant", "content": "With flour and time."},
    {"role": "user", "content": "And a cake?"},
]


def check_against_transformers(folder: Path) -> None:
    turns = read_turns(folder)
    texts = [turns.encode(message["content"]) for message in MESSAGES]
    joined = [
        *turns.opening, *texts[0], turns.user_end, *turns.answer_opening, *texts[1],
        turns.answer_end, *turns.user_opening, *texts[2], turns.user_end, *turns.answer_opening,
    ]  # fmt: skip
    reference = AutoTokenizer.from_pretrained(folder)
    wanted = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert reference.decode(joined) == wanted
    assert joined == reference.encode(wanted, add_special_tokens=False)
    special = {id for id, token in reference.added_tokens_decoder.items() if token.special}
    assert turns.text_tokens == set(reference.get_vocab().values()) - special


@pytest.mark.parametrize("name", TEMPLATES)
def test_pieces_and_texts_join_to_what_the_template_renders(name: str, tmp_path: Path) -> None:
    check_against_transformers(write_templated_model(tmp_path / "tiny", TEMPLATES[name]))


@pytest.mark.real_model
def test_the_real_models_template_is_cut(real_model: RealModel) -> None:
    check_against_transformers(real_model.folder)


@pytest.mark.real_model
def test_a_tokenizer_that_joins_text_with_its_surroundings_is_refused(
    real_model: RealModel, tmp_path: Path
) -> None:
    shutil.copy(real_model.folder / "tokenizer.json", tmp_path)
    template = CHAT_TEMPLATE.replace("\\n' + message['content']", " ' + message['content']")
    template = template.replace("assistant\\n", "assistant ")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(UserError, match="the tokenizer joins a turn's text"):
        read_turns(tmp_path)


def test_a_system_prefix_belongs_to_the_opening(tmp_path: Path) -> None:
    turns = read_turns(write_templated_model(tmp_path / "tiny", SYSTEM))
    text = turns.tokenizer.decode(list(turns.opening), skip_special_tokens=False)
    assert text == "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\n"


def test_a_template_of_its_own_file_wins(tmp_path: Path) -> None:
    folder = write_templated_model(tmp_path / "tiny", None)
    (folder / "chat_template.jinja").write_text(SYSTEM)
    assert len(read_turns(folder).opening) > 10


def test_a_named_template_is_found(tmp_path: Path) -> None:
    folder = write_templated_model(tmp_path / "tiny", None)
    path = folder / "tokenizer_config.json"
    templates = [
        {"name": "tool_use", "template": "x"},
        {"name": "default", "template": CHAT_TEMPLATE},
    ]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": templates}))
    assert read_turns(folder).user_end == 2


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (None, "has no chat template, neither chat_template.jinja nor"),
        ("{{ messages[0]['content'] }}", "does not render the text 'It is behind the hill.'"),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "once and as it is"),
        ("{{ raise_exception('no users') }}", "it fails: no users"),
        ("{% if %}", "it fails"),
        (CHAT_TEMPLATE.replace("<|im_end|>\\n", "!\\n"), "no special token"),
        ("{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}", "without a token"),
        (
            CHAT_TEMPLATE.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\nHm: '"),
            r"puts .*Hm: ' before the newest answer",
        ),
        (
            CHAT_TEMPLATE.replace("<|im_end|>\\n", "<|im_end|>\\n<|im_end|>"),
            "also stands between turns",
        ),
    ],
)
def test_a_template_that_cannot_be_cut_is_refused_with_the_reason(
    template: str | None, told: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        read_turns(write_templated_model(tmp_path / "tiny", template))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_templated_model(tmp_path / "tiny", CHAT_TEMPLATE)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"cannot read .*tokenizer\.json"):
        read_turns(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        read_turns(folder)
