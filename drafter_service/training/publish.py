"""Write trained drafts in the layouts that public engines read, in files of a bounded size.

EAGLE-3: SafeAILab's tensor names with SpecForge's `eagle_config`, which states the tap layers as
0-based layer outputs: the number k is the output of layer k, as everywhere in splitspec. DFlash:
z-lab's layout, whose `target_layer_ids` number them alike.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from graph_runtime.architecture import DecoderConfig
from graph_runtime.rope_config import RopeScaling
from splitspec.errors import UserError

SHARD_BYTES = 15 * 2**20
"""Most bytes of one file, its header included: what hosts of repositories take without LFS."""
FC = "fc.weight"
HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_MODE = 0o644
_ROPE_KEYS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_context",
    },
    "yarn": {
        "factor": "factor",
        "attention_factor": "attention_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "original_max_position_embeddings": "original_context",
    },
}
"""By kind of RoPE: the field of `RopeScaling` behind each key of `rope_scaling`."""


def eagle3_config(
    target: DecoderConfig,
    *,
    tap_layers: tuple[int, ...],
    intermediate_size: int,
    draft_vocab_size: int,
) -> dict[str, Any]:
    """Return the config.json of an EAGLE-3 draft of one layer with the target's heads and RoPE."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **_layer_config(target, n_layers=1, intermediate_size=intermediate_size),
        "target_hidden_size": target.hidden_size,
        "draft_vocab_size": draft_vocab_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(tap_layers),
            "use_aux_hidden_state": True,
        },
    }


def dflash_config(
    target: DecoderConfig,
    *,
    tap_layers: tuple[int, ...],
    n_layers: int,
    block_size: int,
    mask_token_id: int,
) -> dict[str, Any]:
    """Return the config.json of a DFlash draft whose layers have the target's shape."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **_layer_config(target, n_layers=n_layers, intermediate_size=target.intermediate_size),
        "layer_types": ["full_attention"] * n_layers,
        "num_target_layers": target.n_layers,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(tap_layers)},
    }


def fold_tap_rms(fc_weight: torch.Tensor, tap_rms: torch.Tensor) -> torch.Tensor:
    """Return fc [H, T * Ht] float32 that takes raw taps where `fc_weight` takes scaled ones.

    Args:
        fc_weight: [H, T * Ht] float32, trained on taps that were divided by `tap_rms`.
        tap_rms: [T] float32.
    """
    rows, width = fc_weight.shape
    assert width % len(tap_rms) == 0, (fc_weight.shape, tap_rms.shape)
    by_tap = fc_weight.float().view(rows, len(tap_rms), -1)
    return (by_tap / tap_rms.to(by_tap)[None, :, None]).view(rows, width)


def publish_eagle3(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    target_ids: torch.Tensor,
    config: Mapping[str, Any],
    model_card: str,
) -> None:
    """Write an EAGLE-3 checkpoint: config.json, bf16 shards with an index, README.md.

    Args:
        folder: made if missing; a checkpoint that is there is replaced.
        tensors: weights by their published names (`midlayer.*`, `fc.weight`, `norm.weight`,
            `lm_head.weight`), `fc.weight` as `fold_tap_rms` returns it.
        target_ids: [Vd] int64, the target id of each row of the head, strictly increasing.
        config: see `eagle3_config`.
        model_card: README.md.

    Raises:
        UserError: a tensor is not finite, or larger than a file may be; or the folder holds
            something else.
    """
    ids = target_ids.cpu()
    assert ids.dtype == torch.int64, ids.dtype
    assert bool((ids.diff() > 0).all()), "target ids of a draft vocabulary are ascending"
    known = torch.zeros(config["vocab_size"], dtype=torch.bool)
    known[ids] = True
    stored = {**_rounded(tensors), "d2t": ids - torch.arange(len(ids)), "t2d": known}
    _write(folder, stored, config, model_card)


def publish_dflash(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    config: Mapping[str, Any],
    model_card: str,
) -> None:
    """Write a DFlash checkpoint: config.json, bf16 shards with an index, README.md.

    Args:
        folder: made if missing; a checkpoint that is there is replaced.
        tensors: weights by their published names (`fc.weight`, `hidden_norm.weight`,
            `layers.*`, `norm.weight`), `fc.weight` as `fold_tap_rms` returns it.
        config: see `dflash_config`.
        model_card: README.md.

    Raises:
        UserError: as `publish_eagle3`.
    """
    _write(folder, _rounded(tensors), config, model_card)


def largest_head(hidden_size: int) -> int:
    """Return how many rows of `hidden_size` bf16 elements a head may have to fit in one file."""
    return (SHARD_BYTES - _header_bytes([HEAD])) // (2 * hidden_size)


def _layer_config(
    target: DecoderConfig, *, n_layers: int, intermediate_size: int
) -> dict[str, Any]:
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": n_layers,
        "num_attention_heads": target.n_heads,
        "num_key_value_heads": target.n_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_theta": target.rope.theta,
        "rope_scaling": _rope_scaling(target.rope),
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _rope_scaling(rope: RopeScaling) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    keys = _ROPE_KEYS[rope.kind]
    return {"rope_type": rope.kind} | {key: getattr(rope, field) for key, field in keys.items()}


def _rounded(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights as bf16 on the CPU.

    Raises:
        UserError: names the tensor that holds a NaN or an infinity.
    """
    rounded = {}
    for name, tensor in tensors.items():
        weight = tensor.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
        bad = int((~weight.isfinite()).sum())
        if bad:
            raise UserError(
                f"tensor {name} holds {bad} of {weight.numel()} values that are not finite; "
                "expected all finite: the training diverged, try a lower --learning-rate"
            )
        rounded[name] = weight
    return rounded


