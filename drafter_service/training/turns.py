"""What stands between the turns of a conversation, cut out of the model's own chat template.

The target writes a conversation as one stream of tokens, user turns too, so the tokens that the
template puts around a turn must be known apart from the turn's text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from graph_runtime.config_values import read_config_object
from splitspec.errors import UserError

_USER, _ANSWER, _NEXT = "Where is the river?", "It is behind the hill.", "Who lives there now?"
"""Turns of a conversation that is rendered to see what the template puts around them."""
_DAY = datetime(2025, 1, 1)
"""What a template that asks is told: text must not depend on the day it was made."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The tokens around a user's and the assistant's text."""

    tokenizer: Tokenizer
    opening: tuple[int, ...]
    """From the start of a row to the first user turn's text, system prefix included."""
    user_end: int
    """The token that ends a user turn's text."""
    answer_opening: tuple[int, ...]
    """Between `user_end` and the assistant's text."""
    answer_end: int
    """The token that ends the assistant's text."""
    user_opening: tuple[int, ...]
    """Between `answer_end` and the next user turn's text."""
    text_tokens: frozenset[int]
    """Tokens that may stand inside a turn: those of the vocabulary that are not special."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of text that stands inside a turn, or of a whole conversation."""
        return _encode(self.tokenizer, text)


def read_turns(folder: Path) -> Turns:
    """Cut the chat template of the model in `folder`.

    Raises:
        UserError: there is no tokenizer or template, or it cannot be cut: says why.
    """
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    settings_path = folder / "tokenizer_config.json"
    settings = read_config_object(settings_path) if settings_path.is_file() else {}
    special = {
        key: text
        for key, value in settings.items()
        if key.endswith("_token") and (text := _token_text(value))
    }
    source = _template_source(folder, settings)
    conversation = [("user", _USER), ("assistant", _ANSWER), ("user", _NEXT)]
    whole = _render(source, conversation, special)
    before, first_gap, second_gap, last_gap = _between(whole, [_USER, _ANSWER, _NEXT])
    asked = _between(_render(source, conversation[:1], special), [_USER])
    if asked != [before, first_gap] or last_gap != first_gap:
        raise _not_cut(
            f"it puts {asked[-1]!r} before the newest answer and {first_gap!r} before an older one"
        )
    turns = _cut(tokenizer, before, first_gap, second_gap)
    pieces = [
        *turns.opening, *turns.encode(_USER), turns.user_end, *turns.answer_opening,
        *turns.encode(_ANSWER), turns.answer_end, *turns.user_opening,
        *turns.encode(_NEXT), turns.user_end, *turns.answer_opening,
    ]  # fmt: skip
    if pieces != turns.encode(whole):
        raise _not_cut("the tokenizer joins a turn's text with what stands around it")
    return turns


def _cut(tokenizer: Tokenizer, before: str, first_gap: str, second_gap: str) -> Turns:
    opening, after_user, after_answer = (
        tuple(_encode(tokenizer, text)) for text in (before, first_gap, second_gap)
    )
    special = {
        token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
    }
    if not opening:
        raise _not_cut("a conversation begins with the user's text, without a token before it")
    for whose, gap, text in (
        ("user", after_user, first_gap),
        ("assistant", after_answer, second_gap),
    ):
        if not gap or gap[0] not in special:
            raise _not_cut(f"the {whose}'s text is followed by {text!r}, no special token")
    ends = {after_user[0], after_answer[0]}
    if ends & {*after_user[1:], *after_answer[1:]}:
        raise _not_cut("the token that ends a turn also stands between turns")
    vocabulary = set(tokenizer.get_vocab(with_added_tokens=True).values())
    return Turns(
        tokenizer=tokenizer,
        opening=opening,
        user_end=after_user[0],
        answer_opening=after_user[1:],
        answer_end=after_answer[0],
        user_opening=after_answer[1:],
        text_tokens=frozenset(vocabulary - special),
    )


def _between(rendered: str, texts: Sequence[str]) -> list[str]:
    """Return what stands before, between and after `texts` in `rendered`.

    Raises:
        UserError: one of them does not stand there once, and in their order.
    """
    gaps = []
    for text in texts:
        gap, found, rendered = rendered.partition(text)
        if not found or text in rendered:
            raise _not_cut(f"it does not render the text {text!r} once and as it is")
        gaps.append(gap)
    return [*gaps, rendered]


def _render(source: str, turns: Sequence[tuple[str, str]], special: dict[str, str]) -> str:
    """Return the conversation with what asks for the assistant's next turn.

    Raises:
        UserError: the template is broken, or refuses the conversation.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _DAY.strftime
    messages = [{"role": role, "content": text} for role, text in turns]
    try:
        template = environment.from_string(source)
        return template.render(messages=messages, add_generation_prompt=True, **special)
    # The template is the model's code, and may fail in any way that code in the sandbox can.
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise _not_cut(f"it fails: {error}"[:300]) from error


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UserError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _template_source(folder: Path, settings: dict[str, Any]) -> str:
    """Return the chat template: of its own file, or of tokenizer_config.json.

    Raises:
        UserError: there is none.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {path}: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise UserError(
            f"{folder} has no chat template, neither chat_template.jinja nor chat_template in "
            "tokenizer_config.json: the target cannot write conversations without one"
        )
    return template


def _token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Write plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _not_cut(reason: str) -> UserError:
    return UserError(f"the model's chat template cannot be cut into turns: {reason}")
