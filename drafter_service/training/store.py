"""A rollouts folder: who wrote the text and how, and the rows that each pass gave.

    rollouts.json            provenance; after the last pass also what filtering keeps
    pass-00000.safetensors   tokens [B, S] int32, roles [B, S] uint8, temperatures [B] float32

Files are written whole or not at all, so a run that ended early continues with the first pass that
is not there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafter_service.training.rollouts_config import RowFilters
from drafter_service.training.row_filters import Selection, select
from splitspec.errors import UserError

FORMAT_VERSION = 1
_DESCRIPTION = "rollouts.json"
_PASS = re.compile(r"pass-(\d{5})\.safetensors")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a folder's text depends on."""

    model_id: str
    model_hash: str
    tokenizer_hash: str
    opening_length: int
    """Tokens of a row before its first user turn's text."""
    user_end_token: int
    """The token that ends a user turn."""
    parameters: Mapping[str, Any]
    """Of the run, by name, as JSON has them: the seed and all that shapes a pass."""
    filters: RowFilters = field(default_factory=RowFilters)
    """What of the text is used; they shape no pass, so a later run may have others."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """B rows of S tokens of the target's own text, on the CPU."""

    tokens: torch.Tensor
    """[B, S] int32; every row begins at position 0 and has no padding."""
    roles: torch.Tensor
    """[B, S] uint8; 1: a token that the target chose in an assistant turn."""
    temperatures: torch.Tensor
    """[B] float32: of the row's answers."""


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """All passes of a folder, and which rows to use. Tensors are on the CPU."""

    provenance: Provenance
    tokens: torch.Tensor
    """[N, S] int32."""
    roles: torch.Tensor
    """[N, S] uint8, as in `Pass`."""
    temperatures: torch.Tensor
    """[N] float32."""
    training_rows: torch.Tensor
    """[M] int64 indices, ascending."""
    held_out_rows: torch.Tensor
    """[M'] int64 indices, ascending: rows with a first user turn that no training row has."""
    counts: Mapping[str, int]
    """Rows and tokens that were read, dropped for each reason, and kept; see `Selection`."""


def start_rollouts(folder: Path, provenance: Provenance) -> int:
    """Make `folder`, or continue what is in it; return how many passes are there.

    The filters of a folder that is there become `provenance`'s.

    Raises:
        UserError: it cannot be written, holds something else, or was made by another target or
            with other parameters: names the first that differs and both values.
    """
    if (folder / _DESCRIPTION).is_file():
        _check_same(folder, read_provenance(folder), provenance)
        _write_description(folder, _as_json(provenance))
        return len(_pass_files(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        strange = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}") from error
    if strange:
        raise UserError(f"{folder} is not empty and no rollouts folder: it holds {strange[0]!r}")
    _write_description(folder, _as_json(provenance))
    return 0


def write_pass(folder: Path, index: int, written: Pass) -> None:
    """Write pass `index` of a folder that `start_rollouts` made.

    Raises:
        UserError: the disk is full or the folder is gone.
    """
    tensors = {
        "tokens": written.tokens.to(torch.int32).contiguous(),
        "roles": written.roles.to(torch.uint8).contiguous(),
        "temperatures": written.temperatures.to(torch.float32).contiguous(),
    }
    path = folder / f"pass-{index:05d}.safetensors"
    part = path.with_suffix(".part")
    try:
        save_file(tensors, part)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error}") from error


def finish_rollouts(folder: Path, rollouts: Rollouts) -> None:
    """Note in rollouts.json how much text the folder holds and what the filters keep of it.

    Raises:
        UserError: the disk is full or the folder is gone.
    """
    counts = {"passes": len(_pass_files(folder)), **rollouts.counts}
    _write_description(folder, {**_as_json(rollouts.provenance), "counts": counts})


