"""Write tiny random models in the HF layout: what tests load in place of a real checkpoint.

Nothing of the product is imported here: the folder is what `transformers` would write.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
_MERGES = (
    "t+h h+e i+n a+n r+e o+n e+r a+t e+n o+r Ġ+t Ġ+a Ġ+s Ġ+w Ġ+c Ġt+he an+d Ġ+o in+g e+s o+u "
    "i+s i+t a+r l+l Ġ+b Ġ+f Ġ+p a+l Ġ+m Ġ+d Ġo+f Ġ+h Ġ+in l+e o+m Ġa+n Ġan+d i+c s+t e+l"
)
MERGES = tuple((left, right) for left, right in (pair.split("+") for pair in _MERGES.split()))
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def write_tiny_model(
    folder: Path,
    *,
    family: str = "llama",
    seed: int = 0,
    vocab_size: int = 300,
    n_layers: int = 4,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 128,
    tied: bool = True,
    max_position_embeddings: int = 2048,
    logit_scale: float = 0.3,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write config.json, model.safetensors (fp32), tokenizer.json and tokenizer_config.json.

    Args:
        folder: created when missing; returned.
        family: "llama", "mistral", "qwen2" or "qwen3".
        seed: same arguments and seed, same bytes.
        vocab_size: below 259 the tokenizer still has 259 tokens: then use token ids only.
        tied: whether the head is the embedding.
        logit_scale: standard deviation of the head's weights; larger is more peaked.
        config: further config.json keys, which win (`rope_scaling`, `sliding_window`, ...).
    """
    folder.mkdir(parents=True, exist_ok=True)
    head_dim = head_dim or hidden // n_heads
    written: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "float32",
    }
    if family == "mistral":
        written["sliding_window"] = None
    written.update(config or {})
    _write_json(folder / "config.json", written)
    _write_json(folder / "generation_config.json", {"eos_token_id": EOS_TOKEN_ID})
    save_file(_tensors(written, seed, logit_scale), folder / "model.safetensors", {"format": "pt"})
    write_tiny_tokenizer(folder, vocab_size)
    return folder


def write_tiny_tokenizer(folder: Path, vocab_size: int = 300) -> None:
    """Write a byte-level BPE tokenizer of at most `vocab_size` ids that covers all of UTF-8."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = MERGES[: max(0, vocab_size - len(tokens))]
    tokens += [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _tensors(config: dict[str, Any], seed: int, logit_scale: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q_width = config["num_attention_heads"] * head_dim
    kv_width = config["num_key_value_heads"] * head_dim
    family = config["model_type"]
    tensors: dict[str, torch.Tensor] = {}

    def normal(name: str, *shape: int, std: float) -> None:
        tensors[name] = torch.randn(*shape, generator=generator) * std

    def linear(name: str, fan_out: int, fan_in: int, *, bias: bool = False) -> None:
        normal(f"{name}.weight", fan_out, fan_in, std=1.3 / math.sqrt(fan_in))
        if bias:
            normal(f"{name}.bias", fan_out, std=0.2)

    def norm(name: str, width: int) -> None:
        tensors[f"{name}.weight"] = 1.0 + 0.1 * torch.randn(width, generator=generator)

    normal("model.embed_tokens.weight", config["vocab_size"], hidden, std=logit_scale)
    attention_bias = bool(config.get("attention_bias", False))
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm", hidden)
        qkv_bias = family == "qwen2" or attention_bias
        linear(f"{layer}.self_attn.q_proj", q_width, hidden, bias=qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv_width, hidden, bias=qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv_width, hidden, bias=qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, q_width, bias=attention_bias)
        if family == "qwen3":
            norm(f"{layer}.self_attn.q_norm", head_dim)
            norm(f"{layer}.self_attn.k_norm", head_dim)
        norm(f"{layer}.post_attention_layernorm", hidden)
        mlp_bias = bool(config.get("mlp_bias", False))
        linear(f"{layer}.mlp.gate_proj", config["intermediate_size"], hidden, bias=mlp_bias)
        linear(f"{layer}.mlp.up_proj", config["intermediate_size"], hidden, bias=mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, config["intermediate_size"], bias=mlp_bias)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        normal("lm_head.weight", config["vocab_size"], hidden, std=logit_scale)
    return tensors


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