def _write(
    folder: Path, stored: Mapping[str, torch.Tensor], config: Mapping[str, Any], model_card: str
) -> None:
    """Write a checkpoint beside `folder`, then put it in its place."""
    shards = _fill_shards(stored)
    _check_replaceable(folder)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that ended in the middle
    try:
        part.mkdir(parents=True)
        _write_shards(part, stored, shards)
        _write_json(part / _CONFIG, config)
        (part / "README.md").write_text(model_card, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {part}: {error}") from error
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _check_replaceable(folder: Path) -> None:
    """Refuse a path whose content is not a published checkpoint's: it would be lost.

    Raises:
        UserError: names the path.
    """
    if not folder.exists() or (folder / INDEX).is_file():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise UserError(f"{folder} holds something else; expected a checkpoint or nothing there")


def _fill_shards(stored: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of each file's tensors: in order, a new file where the next does not fit.

    Raises:
        UserError: a tensor fits in no file.
    """
    shards: list[list[str]] = []
    held = 0
    for name in sorted(stored):
        size = stored[name].nbytes
        if size + _header_bytes([name]) > SHARD_BYTES:
            raise UserError(_too_large(name, stored[name]))
        if not shards or held + size + _header_bytes([*shards[-1], name]) > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _too_large(name: str, tensor: torch.Tensor) -> str:
    said = f"tensor {name} {list(tensor.shape)} is {tensor.nbytes} bytes in bf16"
    most = f"expected at most {SHARD_BYTES}, the most of one file"
    if name != HEAD:
        return f"{said}; {most}"
    return f"{said}; {most}: --draft-vocab-size in [1, {largest_head(tensor.shape[1])}] fits"


def _header_bytes(names: list[str]) -> int:
    """Return the most bytes that a safetensors header of tensors of these names takes."""
    return 64 + sum(len(name) + 128 for name in names)


def _write_shards(
    folder: Path, stored: Mapping[str, torch.Tensor], shards: list[list[str]]
) -> None:
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file({name: stored[name] for name in names}, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
        (folder / file).chmod(_MODE)  # safetensors makes files that only their owner reads
        size = (folder / file).stat().st_size
        assert size <= SHARD_BYTES, (file, size)
    total = sum(tensor.nbytes for tensor in stored.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
