"""What a model's folder holds: its weights' files, and the hashes that name it; needs no torch."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from splitspec.errors import UserError
from splitspec.folders import model_folder

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


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
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise UserError(f"{index} is not an index of safetensors files") from error
        for name in names:
            if not _is_in(folder, name):
                shown = ascii(name) if len(name) <= 80 else f"{name[:77]!a}..."
                raise UserError(f"{index} names {shown}, which is not in the folder")
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


def named_model_hash(model: str, cache_dir: Path) -> str:
    """Return the hash of the model that a user names: a pulled model, or an HF-layout folder.

    Raises:
        UserError: there is none of that name, or it has no weights.
    """
    return model_hash(model_folder(model, cache_dir), cache_dir)


def tokenizer_hash(folder: Path) -> str:
    """Return the SHA-256 of tokenizer.json, as hex.

    Raises:
        UserError: it is not there.
    """
    try:
        return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {folder / 'tokenizer.json'}: {error.strerror}") from error


def _is_in(folder: Path, name: str) -> bool:
    """Return whether `name` is that of a file of `folder`, and no path to elsewhere."""
    try:
        return Path(name).name == name and (folder / name).is_file()
    except (OSError, ValueError):  # too long, a NUL in it, or no text at all
        return False


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
