"""What `model list` and `model show` tell of models, and of the trained drafts that ship."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graph_runtime.architecture import read_config
from graph_runtime.config_values import read_config_object
from graph_runtime.model_files import model_hash, tokenizer_hash, weight_files
from graph_runtime.model_store import KNOWN_MODELS, pulled_models
from splitspec.drafts import ShippedDraft, shipped_for, stated_method
from splitspec.errors import UserError
from splitspec.folders import models_dir

_HEADER = ("MODEL", "PULLED", "WEIGHTS", "TRAINED DRAFTS", "FOLDER")
_TOLD = ("target_model_id", "target_model_hash", "steps", "seconds", "tau")
"""Keys of a draft's `training.json` that are shown."""


def list_lines(cache_dir: Path) -> list[str]:
    """Return one line a model, pulled ones first, in columns under a header.

    A draft is listed under its target's name: hashing every model to ask for it would take minutes.

    Raises:
        UserError: a model's folder or a shipped draft is damaged.
    """
    pulled = pulled_models(cache_dir)
    rows = [_HEADER]
    for folder in pulled:
        name = folder.name.replace("--", "/")
        rows.append((name, "yes", _size(weight_bytes(folder)), _methods(name), str(folder)))
    for name in sorted(set(KNOWN_MODELS) - {folder.name for folder in pulled}):
        size = f"{_size(KNOWN_MODELS[name].download_bytes)} download"
        rows.append((name, "no", size, _methods(name), ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def show(folder: Path, cache_dir: Path) -> dict[str, Any]:
    """Return what is to be told of the model or the draft in `folder`, as JSON shows it.

    Raises:
        UserError: it is neither, or a file of it is damaged.
    """
    content = read_config_object(folder / "config.json")
    method = stated_method(content)
    if method is not None:
        return _show_draft(folder, method, cache_dir)
    config = read_config(folder)
    own_hash = model_hash(folder, cache_dir)
    return {
        "folder": str(folder),
        "architecture": config.architecture,
        "vocab_size": config.vocab_size,
        "n_layers": config.n_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "tied": config.tied,
        "max_context_length": config.max_position_embeddings,
        "weight_bytes": weight_bytes(folder),
        "model_hash": own_hash,
        "tokenizer_hash": tokenizer_hash(folder),
        "licence": _licence(folder, cache_dir),
        "drafts": [_shipped(draft) for draft in shipped_for(str(folder), own_hash)],
    }


def weight_bytes(folder: Path) -> int:
    """Return the size of a folder's safetensors files.

    Raises:
        UserError: there are none.
    """
    return sum(path.stat().st_size for path in weight_files(folder))


def _show_draft(folder: Path, method: str, cache_dir: Path) -> dict[str, Any]:
    training = folder / "training.json"
    told = read_config_object(training) if training.is_file() else {}
    return {
        "folder": str(folder),
        "draft_method": method,
        "weight_bytes": weight_bytes(folder),
        "model_hash": model_hash(folder, cache_dir),
        "licence": _licence(folder, cache_dir),
        **{key: told[key] for key in _TOLD if key in told},
    }


def _shipped(draft: ShippedDraft) -> dict[str, Any]:
    return {
        "method": draft.method,
        "folder": str(draft.folder),
        "weight_bytes": weight_bytes(draft.folder),
        "tau": draft.training.get("tau"),
    }


def _methods(name: str) -> str:
    return ", ".join(draft.method for draft in shipped_for(name)) or "none"


def _size(count: int) -> str:
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def _licence(folder: Path, cache_dir: Path) -> str | None:
    """Return the licence that a pulled model is known to have, or that a model card states."""
    is_pulled = folder.parent == models_dir(cache_dir)
    known = KNOWN_MODELS.get(folder.name) if is_pulled else None
    return _stated_licence(folder / "README.md") if known is None else known.licence


def _stated_licence(card: Path) -> str | None:
    """Return `license` of a model card's front matter, the lines between two "---"."""
    try:
        lines = card.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {card}: {error}") from error
    front = lines[1 : lines.index("---", 1)] if lines[:1] == ["---"] and "---" in lines[1:] else []
    stated = (line.removeprefix("license:").strip() for line in front if line[:8] == "license:")
    return next(stated, None)
