"""Rebuild tokenizer.json and tokenizer_config.json from a GGUF file's vocabulary and merges."""

from __future__ import annotations

from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from graph_runtime.gguf_file import GGUFModel, eos_token_ids
from splitspec.errors import UserError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""tokenizer.ggml.token_type of tokens that are matched whole, before anything else."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's letter for a space."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPLIT = (
    _CONTRACTIONS
    + r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    + r"|\s+(?!\S)|\s+"
)


def build_tokenizer(model: GGUFModel) -> Tokenizer:
    """Return the tokenizer that the file describes.

    Raises:
        UserError: a kind of tokenizer or pre-tokenizer that is not supported, or missing parts.
    """
    kind = model.metadata.get("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise UserError(
            f"{model.path}: tokenizer.ggml.model is {kind!r}; supported: {', '.join(_KINDS)}"
        )
    tokens, types = _list(model, "tokens"), _list(model, "token_type")
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise UserError(f"{model.path}: tokenizer.ggml.tokens and token_type do not fit together")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer, starts_with_bos = _KINDS[kind](model, vocabulary)
    added = [(token, t) for token, t in zip(tokens, types, strict=True) if t in _ADDED]
    tokenizer.add_tokens(
        [AddedToken(token, special=t != _USER_DEFINED, normalized=False) for token, t in added]
    )
    if model.metadata.get("tokenizer.ggml.add_bos_token", starts_with_bos):
        bos = _named(model, "bos")
        if bos is None:
            raise UserError(f"{model.path}: tokenizer.ggml.bos_token_id is missing")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    return tokenizer


def _byte_level(model: GGUFModel, vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Return a GPT-2 style tokenizer, and whether its family starts texts with the BOS token."""
    name = model.metadata.get("tokenizer.ggml.pre")
    if name not in _PRE_TOKENIZERS:
        raise UserError(
            f"{model.path}: tokenizer.ggml.pre is {name!r}; supported: {', '.join(_PRE_TOKENIZERS)}"
        )
    merges = [_merge(model, line) for line in _list(model, "merges")]
    # Llama 3 takes a word that is a token as it is; the others only get there by merges.
    tokenizer = _bpe(model, vocabulary, merges, ignore_merges=name in _LLAMA3)
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, name in _LLAMA3


def _sentencepiece(model: GGUFModel, vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Return a SentencePiece BPE tokenizer (Llama 2, Mistral), and that it starts with BOS.

    SentencePiece stores no merges: it joins the two neighbours whose joint token scores best.
    """
    scores = _list(model, "scores")
    if len(scores) != len(vocabulary):
        raise UserError(f"{model.path}: tokenizer.ggml.scores and tokens do not fit together")
    splits = [
        (-scores[i], i, (token[:cut], token[cut:]))
        for token, i in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges = [pair for _, _, pair in sorted(splits)]
    unknown = _named(model, "unknown")
    tokenizer = _bpe(
        model, vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    undo = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer, True


def _bpe(
    model: GGUFModel, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the package raises nothing more specific
        raise UserError(f"{model.path}: tokenizer.ggml.merges: {error}") from error


def tokenizer_config(model: GGUFModel) -> dict[str, Any]:
    """Return the content of a `tokenizer_config.json`: special tokens and the chat template."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name in ("bos", "unknown", "padding"):
        key = {"unknown": "unk", "padding": "pad"}.get(name, name)
        config[f"{key}_token"] = _named(model, name)
    config["eos_token"] = _list(model, "tokens")[eos_token_ids(model)[0]]
    template = model.metadata.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    return config


_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)
_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _gpt2()])


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(_SPLIT.format(digits=digits)), behavior="isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, plain])


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split(r"\p{N}")


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _split(r"\p{N}{1,3}")


_PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "qwen2": _qwen2,
    **dict.fromkeys(_LLAMA3, _llama3),
}


def _list(model: GGUFModel, key: str) -> list[Any]:
    value = model.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value:
        raise UserError(f"{model.path}: tokenizer.ggml.{key} is missing")
    return value


def _merge(model: GGUFModel, line: str) -> tuple[str, str]:
    left, separator, right = line.partition(" ")
    if not separator:
        raise UserError(f"{model.path}: tokenizer.ggml.merges holds {line[:40]!r}")
    return left, right


def _named(model: GGUFModel, name: str) -> str | None:
    index = model.metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = _list(model, "tokens")
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise UserError(f"{model.path}: tokenizer.ggml.{name}_token_id is {index}")
    return str(tokens[index])
