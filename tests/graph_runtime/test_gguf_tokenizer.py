"""tokenizer.json from a GGUF's vocabulary, against a plain byte-pair encoder."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer

from graph_runtime.gguf_file import GGUFModel, open_gguf
from graph_runtime.gguf_tokenizer import build_tokenizer, tokenizer_config
from splitspec.errors import UserError
from tests.graph_runtime.tiny_gguf import write_tiny_gguf
from tests.tiny import SPECIAL_TOKENS, write_tiny_model

# llama.cpp's patterns of the pre-tokenizers (src/llama-vocab.cpp), applied one after the other.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "qwen2": (LLAMA3.replace("{1,3}", ""),),
    "llama-bpe": (LLAMA3,),
}
TEXTS = [
    "",
    " ",
    "the thing and the other in 1234567 parts, isn't it?  THAT'S  1st\n\n  x\t\ty \r\n",
    "Ünïcödé ñ 漢字かな交じり文 한국어 العربية עברית ไทย",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\ufeff\u00a0 ½ ٣ Ⅷ",
    "def f(x):\n    return x**2  # 3.14e-10\n\n\n",
    "a" * 300 + " " * 17 + "!?" * 40,
    "\x00\x01\x7f\U0010ffff",
]


def byte_letters() -> dict[int, str]:
    """Return GPT-2's printable letter of every byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def pieces(text: str, patterns: tuple[str, ...]) -> list[str]:
    """Cut `text` at every pattern's matches, what lies between matches included."""
    parts = [text] if text else []
    for pattern in patterns:
        cut: list[str] = []
        for part in parts:
            end = 0
            for match in regex.finditer(pattern, part):
                cut += [part[end : match.start()], match.group()]
                end = match.end()
            cut.append(part[end:])
        parts = [part for part in cut if part]
    return parts


def encode(model: GGUFModel, text: str, pre: str) -> list[int]:
    """Encode `text` with the textbook loop: merge the best-ranked pair until none is left."""
    tokens = model.metadata["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    merges = model.metadata["tokenizer.ggml.merges"]
    ranks = {tuple(line.split(" ")): i for i, line in enumerate(merges)}
    letters = byte_letters()
    encoded = []
    for piece in pieces(text, PATTERNS[pre]):
        word = [letters[byte] for byte in piece.encode()]
        if pre == "llama-bpe" and "".join(word) in ids:
            word = ["".join(word)]  # Llama 3 takes a word that is a token without merging
        while len(word) > 1:
            pairs = [ranks.get(pair, len(ranks)) for pair in pairwise(word)]
            best = min(range(len(pairs)), key=lambda i: pairs[i])
            if pairs[best] == len(ranks):
                break
            word[best : best + 2] = [word[best] + word[best + 1]]
        encoded += [ids[part] for part in word]
    return encoded


def open_tiny(tmp_path: Path, **arguments: Any) -> GGUFModel:
    folder = write_tiny_model(tmp_path / "m", n_layers=1)
    write_tiny_gguf(tmp_path / "m.gguf", folder, **arguments)
    return open_gguf(tmp_path / "m.gguf")


def without_bos(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("pre", PATTERNS)
def test_encoding_is_that_of_a_plain_byte_pair_encoder(pre: str, tmp_path: Path) -> None:
    model = open_tiny(tmp_path, pre=pre)
    tokenizer = build_tokenizer(model)
    for text in TEXTS:
        if pre == "qwen2":
            text = text.replace("e\u0301", "")  # normalised to one letter: see below
        assert without_bos(tokenizer, text) == encode(model, text, pre), text
        assert tokenizer.decode(without_bos(tokenizer, text)) == text


def test_qwen2_composes_letters_first(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(open_tiny(tmp_path, pre="qwen2"))
    assert without_bos(tokenizer, "e\u0301") == without_bos(tokenizer, "\u00e9")


@pytest.mark.parametrize("pre", PATTERNS)
def test_special_tokens_are_single_ids_wherever_they_stand(pre: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(open_tiny(tmp_path, pre=pre))
    for i, token in enumerate(SPECIAL_TOKENS):
        around = without_bos(tokenizer, f"the{token}\nand{token}")
        assert around.count(i) == 2
        assert tokenizer.decode(around, skip_special_tokens=True) == "the\nand"


def test_smollm_cuts_numbers_into_digits(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(open_tiny(tmp_path, pre="smollm"))
    assert tokenizer.encode("10 400").tokens == ["1", "0", "Ġ", "4", "0", "0"]


def test_llama3_starts_with_bos_unless_told_otherwise(tmp_path: Path) -> None:
    assert build_tokenizer(open_tiny(tmp_path, pre="llama-bpe")).encode("a").ids[0] == 1
    assert len(build_tokenizer(open_tiny(tmp_path, pre="gpt-2")).encode("a").ids) == 1


def test_settings_hold_special_tokens_and_the_chat_template(tmp_path: Path) -> None:
    settings = tokenizer_config(open_tiny(tmp_path))
    assert settings["bos_token"] == "<|im_start|>"
    assert settings["eos_token"] == "<|im_end|>"
    assert "add_generation_prompt" in settings["chat_template"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"pre": "tekken"}, "'tekken'"),
        ({"drop": ("tokenizer.ggml.pre",)}, r"tokenizer\.ggml\.pre is None"),
        ({"kind": "bert"}, r"tokenizer\.ggml\.model is 'bert'"),
        ({"kind": "llama"}, r"tokenizer\.ggml\.scores is missing"),
        ({"drop": ("tokenizer.ggml.model",)}, r"tokenizer\.ggml\.model is None"),
        ({"drop": ("tokenizer.ggml.merges",)}, r"tokenizer\.ggml\.merges is missing"),
        ({"drop": ("tokenizer.ggml.token_type",)}, r"tokenizer\.ggml\.token_type is missing"),
    ],
)
def test_what_is_missing_or_not_supported_is_named(
    arguments: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=named):
        build_tokenizer(open_tiny(tmp_path, **arguments))


@pytest.fixture(scope="module")
def pieces_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a small SentencePiece BPE model with byte fallback, as Llama 2 and Mistral have."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("pieces")
    words = "the thing and the other in parts isn't it that's where naïve cafés ask for their fee "
    (folder / "corpus.txt").write_text("\n".join([words, words[::-1]] * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "pieces"),
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "pieces.model"))


def as_gguf(pieces: Any) -> GGUFModel:
    size = range(pieces.get_piece_size())
    kinds = [
        2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1
        for i in size
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(i) for i in size],
        "tokenizer.ggml.scores": [pieces.get_score(i) for i in size],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": pieces.bos_id(),
        "tokenizer.ggml.unknown_token_id": pieces.unk_id(),
    }
    return GGUFModel(path=Path("pieces.gguf"), metadata=metadata, tensors={})


def test_sentencepiece_vocabularies_encode_as_sentencepiece_does(pieces_model: Any) -> None:
    tokenizer = build_tokenizer(as_gguf(pieces_model))
    for text in TEXTS[1:]:
        ids = tokenizer.encode(text).ids
        assert ids == [pieces_model.bos_id(), *pieces_model.encode(text)], text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a</s>b").ids.count(pieces_model.eos_id()) == 1
