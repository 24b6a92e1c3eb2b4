"""Read a GGUF file as what an HF checkpoint would hold: config.json and named fp32 tensors.

Covers the architectures llama (Llama, Mistral, SmolLM), qwen2 and qwen3.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from graph_runtime.rope import frequencies
from graph_runtime.rope_config import RopeScaling
from splitspec.errors import UserError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQUENCIES = "rope_freqs.weight"
_LLAMA3_FACTORS = (8.0, 32.0)
"""Llama 3.1 and 3.2. A GGUF holds the resulting divisors only, so they are recognised by them."""
_LLAMA3_CONTEXT = 8192
_UNREADABLE = (
    ValueError, KeyError, IndexError, TypeError, OverflowError, NotImplementedError, MemoryError,
    struct.error,
)  # fmt: skip
"""What the `gguf` package and numpy raise on bytes that make no sense."""


@dataclass(frozen=True, kw_only=True)
class GGUFModel:
    """An open GGUF file whose metadata has been read."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, gguf.ReaderTensor]
    """By GGUF name; the bytes stay in the file until `hf_tensors` converts them."""


def open_gguf(path: Path) -> GGUFModel:
    """Open a GGUF file and read its metadata.

    Raises:
        UserError: no GGUF, truncated, or damaged.
    """
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except _UNREADABLE as error:
        raise UserError(f"{path} is not a complete GGUF file: {_one_line(error)}") from error
    return GGUFModel(path=path, metadata=metadata, tensors=tensors)


