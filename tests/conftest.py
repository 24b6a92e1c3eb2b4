"""What every test shares: one thread for torch, exported programs, and the real model."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from splitspec.errors import UserError
from splitspec.folders import DEFAULT_CACHE_DIR, model_folder

torch.set_num_threads(1)  # the machine is shared
# A shell without job control starts what runs in the background with SIGINT ignored. Every process
# that a test starts would inherit that, and tests that press Ctrl-C would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)

REAL_MODEL = "smollm2-135m"
EXPORTER = Path(__file__).parents[1] / "graph_runtime"
DAY_SECONDS = 24 * 60 * 60


@dataclass(frozen=True, kw_only=True)
class RealModel:
    """The pulled model that tests marked `real_model` run."""

    folder: Path
    cache_dir: Path
    """The user's own cache: its programs are not exported again for the tests."""


@pytest.fixture(scope="session")
def program_cache(pytestconfig: pytest.Config) -> Path:
    """Return a cache folder that outlives the run: one export serves all tests.

    Its name has the hash of the code that exports: programs of other code are not seen.
    """
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir(f"splitspec-{_exporter_hash()}")
    os.utime(folder)
    _remove_unused(folder.parent)
    return folder


def _exporter_hash() -> str:
    digest = hashlib.sha256()
    for file in sorted(EXPORTER.rglob("*.py")):
        digest.update(f"{file.relative_to(EXPORTER)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _remove_unused(caches: Path) -> None:
    """Remove the folders that no run has asked for since yesterday.

    Younger ones may be those of a run beside this one, and that may remove the same ones.
    """
    for folder in caches.glob("splitspec*"):
        with suppress(FileNotFoundError):
            if folder.stat().st_mtime < time.time() - DAY_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def real_model() -> RealModel:
    """Return the pulled model, where the commands look for it too; skip when it is not there."""
    cache_dir = Path(os.environ.get("SPLITSPEC_CACHE_DIR", DEFAULT_CACHE_DIR)).expanduser()
    try:
        return RealModel(folder=model_folder(REAL_MODEL, cache_dir), cache_dir=cache_dir)
    except UserError as error:
        pytest.skip(str(error))
