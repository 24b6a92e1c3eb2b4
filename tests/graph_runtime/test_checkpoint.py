"""Checkpoints: sharded or single, strict names and shapes, hashes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from graph_runtime.architecture import read_config
from graph_runtime.checkpoint import load_weights
from graph_runtime.decoder import Decoder
from graph_runtime.model_files import model_hash, tokenizer_hash, weight_files
from graph_runtime.torch_target import build_decoder
from splitspec.errors import UserError
from tests.tiny import write_tiny_model

WEIGHTS = "model.safetensors"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
HEAD = "lm_head.weight"


def decoder_of(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = read_config(folder)
    decoder, _, _ = build_decoder(
        config,
        tap_layers=(0,),
        max_context_length=64,
        slot_count=1,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    load_weights(decoder, folder, tied=config.tied)
    return decoder


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS)


def shard(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / WEIGHTS).unlink()


def test_shards_load_as_the_single_file_does(tmp_path: Path) -> None:
    single = write_tiny_model(tmp_path / "single", tied=False)
    sharded = write_tiny_model(tmp_path / "sharded", tied=False)
    shard(sharded)
    theirs = dict(decoder_of(sharded).named_parameters())
    for name, parameter in decoder_of(single).named_parameters():
        assert torch.equal(parameter, theirs[name]), name


def test_bfloat16_weights_become_their_exact_float32_values(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    half = {name: t.to(torch.bfloat16) for name, t in load_file(folder / WEIGHTS).items()}
    save_file(half, folder / WEIGHTS)
    parameters = dict(decoder_of(folder).named_parameters())
    assert torch.equal(parameters["norm.weight"], half["model.norm.weight"].float())


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    rewrite(folder, **{K_PROJ: None})
    with pytest.raises(UserError, match=f"missing tensor {K_PROJ}$"):
        decoder_of(folder)


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", tied=False)
    rewrite(folder, **{HEAD: None})
    with pytest.raises(UserError, match=f"missing tensor {HEAD}"):
        decoder_of(folder)


def test_an_unexpected_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    rewrite(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(UserError, match=r"unexpected tensor .*q_proj\.bias \[64\]"):
        decoder_of(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    rewrite(folder, **{K_PROJ: torch.zeros(32, 63)})
    with pytest.raises(UserError, match=rf"{K_PROJ} is \[32, 63\]; .* asks for \[32, 64\]"):
        decoder_of(folder)


def test_a_tensor_of_a_dtype_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    shape = load_file(folder / WEIGHTS)[K_PROJ].shape
    packed = torch.zeros(shape[0], shape[1] // 2, dtype=torch.uint8)
    rewrite(folder, **{K_PROJ: packed.view(torch.float4_e2m1fn_x2)})
    with pytest.raises(
        UserError, match=rf"tensor {K_PROJ} is torch\.float4_e2m1fn_x2; expected fl"
    ):
        decoder_of(folder)


def test_an_integer_tensor_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    rewrite(folder, **{K_PROJ: torch.zeros(32, 64, dtype=torch.int8)})
    with pytest.raises(UserError, match=r"torch\.int8"):
        decoder_of(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_that_is_not_finite_is_refused_and_its_tensor_named(
    value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "m")
    weight = load_file(folder / WEIGHTS)[K_PROJ]
    weight[5, 3] = value
    rewrite(folder, **{K_PROJ: weight})
    with pytest.raises(UserError, match=f"tensor {K_PROJ} holds values that are not finite"):
        decoder_of(folder, dtype)


def test_a_tied_model_may_store_its_head_if_it_is_the_embedding(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    rewrite(folder, **{HEAD: embedding.clone()})
    decoder_of(folder)
    rewrite(folder, **{HEAD: embedding + 1})
    with pytest.raises(UserError, match="tie_word_embeddings"):
        decoder_of(folder)


def test_stored_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    rewrite(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    decoder_of(folder)


@pytest.mark.parametrize("size", [0, 7, 100, 20_000])
def test_a_truncated_file_is_one_clear_line(size: int, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    os.truncate(folder / WEIGHTS, size)
    with pytest.raises(UserError, match="not a readable safetensors file") as caught:
        decoder_of(folder)
    assert "\n" not in str(caught.value)


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle"):
        decoder_of(folder)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {"a": "gone.safetensors"}}',
        '{"weight_map": {"a": "../m/model.safetensors"}}',
        '{"weight_map": {"a": 3}}',
        "[" * 200_000,
    ],
    ids=range(8),
)
def test_a_broken_index_is_one_clear_line(index: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json"):
        weight_files(folder)


@pytest.mark.parametrize("name", ["x" * 300, "bad\ud800name", "two\nlines", "nul\0", ".."])
def test_a_name_in_an_index_that_no_file_can_have_is_one_line_of_text(
    name: str, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "m")
    index = {"weight_map": {K_PROJ: name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="which is not in the folder") as caught:
        weight_files(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(folder))
    str(caught.value).encode("utf-8")


def test_the_hash_follows_the_content_and_nothing_else(tmp_path: Path) -> None:
    one = write_tiny_model(tmp_path / "one", seed=1)
    same = write_tiny_model(tmp_path / "same", seed=1)
    other = write_tiny_model(tmp_path / "other", seed=2)
    cache = tmp_path / "cache"
    first = model_hash(one, cache)
    assert model_hash(same, cache) == first
    assert model_hash(other, cache) != first
    rewrite(one, **{K_PROJ: torch.zeros(32, 64)})
    os.utime(one / WEIGHTS, ns=(1, 1))
    assert model_hash(one, cache) != first
    assert tokenizer_hash(one) == tokenizer_hash(other)


def test_a_remembered_hash_is_used_and_a_read_only_cache_is_no_error(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    cache = tmp_path / "cache"
    first = model_hash(folder, cache)
    assert len(list((cache / "hashes").iterdir())) == 1
    assert model_hash(folder, cache) == first
    (tmp_path / "file").write_text("")
    assert model_hash(folder, tmp_path / "file") == first


@pytest.mark.parametrize("how", ["renamed over it", "written into it"])
def test_a_model_replaced_with_the_same_size_and_time_is_hashed_anew(
    how: str, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "m", seed=1)
    other = write_tiny_model(tmp_path / "other", seed=2)
    for path in (folder / WEIGHTS, other / WEIGHTS):
        os.utime(path, ns=(0, 0))
    cache = tmp_path / "cache"
    first = model_hash(folder, cache)
    time.sleep(0.02)  # a change time counts in the kernel's ticks
    if how == "renamed over it":
        (other / WEIGHTS).replace(folder / WEIGHTS)
    else:
        (folder / WEIGHTS).write_bytes((other / WEIGHTS).read_bytes())
        os.utime(folder / WEIGHTS, ns=(0, 0))
    assert model_hash(folder, cache) != first
    assert model_hash(folder, cache) == model_hash(folder, tmp_path / "empty cache")


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, b"F" * 64, b"0" * 63, b"0" * 64 + b"\n"])
def test_a_damaged_remembered_hash_is_computed_again(damage: bytes, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    first = model_hash(folder, tmp_path)
    (remembered,) = (tmp_path / "hashes").iterdir()
    remembered.write_bytes(damage)
    assert model_hash(folder, tmp_path) == first
    assert remembered.read_text() == first


def test_a_folder_without_a_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        tokenizer_hash(tmp_path)
