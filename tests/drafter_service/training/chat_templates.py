"""Chat templates of different makes, for tiny models."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tiny import CHAT_TEMPLATE, write_tiny_model

SYSTEM = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe kind<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TWO_ENDS = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'Q ' + message['content'] + '<|endoftext|> A:' }}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
)
"""The user's turn and the assistant's end with tokens of their own, and nothing asks for one."""
TEMPLATES = {"plain": CHAT_TEMPLATE, "system": SYSTEM, "two ends": TWO_ENDS}


def write_templated_model(folder: Path, template: str | None, **options: object) -> Path:
    """Write a tiny model with another chat template, or without one."""
    write_tiny_model(folder, **options)  # type: ignore[arg-type]
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    if template is None:
        del settings["chat_template"]
    else:
        settings["chat_template"] = template
    path.write_text(json.dumps(settings))
    return folder
