"""Read HF safetensors checkpoints: single file or sharded by index, strict names and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from graph_runtime.model_files import weight_files
from splitspec.errors import UserError

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_DERIVED = ".rotary_emb.inv_freq"
"""Old checkpoints store this buffer; it follows from config.json."""
_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
"""Those that torch converts to float32; of float4, two values a byte, it does not."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor that a file names in its header and that has not been read."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Return its content on the CPU, in its own dtype.

        Raises:
            UserError: the file is corrupt.
        """
        with _opened(self.path) as file:
            return file.get_tensor(self.name)

    def read_weight(self) -> torch.Tensor:
        """Return its content on the CPU as float32.

        Raises:
            UserError: the file is corrupt, or a value is no finite floating-point number.
        """
        tensor = self.read()
        _check_dtype(self.path, self.name, tensor)
        weight = tensor.float()
        _check_finite(self.path, self.name, weight)
        return weight


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor in `folder` by name, less derived buffers; only headers are read.

    Raises:
        UserError: no safetensors, a corrupt file, or one tensor in two files, named.
    """
    found: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                if name in found:
                    raise UserError(f"{path}: tensor {name} is in {found[name].path.name} too")
                if not name.endswith(_DERIVED):
                    shape = tuple(file.get_slice(name).get_shape())
                    found[name] = StoredTensor(path=path, name=name, shape=shape)
    return found


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
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            yield name, file.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}") from error


def _copy(path: Path, name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    _check_dtype(path, name, tensor)
    if tensor.shape != parameter.shape:
        raise UserError(
            f"{path}: tensor {name} is {list(tensor.shape)}; "
            f"config.json asks for {list(parameter.shape)}"
        )
    with torch.no_grad():
        parameter.copy_(tensor)
        _check_finite(path, name, parameter)


def _check_dtype(path: Path, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        raise UserError(
            f"{path}: tensor {name} is {tensor.dtype}; expected floating point of 8 to 64 bits"
        )


def _check_finite(path: Path, name: str, written: torch.Tensor) -> None:
    # One pass over what was just written: NaN and infinities show in the extremes.
    if not torch.stack(torch.aminmax(written)).isfinite().all():
        raise UserError(f"{path}: tensor {name} holds values that are not finite")
