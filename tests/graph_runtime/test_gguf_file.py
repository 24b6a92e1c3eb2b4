"""GGUF files: names, row order, quantised values, metadata, damage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from graph_runtime.architecture import parse_config, read_config
from graph_runtime.gguf_file import eos_token_ids, hf_config, hf_tensors, open_gguf
from splitspec.errors import UserError
from tests.graph_runtime.tiny_gguf import write_tiny_gguf
from tests.tiny import EOS_TOKEN_ID, write_tiny_model

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama untied, wide heads": {"family": "llama", "tied": False, "head_dim": 32},
    "llama with biases": {
        "family": "llama", "config": {"attention_bias": True, "mlp_bias": True}
    },
    "mistral with a window": {"family": "mistral", "config": {"sliding_window": 50}},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_dim": 32, "tied": False},
}  # fmt: skip
QUANTIZATIONS = [
    gguf.GGMLQuantizationType.F32,
    gguf.GGMLQuantizationType.F16,
    gguf.GGMLQuantizationType.Q8_0,
    gguf.GGMLQuantizationType.Q4_0,
    gguf.GGMLQuantizationType.Q4_1,
]


@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=lambda kind: str(kind.name))
@pytest.mark.parametrize("shape", SHAPES)
def test_config_and_tensors_are_those_that_were_written(
    shape: str, quantization: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "m", **SHAPES[shape])
    written = write_tiny_gguf(tmp_path / "m.gguf", folder, quantization=quantization)
    model = open_gguf(tmp_path / "m.gguf")
    config = hf_config(model)
    assert parse_config(config) == read_config(folder)
    tensors = dict(hf_tensors(model, config))
    assert tensors.keys() == written.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, written[name]), name
    assert eos_token_ids(model) == [EOS_TOKEN_ID]


def test_rope_scaling_is_read(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 2.5,
        "rope.scaling.original_context_length": 512,
    }
    write_tiny_gguf(tmp_path / "linear.gguf", folder, metadata=linear)
    write_tiny_gguf(tmp_path / "yarn.gguf", folder, metadata=yarn)
    assert hf_config(open_gguf(tmp_path / "linear.gguf"))["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    assert hf_config(open_gguf(tmp_path / "yarn.gguf"))["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 2.5,
        "original_max_position_embeddings": 512,
    }


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    """The divisors as llama.cpp's converter computes them, by wavelength, for factor 32."""
    folder = write_tiny_model(tmp_path / "m", head_dim=64, config={"rope_theta": 500000.0})
    divisors = []
    for i in range(0, 64, 2):
        wavelength = 2 * torch.pi * 500000.0 ** (i / 64)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / 32 + smooth))
    for name, values in (("known", divisors), ("other", [2.0] * 32), ("short", divisors[:9])):
        extra = {"rope_freqs.weight": torch.tensor(values)}
        write_tiny_gguf(tmp_path / f"{name}.gguf", folder, extra_tensors=extra)
    model = open_gguf(tmp_path / "known.gguf")
    config = hf_config(model)
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["rope_scaling"]["factor"] == 32.0
    assert "rope_freqs.weight" not in dict(hf_tensors(model, config))
    for name in ("other", "short"):
        with pytest.raises(UserError, match="no known llama3 scaling"):
            hf_config(open_gguf(tmp_path / f"{name}.gguf"))


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"expert_count": 8}, "expert_count"),
        ({"rope.dimension_count": 8}, "rope.dimension_count"),
        ({"attention.value_length": 8}, "attention.value_length"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"attention.head_count": [4, 4, 4, 2]}, "head counts"),
        ({"block_count": 0x7F000004}, "block_count is 2130706436, but the file holds 38 tensors"),
        ({"block_count": 0}, "block_count is 0; expected a positive integer"),
        ({"embedding_length": "wide"}, "embedding_length is 'wide'; expected a positive integer"),
        ({"rope.freq_base": "fast"}, "rope.freq_base is 'fast'; expected a number"),
    ],
)
def test_what_is_not_supported_is_named(
    metadata: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "m")
    write_tiny_gguf(tmp_path / "m.gguf", folder, metadata=metadata)
    with pytest.raises(UserError, match=named):
        hf_config(open_gguf(tmp_path / "m.gguf"))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match="'mamba'; supported: llama, qwen2, qwen3"):
        hf_config(open_gguf(tmp_path / "m.gguf"))


def test_an_unknown_tensor_and_a_missing_embedding_are_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    extra = {"blk.0.mystery.weight": torch.zeros(4)}
    write_tiny_gguf(tmp_path / "extra.gguf", folder, extra_tensors=extra)
    model = open_gguf(tmp_path / "extra.gguf")
    with pytest.raises(UserError, match=r"unexpected tensor blk\.0\.mystery\.weight"):
        dict(hf_tensors(model, hf_config(model)))
    write_tiny_gguf(tmp_path / "missing.gguf", folder, drop=("token_embd.weight",))
    with pytest.raises(UserError, match=r"missing tensor token_embd\.weight"):
        hf_config(open_gguf(tmp_path / "missing.gguf"))


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.03, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_one_clear_line(share: float, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, folder, quantization=gguf.GGMLQuantizationType.Q4_1)
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(UserError, match=r"m\.gguf is not a complete GGUF file") as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"attention.head_count": 3}, r"blk\.0\.attn_q\.weight has 64 rows; expected 3 heads"),
        ({"attention.head_count_kv": 0}, r"blk\.0\.attn_k\.weight has 32 rows; expected 0 heads"),
    ],
)
def test_heads_that_are_not_those_of_the_rows_are_named(
    metadata: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "m")
    write_tiny_gguf(tmp_path / "m.gguf", folder, metadata=metadata)
    model = open_gguf(tmp_path / "m.gguf")
    with pytest.raises(UserError, match=named):
        dict(hf_tensors(model, hf_config(model)))


def test_an_odd_number_of_rows_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    name = "blk.1.attn_q.weight"
    extra = {name: torch.zeros(63, 64)}
    write_tiny_gguf(tmp_path / "m.gguf", folder, drop=(name,), extra_tensors=extra)
    model = open_gguf(tmp_path / "m.gguf")
    with pytest.raises(UserError, match=r"attn_q\.weight has 63 rows; expected 4 heads of 16"):
        dict(hf_tensors(model, hf_config(model)))


def test_damaged_bytes_never_give_a_traceback(tmp_path: Path) -> None:
    """Every 37th byte of the header and metadata flipped, one at a time."""
    folder = write_tiny_model(tmp_path / "m", n_layers=1)
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, folder)
    content = path.read_bytes()
    refused = 0
    for offset in range(0, 1500, 37):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 0xFF]) + content[offset + 1 :])
        try:
            model = open_gguf(path)
            dict(hf_tensors(model, hf_config(model)))
        except UserError:
            refused += 1
    assert refused > 10


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*gone\.gguf"):
        open_gguf(tmp_path / "gone.gguf")
