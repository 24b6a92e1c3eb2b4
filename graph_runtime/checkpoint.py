"""Read HF safetensors checkpoints: single file or sharded by index, strict names and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from graph_runtime.model_files import weight_files
from splitspec.errors import UserError

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_DERIVED = ".rotary_emb.inv_freq"
"""Old checkpoints store this buffer; it follows from config.json."""


def load_weights(decoder: nn.Module, folder: Path, *, tied: bool) -> None:
    """Copy the checkpoint in `folder` into `decoder`, converting to the decoder's dtype.

    Args:
        decoder: parameters are named as in the checkpoint, less the prefix `model.`.
        folder: HF-layout folder.
        tied: the head is the embedding; a stored head must then equal it.

    Raises:
        UserError: no safetensors, a corrupt file, or a tensor that is missing, unexpected or of
            another shape: named, with both shapes; or that holds a NaN or an infinity.
    """
    wanted: dict[str, torch.Tensor] = {
        _stored_name(name): parameter for name, parameter in decoder.named_parameters()
    }
    missing = set(wanted)
    for path in weight_files(folder):
        for name, tensor in _tensors(path):
            if name == _HEAD and name not in wanted:  # tied, and stored all the same
                wanted[name] = torch.empty_like(wanted[_EMBEDDING])
            if name.endswith(_DERIVED):
                continue
            if name not in wanted:
                raise UserError(f"{path}: unexpected tensor {name} {list(tensor.shape)}")
            _copy(path, name, tensor, wanted[name])
            missing.discard(name)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{folder}: missing tensor {min(missing)}{more}")
    if _HEAD in wanted and tied and not torch.equal(wanted[_HEAD], wanted[_EMBEDDING]):
        raise UserError(
            f"{folder}: tie_word_embeddings is true but {_HEAD} differs from the embedding"
        )


def _stored_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}") from error


def _copy(path: Path, name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    if tensor.shape != parameter.shape:
        raise UserError(
            f"{path}: tensor {name} is {list(tensor.shape)}; "
            f"config.json asks for {list(parameter.shape)}"
        )
    if not tensor.is_floating_point():
        raise UserError(f"{path}: tensor {name} is {tensor.dtype}; expected floating point")
    with torch.no_grad():
        parameter.copy_(tensor)
        # One pass over what was just written: NaN and infinities show in the extremes.
        extremes = torch.stack(torch.aminmax(parameter))
    if not extremes.isfinite().all():
        raise UserError(f"{path}: tensor {name} holds values that are not finite")
