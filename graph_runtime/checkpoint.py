"""Read HF safetensors checkpoints: single file or sharded by index, strict names and shapes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from splitspec.errors import UserError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
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


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of `folder`, in the order of their names.

    Raises:
        UserError: there are none, or the index names one that is not there.
    """
    index = folder / _INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted({str(file) for file in weight_map.values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{index} is not an index of safetensors files") from error
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise UserError(f"{index} names {name}, which is not in the folder")
        return [folder / name for name in names]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    hint = f" ({pickled[0]} is a pickle, which is never opened)" if pickled else ""
    raise UserError(f"{folder} holds no {_SINGLE}{hint}")


def model_hash(folder: Path, cache_dir: Path) -> str:
    """Return the SHA-256 of config.json and the weights, as hex.

    Hashing reads every byte, so the result is kept in `cache_dir` for files that have not changed
    since: same path, size, inode, and times of modification and change.
    """
    files = [folder / "config.json", *weight_files(folder)]
    state = _state(files)
    cached = cache_dir.expanduser() / "hashes" / hashlib.sha256(state.encode()).hexdigest()
    known = _recall(cached)
    if known is not None:
        return known
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
    if _state(files) == state:  # nobody wrote to them meanwhile
        _remember(cached, digest.hexdigest())
    return digest.hexdigest()


def tokenizer_hash(folder: Path) -> str:
    """Return the SHA-256 of tokenizer.json, as hex.

    Raises:
        UserError: it is not there.
    """
    try:
        return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {folder / 'tokenizer.json'}: {error.strerror}") from error


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


def _state(files: list[Path]) -> str:
    """Return what changes whenever a file's content does.

    Archives and `cp -p` set the modification time of what they write; nothing sets the other two.
    """
    stats = [(path.resolve(), path.stat()) for path in files]
    return json.dumps(
        [(str(p), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for p, s in stats]
    )


def _recall(path: Path) -> str | None:
    """Return a hash that `_remember` wrote; None where there is none, or it is damaged."""
    try:
        text = path.read_bytes().decode("ascii", errors="replace")
    except OSError:
        return None
    return text if re.fullmatch("[0-9a-f]{64}", text) else None


def _remember(path: Path, text: str) -> None:
    """Write a hash for next time; where the disk is full or read-only, hash again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{id(path)}.part")
        part.write_text(text, encoding="ascii")
        part.replace(path)
    except OSError:
        return
