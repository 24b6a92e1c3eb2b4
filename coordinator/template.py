"""Render a conversation with the model's chat template.

Templates come with models, so they run in Jinja's immutable sandbox, with what Hugging Face
templates expect to find there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coordinator.text import ModelText
from splitspec.errors import InvalidArgument, UserError


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, text: ModelText) -> None:
        """Compile the model's template.

        Raises:
            UserError: it has a syntax error.
        """
        self._special_tokens = text.special_tokens
        self._template: Template | None = None
        if text.chat_template is not None:
            try:
                self._template = _environment().from_string(text.chat_template)
            except TemplateError as error:
                raise UserError(f"the model's chat template is broken: {error}") from error

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """Return the prompt that asks for the assistant's next message.

        Raises:
            InvalidArgument: the model has no template, or the template refuses the messages.
        """
        if self._template is None:
            raise InvalidArgument(
                "conversation: the model has no chat template; send text or token_ids",
                field="conversation",
            )
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._special_tokens
            )
        # The template is the model's code: what it meets in a user's messages is theirs to mend.
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise InvalidArgument(
                f"conversation: the chat template refused it: {error}"[:500], field="conversation"
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Write plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
