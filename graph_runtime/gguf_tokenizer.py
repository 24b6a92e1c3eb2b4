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

_CONTROL, _USER_DEFINED = 3, 4
"""tokenizer.ggml.token_type of tokens that are matched whole, before anything else."""
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
    if kind != "gpt2":
        raise UserError(f"{model.path}: tokenizer.ggml.model is {kind!r}; supported: 'gpt2'")
    tokens, types = _list(model, "tokens"), _list(model, "token_type")
    merges = [_merge(model, line) for line in _list(model, "merges")]
    name = model.metadata.get("tokenizer.ggml.pre")
    if name not in _PRE_TOKENIZERS:
        raise UserError(
            f"{model.path}: tokenizer.ggml.pre is {name!r}; supported: {', '.join(_PRE_TOKENIZERS)}"
        )
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise UserError(f"{model.path}: tokenizer.ggml.tokens and token_type do not fit together")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        # Llama 3 takes a word that is a token as it is; the others only get there by merges.
        whole_words = name in _LLAMA3
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole_words))
    except Exception as error:  # the package raises nothing more specific
        raise UserError(f"{model.path}: tokenizer.ggml.merges: {error}") from error
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    added = [(t, kind) for t, kind in zip(tokens, types, strict=True) if kind in _ADDED]
    tokenizer.add_tokens(
        [AddedToken(t, special=kind == _CONTROL, normalized=False) for t, kind in added]
    )
    if model.metadata.get("tokenizer.ggml.add_bos_token", name in _LLAMA3):
        bos = _named(model, "bos")
        if bos is None:
            raise UserError(f"{model.path}: tokenizer.ggml.bos_token_id is missing")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    return tokenizer


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


_ADDED = (_CONTROL, _USER_DEFINED)
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
