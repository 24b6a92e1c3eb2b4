"""Where prepared models and exported programs live on disk: one place for every process."""

from __future__ import annotations

from pathlib import Path

from splitspec.errors import UserError

DEFAULT_CACHE_DIR = Path("~/.cache/splitspec")
"""Used where neither `--cache-dir` nor `SPLITSPEC_CACHE_DIR` says otherwise."""


def models_dir(cache_dir: Path) -> Path:
    """Return the folder that holds one HF-layout folder a pulled model."""
    return cache_dir.expanduser() / "models"


def programs_dir(cache_dir: Path) -> Path:
    """Return the folder that holds exported programs, named by content hash."""
    return cache_dir.expanduser() / "programs"


def model_folder(model: str, cache_dir: Path) -> Path:
    """Return the HF-layout folder that `model` names: a folder, or the name of a pulled model.

    Raises:
        UserError: neither exists.
    """
    try:
        folder = Path(model).expanduser()
        if (folder / "config.json").is_file():
            return folder
        pulled = models_dir(cache_dir) / model.replace("/", "--")
        if (pulled / "config.json").is_file():
            return pulled
    except (OSError, RuntimeError, ValueError) as error:
        # Too long a name, a folder that may not be read, the home of nobody, a NUL in it.
        shown = model if len(model) <= 80 else f"{model[:77]}..."
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"model {shown!r} cannot be looked up: {reason}") from error
    raise UserError(
        f"model {model!r} is neither a folder with a config.json nor a pulled model; "
        f"try: splitspec model pull {model}"
    )
