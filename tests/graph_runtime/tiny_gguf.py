"""Write the tiny models as GGUF files, the way llama.cpp's converter lays them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(
    path: Path,
    folder: Path,
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    kind: str = "gpt2",
    pre: str = "gpt-2",
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra_tensors: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Convert the HF-layout `folder` to `path`.

    Args:
        quantization: of all matrices; norms and biases stay F32.
        kind: tokenizer.ggml.model.
        pre: tokenizer.ggml.pre.
        metadata: further keys, without the architecture's prefix; they win.
        drop: tokenizer keys and GGUF tensor names to leave out.
        extra_tensors: further tensors, by GGUF name.

    Returns:
        The tensors that the file stands for, by HF name: dequantised by the gguf package.
    """
    config = json.loads((folder / "config.json").read_text())
    # llama.cpp knows Mistral as llama.
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["head_dim"],
        **(metadata or {}),
    }
    if config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    for key, value in keys.items():
        _add(writer, f"{architecture}.{key}", value)
    _add_tokenizer(writer, folder, kind, pre, drop)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        gguf_name = _gguf_name(name)
        if gguf_name in drop:
            continue
        stored = quantization if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        # Groups lie along a row, so quantising rows and reordering them commute.
        values = gguf.quants.quantize(_permuted(config, architecture, name, tensor), stored)
        writer.add_tensor(gguf_name, values, raw_dtype=stored)
        plain = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), stored), stored)
        tensors[name] = torch.from_numpy(plain.copy())
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_uint32(key, value)


def _add_tokenizer(
    writer: gguf.GGUFWriter, folder: Path, kind: str, pre: str, drop: tuple[str, ...]
) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: int(vocabulary[token]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": vocabulary[settings["bos_token"]],
        "tokenizer.ggml.eos_token_id": vocabulary[settings["eos_token"]],
        "tokenizer.chat_template": settings["chat_template"],
    }
    for key, value in values.items():
        if key not in drop:
            _add(writer, key, value)


def _permuted(
    config: dict[str, Any], architecture: str, name: str, tensor: torch.Tensor
) -> np.ndarray[Any, Any]:
    """Interleave the halves of every q and k head, as llama.cpp's converter does for llama."""
    array = tensor.numpy()
    if architecture != "llama" or not ("q_proj" in name or "k_proj" in name):
        return array
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    head_dim = config["head_dim"]
    rows = [
        head * head_dim + half * head_dim // 2 + i
        for head in range(heads)
        for i in range(head_dim // 2)
        for half in range(2)
    ]
    return np.ascontiguousarray(array[rows])


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, part = stem.split(".", 3)
        return f"blk.{index}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"
