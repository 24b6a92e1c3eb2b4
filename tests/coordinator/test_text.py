"""Detokenisation as tokens come equals decoding them at once; the library's decoder is the law."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from coordinator.text import Detokenizer, ModelText
from splitspec.errors import UserError
from tests.tiny import write_tiny_tokenizer


def _byte_fallback_tokenizer(folder: Path, *, metaspace: bool) -> None:
    """Write a tokenizer in the way of Llama 2: word pieces with bars, and one token a byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "▁a", "a", "b", "▁the", "é", "日", "▁▁", "\n", "🙂", "\u0301", "\ufffd"]
    model = models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True)
    tokenizer = Tokenizer(model)
    first = decoders.Metaspace() if metaspace else decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence(
        [first, decoders.ByteFallback(), decoders.Fuse()]
        + ([] if metaspace else [decoders.Strip(" ", 1, 0)])
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in pieces[:3]])
    tokenizer.save(str(folder / "tokenizer.json"))


def _byte_level_tokenizer_with_added_tokens(folder: Path) -> None:
    """Write one whose added tokens hold characters that stand for bytes, or for none."""
    write_tiny_tokenizer(folder)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_tokens(["<think>", "é", "é z", "日", " "])
    tokenizer.save(path)


def _nested_tokenizer(folder: Path) -> None:
    """Write one with a byte-level decoder inside another."""
    write_tiny_tokenizer(folder)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    tokenizer.save(path)


WRITERS: dict[str, Callable[[Path], None]] = {
    "byte-level": write_tiny_tokenizer,
    "byte-level, added tokens": _byte_level_tokenizer_with_added_tokens,
    "nested": _nested_tokenizer,
    "byte-fallback": lambda folder: _byte_fallback_tokenizer(folder, metaspace=False),
    "metaspace": lambda folder: _byte_fallback_tokenizer(folder, metaspace=True),
}
_LOADED: dict[str, ModelText] = {}


@pytest.fixture(scope="module", autouse=True)
def _load(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name, write in WRITERS.items():
        folder = tmp_path_factory.mktemp("text")
        write(folder)
        _LOADED[name] = ModelText.load(folder)


def _grow(text: ModelText, groups: list[list[int]]) -> tuple[str, list[str]]:
    detokenizer = Detokenizer(text)
    deltas = [detokenizer.push(list(group)) for group in groups]
    deltas.append(detokenizer.flush())
    assert detokenizer.flush() == ""
    return "".join(deltas), deltas


def _check(name: str, groups: list[list[int]]) -> None:
    text = _LOADED[name]
    ids = [token for group in groups for token in group]
    whole = text.tokenizer.decode(ids)
    grown, deltas = _grow(text, groups)
    assert grown == whole
    for delta in deltas[:-1]:
        delta.encode()  # a split surrogate would not encode
    # The same whatever the rounds: one token at a time.
    assert _grow(text, [[token] for token in ids])[0] == whole


groups_of_ids = st.lists(st.lists(st.integers(0, 310), min_size=1, max_size=8), max_size=20)


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=300, deadline=None)
@given(groups=groups_of_ids)
@example(groups=[[0, 1], [2], [259, 260]])
@example(groups=[[3 + 0xC3], [2], [3 + 0xA9], [260]])  # a special token inside a run of bytes
@example(groups=[[259], [259], [260], [266]])  # spaces first
def test_random_ids_grow_to_what_they_decode_to_at_once(name: str, groups: list[list[int]]) -> None:
    _check(name, groups)


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(
        st.one_of(
            st.text(max_size=4).map(lambda t: t.encode("utf-8", "surrogatepass")),
            st.sampled_from(
                [
                    "🙂".encode(),
                    "👩‍👩‍👧".encode(),
                    "e\u0301".encode(),
                    "日本".encode(),
                    b"\xff",
                    b"\xe2\x82",
                    b"\xf0\x9f",
                    b"\xed\xa0\x80",
                    b"\xc0\xaf",
                    "\ufffd".encode(),
                ]
            ),
        ),
        max_size=8,
    ),
    size=st.integers(1, 8),
)
def test_odd_bytes_grow_to_what_they_decode_to_at_once(
    name: str, data: list[bytes], size: int
) -> None:
    ids = [_byte_token(name, byte) for byte in b"".join(data)]
    _check(name, [ids[i : i + size] for i in range(0, len(ids), size)])


def _byte_token(name: str, byte: int) -> int:
    if name in ("byte-fallback", "metaspace"):
        return 3 + byte
    # The byte-level alphabet as GPT-2 defines it: printable bytes are themselves.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [i for i in range(256) if i not in printable]
    char = chr(byte) if byte in printable else chr(256 + others.index(byte))
    token = _LOADED[name].tokenizer.token_to_id(char)
    assert token is not None
    return int(token)


def test_a_character_is_shown_only_when_it_is_complete() -> None:
    detokenizer = Detokenizer(_LOADED["byte-level"])
    shown = [detokenizer.push([_byte_token("byte-level", byte)]) for byte in "é🙂!".encode()]
    assert shown == ["", "é", "", "", "", "🙂", "!"]