def hf_config(model: GGUFModel) -> dict[str, Any]:
    """Return the content of a `config.json` for the model.

    Raises:
        UserError: an architecture or a feature that is not supported, or missing metadata, named.
    """
    architecture = model.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{model.path}: general.architecture is {architecture!r}; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if _optional(model, "expert_count"):
        raise UserError(f"{model.path}: expert_count is not 0; experts are not supported")
    heads = _required(model, "attention.head_count")
    kv_heads = _optional(model, "attention.head_count_kv", heads)
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads < 1:
        raise UserError(f"{model.path}: head counts that differ by layer are not supported")
    hidden_size = _count(model, "embedding_length")
    head_dim = _optional(model, "attention.key_length", hidden_size // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _optional(model, key, head_dim) != head_dim:
            raise UserError(f"{model.path}: {key} is not the head width, {head_dim}")
    window = _optional(model, "attention.sliding_window")
    eos = eos_token_ids(model)
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": int(_tensor(model, "token_embd.weight").shape[-1]),
        "hidden_size": hidden_size,
        "intermediate_size": _count(model, "feed_forward_length"),
        "num_hidden_layers": _layer_count(model),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _short(model, "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _count(model, "context_length"),
        "rope_theta": _short(model, "rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(model, head_dim),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "bos_token_id": model.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "torch_dtype": "float32",
    }
    return config | _family_keys(model, architecture, window)


def eos_token_ids(model: GGUFModel) -> list[int]:
    """Return the ids that end an answer, the model's main one first.

    Raises:
        UserError: the file names none.
    """
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [model.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    found = list(dict.fromkeys(int(i) for i in ids if i is not None))
    if not found:
        raise UserError(f"{model.path}: tokenizer.ggml.eos_token_id is missing")
    return found


def hf_tensors(model: GGUFModel, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield HF names and exactly dequantised fp32 tensors, in the order of the file.

    Raises:
        UserError: a tensor that is unknown, damaged or of a type that cannot be dequantised.
    """
    for name, tensor in model.tensors.items():
        if name == _ROPE_FREQUENCIES:
            continue
        try:
            plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except _UNREADABLE as error:
            raise UserError(f"{model.path}: tensor {name}: {_one_line(error)}") from error
        values = torch.from_numpy(
            np.array(plain, dtype=np.float32)
        )  # a copy: the file is read-only
        if config["model_type"] in ("llama", "mistral"):
            if ".attn_q." in name:
                values = _unpermute(model, name, values, config, "num_attention_heads")
            elif ".attn_k." in name:
                values = _unpermute(model, name, values, config, "num_key_value_heads")
        yield _hf_name(model, name), values


def _unpermute(
    model: GGUFModel, name: str, values: torch.Tensor, config: dict[str, Any], heads_key: str
) -> torch.Tensor:
    """Undo the row order of GGUF's llama: pairs (2i, 2i+1) back to halves (i, i + D/2).

    Raises:
        UserError: the rows are not those of whole heads.
    """
    heads, head_dim = config[heads_key], config["head_dim"]
    if values.shape[0] != heads * head_dim or head_dim % 2:
        raise UserError(
            f"{model.path}: tensor {name} has {values.shape[0]} rows; "
            f"expected {heads} heads of {head_dim}, an even width"
        )
    pairs = values.view(heads, head_dim // 2, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape).contiguous()


def _hf_name(model: GGUFModel, name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _NAMES:
        raise UserError(f"{model.path}: unexpected tensor {name}")
    layer = f"model.layers.{match[1]}." if match[1] is not None else ""
    return f"{layer}{_NAMES[match[2]]}.{match[3]}"


def _family_keys(model: GGUFModel, architecture: str, window: int | None) -> dict[str, Any]:
    """Return the keys that only some families have."""
    if architecture != "llama":
        if window:
            raise UserError(f"{model.path}: attention.sliding_window is {window}; expected none")
        return {"attention_bias": True} if "blk.0.attn_output.bias" in model.tensors else {}
    if window:
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window,
        }
    return {
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in model.tensors,
    }


def _rope_scaling(model: GGUFModel, head_dim: int) -> dict[str, Any] | None:
    if _ROPE_FREQUENCIES in model.tensors:
        return _llama3_scaling(model, head_dim)
    kind = _optional(model, "rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = _short(model, "rope.scaling.factor", 1.0)
    original = _optional(model, "rope.scaling.original_context_length")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and original:
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise UserError(f"{model.path}: rope.scaling.type is {kind!r}; supported: linear, yarn")


def _llama3_scaling(model: GGUFModel, head_dim: int) -> dict[str, Any]:
    """Find the llama3 factor whose frequency divisors are those of the file."""
    theta = _short(model, "rope.freq_base", 10000.0)
    stored = torch.from_numpy(np.array(model.tensors[_ROPE_FREQUENCIES].data, dtype=np.float32))
    plain = frequencies(RopeScaling(kind="default", theta=theta), head_dim)
    for factor in _LLAMA3_FACTORS:
        rope = RopeScaling(
            kind="llama3",
            theta=theta,
            factor=factor,
            original_context=_LLAMA3_CONTEXT,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        )
        divisors = plain / frequencies(rope, head_dim)
        if divisors.shape == stored.shape and torch.allclose(divisors, stored, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": _LLAMA3_CONTEXT,
            }
    raise UserError(f"{model.path}: {_ROPE_FREQUENCIES} holds no known llama3 scaling")


def _tensor(model: GGUFModel, name: str) -> gguf.ReaderTensor:
    if name not in model.tensors:
        raise UserError(f"{model.path}: missing tensor {name}")
    return model.tensors[name]


def _required(model: GGUFModel, key: str) -> Any:
    value = _optional(model, key)
    if value is None:
        name = f"{model.metadata['general.architecture']}.{key}"
        raise UserError(f"{model.path}: {name} is missing")
    return value


def _count(model: GGUFModel, key: str) -> int:
    value = _required(model, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{model.path}: {key} is {value!r:.80}; expected a positive integer")
    return value


def _layer_count(model: GGUFModel) -> int:
    """Return the number of layers, which cannot be more than there are tensors."""
    count = _count(model, "block_count")
    if count > len(model.tensors):
        raise UserError(
            f"{model.path}: block_count is {count}, but the file holds {len(model.tensors)} tensors"
        )
    return count


def _optional(model: GGUFModel, key: str, default: Any = None) -> Any:
    return model.metadata.get(f"{model.metadata['general.architecture']}.{key}", default)


def _short(model: GGUFModel, key: str, default: float | None = None) -> float:
    """Return the shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    value = _required(model, key) if default is None else _optional(model, key, default)
    if not isinstance(value, int | float):
        raise UserError(f"{model.path}: {key} is {value!r:.80}; expected a number")
    return float(str(np.float32(value)))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
