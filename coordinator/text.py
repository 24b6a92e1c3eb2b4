"""Tokens to text and back: the model folder's tokenizer, and detokenisation as tokens come."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from splitspec.errors import UserError

REPLACEMENT = "\ufffd"
MAX_TOKEN_ID = 2**32 - 1
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_alphabet() -> dict[str, int]:
    """Return the character that byte-level tokens write for each byte, as GPT-2 defined it.

    Bytes that are visible in Latin-1 are themselves; the others follow from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


@dataclass(frozen=True, kw_only=True)
class ModelText:
    """What the coordinator reads of a model folder: everything but the weights."""

    tokenizer: Tokenizer
    tokenizer_hash: str
    eos_token_ids: frozenset[int]
    """The model's own end tokens."""
    chat_template: str | None
    special_tokens: dict[str, str]
    """`bos_token`, `eos_token`, ... as the chat template sees them."""
    byte_token_ids: frozenset[int]
    """Tokens that stand for one byte of a byte-fallback tokenizer. A run of them decodes as a
    whole, so its text can change while it grows."""
    byte_level: bool
    """Whether every token stands for the same bytes wherever it is (byte-level decoders)."""
    may_end_inside_character: bool
    """Whether the text of tokens can end in the middle of a character, other than in a run of
    byte-fallback tokens."""
    special_token_ids: frozenset[int]
    """Tokens without text."""
    longest_token: int
    """Characters of the longest token: bounds the tokens of a text from below."""

    @classmethod
    def load(cls, folder: Path) -> ModelText:
        """Read tokenizer.json, tokenizer_config.json, config.json, generation_config.json.

        Raises:
            UserError: a file is missing or cannot be read.
        """
        path = folder / "tokenizer.json"
        try:
            content = path.read_bytes()
            tokenizer = Tokenizer.from_str(content.decode())
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        except Exception as error:  # the tokenizers library raises bare Exception
            raise UserError(f"{path} is not a tokenizer: {error}") from error
        tokenizer.no_truncation()  # left by training; a prompt is taken as it is, or refused
        tokenizer.no_padding()
        settings = _json(folder / "tokenizer_config.json")
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        decoder = json.loads(content).get("decoder") or {}
        decoders = json.dumps(decoder)
        falls_back = '"ByteFallback"' in decoders
        return cls(
            tokenizer=tokenizer,
            tokenizer_hash=hashlib.sha256(content).hexdigest(),
            eos_token_ids=_eos_token_ids(folder, settings, vocabulary),
            chat_template=_chat_template(folder, settings),
            special_tokens={
                key: text
                for key in settings
                if key.endswith("_token") and (text := _text(settings, key))
            },
            byte_token_ids=frozenset(
                token
                for text, token in vocabulary.items()
                if falls_back and _BYTE_TOKEN.fullmatch(text)
            ),
            byte_level=decoder.get("type") == "ByteLevel",
            may_end_inside_character='"ByteLevel"' in decoders,
            special_token_ids=frozenset(
                token
                for token, added in tokenizer.get_added_tokens_decoder().items()
                if added.special
            ),
            longest_token=max(map(len, vocabulary), default=1),
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def is_skipped(self, token: int) -> bool:
        """Return whether decoding leaves `token` out: special, or no token at all."""
        return token in self.special_token_ids or self.tokenizer.id_to_token(token) is None

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that `token` stands for; the decoder must be `byte_level`."""
        written: str = self.tokenizer.id_to_token(token) or ""  # "": no such token
        try:
            return bytes([_BYTES[character] for character in written])
        except KeyError:  # an added token, written as it is
            return written.encode()


class Detokenizer:
    """Turns tokens into text as they come.

    What `push` and `flush` return adds up to the text of all tokens decoded at once, whatever the
    bytes: nothing that was returned ever changes, and no character is split. Only text that can
    still change is held back: an incomplete character, or a run of byte-fallback tokens. The work
    for a token does not grow with the tokens before it.
    """

    def __init__(self, text: ModelText) -> None:
        self._decode = text.tokenizer.decode
        self._text = text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if text.byte_level else None
        """Holds back the 3 bytes at most that may become a character."""
        self._shown: list[int] = []
        """A few tokens whose text is out already: some decoders treat the first token of a text
        differently, so these go first."""
        self._held: list[int] = []
        """Tokens whose text is not out."""

    def push(self, ids: list[int]) -> str:
        """Take newly emitted tokens; return the text that can no longer change."""
        # Tokens without text must not gather: everything held is decoded again.
        ids = [token for token in ids if not self._text.is_skipped(token)]
        if self._utf8 is not None:
            return self._utf8.decode(b"".join(map(self._text.bytes_of, ids)))
        self._held += ids
        if self._held and self._held[-1] in self._text.byte_token_ids:
            return ""
        text = self._pending()
        if self._text.may_end_inside_character and text.endswith(REPLACEMENT):
            return ""
        self._advance(text)
        return text

    def flush(self) -> str:
        """Return what was held back: no token follows."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        text = self._pending()
        self._advance(text)
        return text

    def _pending(self) -> str:
        window: str = self._decode([*self._shown, *self._held])
        if not self._shown:
            return window
        shown: str = self._decode(self._shown)
        return window[len(shown) :]

    def _advance(self, text: str) -> None:
        if text:  # context must have text of its own
            self._shown = []
        self._shown += self._held
        self._held = []


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


def _text(settings: dict[str, Any], key: str) -> str:
    """Return a special token, written as its text or as an object with a `content`."""
    value = settings.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Return the chat template: a file of its own, or in tokenizer_config.json (also as a list)."""
    path = folder / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    template = settings.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    templates: dict[str, str] = {}
    for entry in template if isinstance(template, list) else [template]:
        match entry:
            case {"name": str(name), "template": str(source)}:
                templates[name] = source
            case _:
                expected = "text, or a list of objects with a name and a template"
                path = folder / "tokenizer_config.json"
                raise _refusal(path, "chat_template", template, expected)
    return templates.get("default")


def _eos_token_ids(
    folder: Path, settings: dict[str, Any], vocabulary: dict[str, int]
) -> frozenset[int]:
    """Return the union of what the three files call the end."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        if value is None:
            continue
        given = value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in given):
            raise _refusal(folder / name, "eos_token_id", value, "a token id or a list of them")
        ids.update(given)
    eos = vocabulary.get(_text(settings, "eos_token"))
    return frozenset(ids if eos is None else ids | {eos})


def _refusal(path: Path, key: str, value: object, expected: str) -> UserError:
    shown = json.dumps(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return UserError(f"{path}: {key} is {shown}; expected {expected}")
