"""The pulled SmolLM2: sensible text, the original's tokens, parity with `transformers`."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
import regex
import torch
from tokenizers import Tokenizer

from graph_runtime.gguf_file import GGUFModel
from graph_runtime.load import load_torch_target
from graph_runtime.target import Span
from tests.conftest import RealModel
from tests.graph_runtime.test_gguf_tokenizer import TEXTS, encode
from tests.graph_runtime.test_parity import reference

EOS = 2

pytestmark = pytest.mark.real_model


def prompt_ids(folder: Path, question: str) -> list[int]:
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    text = jinja2.Template(settings["chat_template"]).render(
        messages=[{"role": "user", "content": question}], add_generation_prompt=True
    )
    ids: list[int] = tokenizer(folder).encode(text).ids
    return ids


def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_it_names_the_capital_of_france_and_agrees_with_transformers(real_model: RealModel) -> None:
    """Greedy over a chat prompt; then the reference's logits for the same tokens."""
    target = load_torch_target(
        folder=real_model.folder,
        model_id="smollm2-135m",
        precision="fp32",
        cache_dir=real_model.cache_dir,
        tap_layers=None,
        max_context_length=128,
        slot_count=1,
        max_prefill_chunk=128,
        threads=None,
    )
    tokens = prompt_ids(real_model.folder, "What is the capital of France?")
    start, logits = 0, []
    while tokens[-1] != EOS and len(tokens) < 100:
        chunk = tokens[start:]
        (output,) = target.step(
            [Span(slot=0, start=start, token_ids=chunk, logits_count=len(chunk), wants_rows=False)]
        )
        logits.append(output.logits)
        start = len(tokens)
        tokens.append(int(output.logits[-1].argmax()))
    assert "Paris" in tokenizer(real_model.folder).decode(tokens[len(logits[0]) :])
    expected, _ = reference(real_model.folder, tokens[:-1])
    # 30 layers of logits up to 30: float32 sums in another order, hence not 1e-4.
    torch.testing.assert_close(torch.cat(logits), expected, atol=2e-3, rtol=0)


def test_the_tokenizer_is_the_originals(real_model: RealModel) -> None:
    """Known encodings of HuggingFaceTB/SmolLM2-135M-Instruct's pieces, and lossless text."""
    ours = tokenizer(real_model.folder)
    assert ours.get_vocab_size() == 49152
    assert ours.encode("in 2024, don't").tokens == [
        "in", "Ġ", "2", "0", "2", "4", ",", "Ġdon", "'t",
    ]  # fmt: skip
    for text in TEXTS:
        encoded = ours.encode(text)
        assert ours.decode(encoded.ids) == text
        assert not [token for token in encoded.tokens if regex.search(r"\d.|.\d", token)]


def test_its_encoding_is_that_of_a_plain_byte_pair_encoder(real_model: RealModel) -> None:
    folder = real_model.folder
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    metadata = {
        "tokenizer.ggml.tokens": sorted(stored["vocab"], key=lambda token: stored["vocab"][token]),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in stored["merges"]],
    }
    model = GGUFModel(path=folder, metadata=metadata, tensors={})
    for text in [*TEXTS, "What is the capital of France? It's 42,000 km² away — naïve café 🙂."]:
        assert tokenizer(folder).encode(text).ids == encode(model, text, "smollm"), text


def test_special_tokens_are_single_ids_with_the_originals_numbers(real_model: RealModel) -> None:
    ours = tokenizer(real_model.folder)
    assert ours.encode("<|im_start|>user\nhi<|im_end|>\n<|endoftext|>").ids[0] == 1
    for i, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]):
        assert ours.encode(f"a{token}b").ids[1] == i
        assert len(ours.encode(token).ids) == 1
