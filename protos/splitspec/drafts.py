"""Which draft a user means: a method, a checkpoint's folder, or a trained draft that ships.

Coordinator, drafter and verifier are each told of a draft, and must mean the same one. Trained
drafts ship in `drafter_service/weights/<target>-<method>/`, each with the `training.json` of the
run that made it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitspec.errors import UserError

MODEL_METHODS = ("eagle3", "dflash")
"""Methods that draft with a checkpoint of their own."""
PREFERRED = ("eagle3", "dflash")
"""What `auto` takes of the trained drafts that ship for a target: the first of these methods; none
ships: ngram. EAGLE-3 measured the larger tau, and the larger speed-up (benchmarks/LOG.md)."""
AUTO = "auto"
WORDS = ("ngram", *MODEL_METHODS, "none", AUTO)
"""What names a draft, if not its folder."""

_KINDS = {
    "eagle3": "eagle3",
    "dflash": "dflash",
    "dflash2": "dflash",
    "dspark": "dflash",
    "domino": "dflash",
}
"""`speculators_model_type` -> method. DFlash's successors count as DFlash, whose reader names them.
"""
_ARCHITECTURES = {
    "DFlash": "dflash",
    "DSpark": "dflash",
    "Domino": "dflash",
    "DFlare": "dflash",
    "MuseGlimmer": "dflash",
    "Eagle": "eagle3",
}
"""Part of a name in `architectures` -> method; the first part that it holds counts."""
_EAGLE3_KEYS = ("eagle_config", "draft_vocab_size")
"""What tells a draft that calls itself "LlamaForCausalLM" from a whole model."""


@dataclass(frozen=True, kw_only=True)
class NamedDraft:
    """What to draft with."""

    method: str
    """"ngram", one of MODEL_METHODS, or "none"."""
    folder: Path | None
    """Of the checkpoint, of a method that has one."""


@dataclass(frozen=True, kw_only=True)
class ShippedDraft:
    """A trained draft that comes with the package."""

    folder: Path
    method: str
    target: str
    """Name of the model that it was trained for, as `splitspec model pull` knows it."""
    target_hash: str | None
    """Of that model's files; None: its `training.json` does not tell."""
    training: Mapping[str, Any]
    """What is in its `training.json`; empty where there is none."""


def shipped_drafts() -> list[ShippedDraft]:
    """Return the trained drafts that ship, by the names of their folders.

    Raises:
        UserError: a file of one is damaged.
    """
    weights = weights_dir()
    configs = [] if weights is None else sorted(weights.glob("*/config.json"))
    return [_read_shipped(path.parent) for path in configs]


def shipped_for(target: str, target_hash: str | None = None) -> list[ShippedDraft]:
    """Return the trained drafts that ship for a model, one a method, the preferred one first.

    Args:
        target: its name, or its folder.
        target_hash: of its files, where that is known. A draft that was trained for these very
            files goes before one for a model of the same name, which will do: where that is
            another build, it costs acceptance at most, never text.
    """
    found: dict[str, ShippedDraft] = {}
    for draft in shipped_drafts():
        is_exact = target_hash is not None and draft.target_hash == target_hash
        if is_exact or (draft.target == Path(target).name and draft.method not in found):
            found[draft.method] = draft
    return [found[method] for method in PREFERRED if method in found]


def weights_dir() -> Path | None:
    """Return the folder of the trained drafts, in a checkout or an installation; None: no drafter.

    The drafter is looked up, not imported.
    """
    found = importlib.util.find_spec("drafter_service")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "weights"