def open_rollouts(folder: Path, *, model_hash: str | None = None) -> Rollouts:
    """Read all passes of `folder` and choose rows.

    Args:
        folder: what `splitspec train rollouts` wrote.
        model_hash: of the target that must have written the text; None: any.

    Raises:
        UserError: no rollouts folder, one of another target, a damaged file, or no row is kept;
            names the file or the field.
    """
    provenance = read_provenance(folder)
    if model_hash is not None and provenance.model_hash != model_hash:
        raise UserError(
            f"{folder} holds text of {provenance.model_id} (model hash "
            f"{provenance.model_hash[:12]}); the target's hash is {model_hash[:12]}"
        )
    files = _pass_files(folder)
    if not files:
        raise UserError(f"{folder} holds no pass yet; run splitspec train rollouts again")
    passes = [_read_pass(path) for path in files]
    shapes = {tuple(one.tokens.shape[1:]) for one in passes}
    if len(shapes) > 1:
        raise UserError(f"{folder}: passes have rows of different lengths, {sorted(shapes)}")
    tokens, roles = (torch.cat([getattr(p, name) for p in passes]) for name in ("tokens", "roles"))
    selection: Selection = select(
        tokens,
        roles,
        opening_length=provenance.opening_length,
        user_end_token=provenance.user_end_token,
        filters=provenance.filters,
    )
    if not len(selection.training_rows):
        raise UserError(f"{folder}: the filters keep no row to train on: {dict(selection.counts)}")
    return Rollouts(
        provenance=provenance,
        tokens=tokens,
        roles=roles,
        temperatures=torch.cat([one.temperatures for one in passes]),
        training_rows=selection.training_rows,
        held_out_rows=selection.held_out_rows,
        counts=selection.counts,
    )


def read_provenance(folder: Path) -> Provenance:
    """Return what rollouts.json says.

    Raises:
        UserError: it is missing, damaged or of another version.
    """
    path = folder / _DESCRIPTION
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{folder} is no rollouts folder: {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format_version is {version!r}; expected {FORMAT_VERSION}")
    found: dict[str, Any] = {}
    for name, kind in _KINDS.items():
        value = content.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(f"{path}: {name} is {value!r}; expected {kind.__name__}")
        found[name] = value
    return Provenance(**found, filters=_read_filters(path, content.get("filters")))


def _read_filters(path: Path, content: object) -> RowFilters:
    """Return the filters that rollouts.json states.

    Raises:
        UserError: it states none, or what they do not allow.
    """
    names = {one.name for one in fields(RowFilters)}
    if not isinstance(content, dict) or set(content) != names:
        raise UserError(f"{path}: filters is {content!r}; expected {', '.join(sorted(names))}")
    for name, value in content.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"{path}: filters.{name} is {value!r}; expected a number")
    return RowFilters(**content)


_KINDS: dict[str, type] = {
    "model_id": str,
    "model_hash": str,
    "tokenizer_hash": str,
    "opening_length": int,
    "user_end_token": int,
    "parameters": dict,
}


def _as_json(provenance: Provenance) -> dict[str, Any]:
    return {"format_version": FORMAT_VERSION, **asdict(provenance)}


def _check_same(folder: Path, found: Provenance, wanted: Provenance) -> None:
    """Refuse to continue a folder whose text would not be of one kind."""
    for name in _KINDS:
        old, new = getattr(found, name), getattr(wanted, name)
        if name == "parameters":
            differing = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
            if differing:
                name = differing[0]
                old, new = old.get(name), new.get(name)
        if old != new:
            raise UserError(
                f"{folder} was made with {name} {old!r}, this run has {new!r}: "
                "continue it with the same, or choose another --out"
            )


def _pass_files(folder: Path) -> list[Path]:
    """Return the files of passes 0, 1, ...

    Raises:
        UserError: one is missing between others; named.
    """
    found = {
        int(match[1]): path for path in folder.iterdir() if (match := _PASS.fullmatch(path.name))
    }
    for index in range(len(found)):
        if index not in found:
            raise UserError(f"{folder}: pass-{index:05d}.safetensors is missing")
    return [found[index] for index in range(len(found))]


def _read_pass(path: Path) -> Pass:
    """Read one pass.

    Raises:
        UserError: the file is damaged or holds something else.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} is damaged: {error}; delete it and those after it, and run "
            "splitspec train rollouts again"
        ) from error
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if dtypes != {"tokens": torch.int32, "roles": torch.uint8, "temperatures": torch.float32}:
        raise UserError(f"{path} is no pass of rollouts: it holds {sorted(dtypes)}")
    shape = tensors["tokens"].shape
    if (
        len(shape) != 2
        or tensors["roles"].shape != shape
        or len(tensors["temperatures"]) != shape[0]
    ):
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        raise UserError(f"{path} is no pass of rollouts: its shapes are {shapes}")
    return Pass(**tensors)


def _write_description(folder: Path, content: Mapping[str, Any]) -> None:
    path = folder / _DESCRIPTION
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