def test_bytes_that_can_become_nothing_are_shown_at_once() -> None:
    detokenizer = Detokenizer(_LOADED["byte-level"])
    data = b"\xff\xff\xe2\x82a\xf0\x9f\x99\xf0\x9f\x99"
    shown = [detokenizer.push([_byte_token("byte-level", byte)]) for byte in data]
    assert shown == ["\ufffd", "\ufffd", "", "", "\ufffda", "", "", "", "\ufffd", "", ""]
    assert detokenizer.flush() == "\ufffd"


class CountingTokenizer:
    """A tokenizer that counts the tokens it is asked about."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.token_count = 0

    def decode(self, ids: list[int]) -> str:
        self.token_count += len(ids)
        text: str = self._tokenizer.decode(ids)
        return text

    def id_to_token(self, token: int) -> str | None:
        self.token_count += 1
        written: str | None = self._tokenizer.id_to_token(token)
        return written


@pytest.mark.parametrize("kind", ["invalid byte", "replacement character", "special", "unknown"])
@pytest.mark.parametrize("name", ["byte-level", "byte-fallback", "metaspace"])
def test_the_work_for_a_token_does_not_grow_with_the_tokens_before_it(name: str, kind: str) -> None:
    text = _LOADED[name]
    tokens = {
        "invalid byte": [_byte_token(name, 0xFF)],
        "replacement character": [_byte_token(name, byte) for byte in "\ufffd".encode()],
        "special": [1],
        "unknown": [5000],
    }[kind]
    if kind == "replacement character" and name != "byte-level":
        tokens = [text.tokenizer.token_to_id("\ufffd")]
    tokenizer = CountingTokenizer(text.tokenizer)
    detokenizer = Detokenizer(replace(text, tokenizer=tokenizer))
    ids = tokens * 1000
    shown = [detokenizer.push([token]) for token in ids]
    held = detokenizer.flush()
    assert tokenizer.token_count <= 6 * len(ids)
    assert "".join(shown) + held == text.tokenizer.decode(ids)
    if name == "byte-level" or kind == "replacement character":
        assert held == ""


def test_end_tokens_are_the_union_of_what_the_files_say(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert ModelText.load(tmp_path).eos_token_ids == {2, 7, 8, 9}  # 2 is <|im_end|>


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_broken_file_is_one_line_that_names_it(tmp_path: Path, name: str) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text("{ broken")
    with pytest.raises(UserError, match=name):
        ModelText.load(tmp_path)


def test_a_missing_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        ModelText.load(tmp_path)


def test_chat_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    content = json.loads(path.read_text())
    assert ModelText.load(tmp_path).chat_template == content["chat_template"]
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    path.write_text(json.dumps({**content, "chat_template": named}))
    assert ModelText.load(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert ModelText.load(tmp_path).chat_template == "J"


def test_a_prompt_is_neither_cut_nor_padded_whatever_the_file_asks_for(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    prompts = ["a", "hello world " * 9]
    expected = [tokenizer.encode(prompt).ids for prompt in prompts]
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(path)
    text = ModelText.load(tmp_path)
    assert [text.encode(prompt, add_special_tokens=True) for prompt in prompts] == expected


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [2.0, "2", {"a": 1}, True, ["2"], [2, 2.5], -1, [2**32], [[2]]])
def test_end_tokens_that_are_no_ids_are_one_line(tmp_path: Path, name: str, value: object) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    _is_refused(tmp_path, name, f"eos_token_id is {json.dumps(value)}; expected a token id")


@pytest.mark.parametrize("value", [None, []])
def test_no_end_token_is_fine(tmp_path: Path, value: object) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    assert ModelText.load(tmp_path).eos_token_ids == {2}  # of tokenizer_config.json


@pytest.mark.parametrize(
    "value",
    [
        5,
        False,
        {"name": 5},
        ["x"],
        [{"name": "default"}],
        [{"template": "T"}],
        [{"name": "default", "template": 5}],
        [{"name": ["default"], "template": "T"}],
    ],
)
def test_a_chat_template_that_is_no_text_is_one_line(tmp_path: Path, value: object) -> None:
    write_tiny_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": value}))
    shown = json.dumps(value)
    _is_refused(tmp_path, path.name, f"chat_template is {shown}; expected text")


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": "x" * 10_000}))
    with pytest.raises(UserError) as caught:
        ModelText.load(tmp_path)
    assert len(str(caught.value)) < 200 + len(str(tmp_path))


def test_a_chat_template_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    path = tmp_path / "chat_template.jinja"
    path.mkdir()
    _is_refused(tmp_path, path.name, "Is a directory")
    path.rmdir()
    path.write_bytes(b"{{ \xff }}")
    _is_refused(tmp_path, path.name, "can't decode byte 0xff")


def _is_refused(folder: Path, name: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        ModelText.load(folder)
    line = str(caught.value)
    assert str(folder / name) in line
    assert reason in line
    assert "\n" not in line