def find_draft(
    draft: str,
    draft_model: Path | None = None,
    *,
    target: str | None,
    target_hash: Callable[[], str] | None = None,
) -> NamedDraft:
    """Return the method and the checkpoint that `--draft` and `--draft-model` mean.

    Args:
        draft: one of WORDS, or a draft's folder.
        draft_model: a checkpoint's folder, in place of the one that ships.
        target: the model that is drafted for; None: nobody said.
        target_hash: gives its hash; called only where a trained draft is looked for.

    Raises:
        UserError: nothing ships for the target, or the folder is none, or no draft's.
    """
    if draft_model is None:
        folder = find_folder(draft, target=target, target_hash=target_hash)
    elif draft in WORDS:
        folder = draft_model
    else:
        raise UserError(f"--draft {draft!r} names a draft, and --draft-model {draft_model} too")
    if draft == AUTO and folder is None:
        return NamedDraft(method="ngram", folder=None)
    if draft in WORDS and draft != AUTO:
        return NamedDraft(method=draft, folder=folder)
    assert folder is not None, draft
    return NamedDraft(method=method_of(folder), folder=folder)


def find_folder(
    draft: str,
    *,
    target: str | None,
    target_hash: Callable[[], str] | None = None,
    flag: str = "--draft",
) -> Path | None:
    """Return the folder of the checkpoint that `draft` means; None: a method without one.

    Args:
        draft, target, target_hash: see `find_draft`.
        flag: what `draft` was given by, for a mistake's line.

    Raises:
        UserError: nothing ships for the target, or `draft` is no folder.
    """
    if draft not in WORDS:
        return _own_folder(draft, flag)
    if draft in ("ngram", "none") or (draft == AUTO and target is None):
        return None
    if target is None:
        raise UserError(
            f"{flag} {draft} needs --draft-model, the folder of a checkpoint, or --target, a model "
            "that a trained draft ships for"
        )
    found = shipped_for(target, None if target_hash is None else target_hash())
    folder = next((d.folder for d in found if draft in (AUTO, d.method)), None)
    if folder is None and draft != AUTO:
        raise UserError(f"{flag} {draft}: {_what_ships(target)}")
    return folder


def method_of(folder: Path) -> str:
    """Return the method of the draft in `folder`, as its config.json states it.

    Raises:
        UserError: there is no such file, or it states none.
    """
    method = stated_method(_read_object(folder / "config.json"))
    if method is None:
        known = " or ".join(f"--draft {name}" for name in MODEL_METHODS)
        raise UserError(
            f"{folder / 'config.json'} states no drafting method: if this is a draft, say {known}, "
            f"with --draft-model {folder}"
        )
    return method


def stated_method(content: Mapping[str, Any]) -> str | None:
    """Return the method that a config.json states, successors of DFlash counted as DFlash.

    Args:
        content: of config.json, unchecked.

    Returns:
        One of MODEL_METHODS; None: it states none, and at most the tensors' names tell.
    """
    kind = content.get("speculators_model_type")
    if isinstance(kind, str):
        return _KINDS.get(kind)
    stated = content.get("architectures")
    for name in stated if isinstance(stated, list) else []:
        for part, method in _ARCHITECTURES.items():
            if isinstance(name, str) and part in name:
                return method
    if content.get("dflash_config") is not None:
        return "dflash"
    return "eagle3" if any(content.get(key) is not None for key in _EAGLE3_KEYS) else None


def _own_folder(draft: str, flag: str) -> Path:
    try:
        folder = Path(draft).expanduser()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # too long, nobody's home, a NUL in it
        raise UserError(f"{flag} {draft!r}: {error}") from error
    if not is_folder:
        raise UserError(f"{flag} {draft!r} is neither a folder nor one of {', '.join(WORDS)}")
    return folder


def _what_ships(target: str) -> str:
    shipped = ", ".join(f"{draft.method} for {draft.target}" for draft in shipped_drafts())
    return (
        f"no such trained draft ships for {target!r} (what ships: {shipped or 'none'}); name the "
        "folder of one, or draft with ngram"
    )


def _read_shipped(folder: Path) -> ShippedDraft:
    method = method_of(folder)
    path = folder / "training.json"
    training = _read_object(path) if path.is_file() else {}
    target_hash = training.get("target_model_hash")
    return ShippedDraft(
        folder=folder,
        method=method,
        target=folder.name.removesuffix(f"-{method}"),
        target_hash=target_hash if isinstance(target_hash, str) else None,
        training=training,
    )


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path.parent} holds no {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object")
    return content
