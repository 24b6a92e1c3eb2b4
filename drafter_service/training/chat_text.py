"""A user's message as the tokens that a coordinator makes of it, and the tokens that end an answer.

NOTE: services do not import each other, so this says again, for whole prompts only, what
coordinator/text.py and coordinator/template.py do; a test compares the two.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from splitspec.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ChatText:
    """The chat side of a model folder."""

    tokenizer: Tokenizer
    template: str | None
    special_tokens: dict[str, str]
    """`bos_token`, `eos_token`, ... as the template sees them."""
    stop_token_ids: frozenset[int]
    """The model's own end tokens: the union of what its files call the end."""

    @classmethod
    def load(cls, folder: Path) -> ChatText:
        """Read tokenizer.json, tokenizer_config.json, config.json, generation_config.json.

        Raises:
            UserError: a file cannot be read.
        """
        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise UserError(f"{path} is not a tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        settings = _json(folder / "tokenizer_config.json")
        tokens = {key: _token(value) for key, value in settings.items() if key.endswith("_token")}
        special_tokens = {key: token for key, token in tokens.items() if token}
        stops = {
            token_id
            for name in ("generation_config.json", "config.json")
            for token_id in _listed(_json(folder / name).get("eos_token_id"))
        }
        end = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
        return cls(
            tokenizer=tokenizer,
            template=_template(folder, settings),
            special_tokens=special_tokens,
            stop_token_ids=frozenset(stops if end is None else stops | {end}),
        )

    def user_turn(self, message: str) -> list[int]:
        """Return the prompt that asks for the answer to a user's first message.

        Raises:
            UserError: the model has no chat template, or it refuses the message.
        """
        if self.template is None:
            raise UserError("the target has no chat template: give prompt_ids instead of prompt")
        messages = [{"role": "user", "content": message}]
        try:
            text = (
                _environment()
                .from_string(self.template)
                .render(messages=messages, add_generation_prompt=True, **self.special_tokens)
            )
        # The template is the model's code.
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise UserError(f"the target's chat template: {error}") from error
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Return the chat template: a file of its own, or in tokenizer_config.json (also as a list)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token(value: Any) -> str:
    """Return a special token, written as its text or as an object with a `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _listed(value: Any) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return content
