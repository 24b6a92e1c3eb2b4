"""What every test shares: one thread for torch, exported programs, and the real model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from splitspec.errors import UserError
from splitspec.folders import DEFAULT_CACHE_DIR, model_folder

torch.set_num_threads(1)  # the machine is shared

REAL_MODEL = "smollm2-135m"


@dataclass(frozen=True, kw_only=True)
class RealModel:
    """The pulled model that tests marked `real_model` run."""

    folder: Path
    cache_dir: Path
    """The user's own cache: its programs are not exported again for the tests."""


@pytest.fixture(scope="session")
def program_cache(pytestconfig: pytest.Config) -> Path:
    """Return a cache folder that outlives the run: one export serves all tests."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("splitspec")


@pytest.fixture(scope="session")
def real_model() -> RealModel:
    """Return the pulled model, where the commands look for it too; skip when it is not there."""
    cache_dir = Path(os.environ.get("SPLITSPEC_CACHE_DIR", DEFAULT_CACHE_DIR)).expanduser()
    try:
        return RealModel(folder=model_folder(REAL_MODEL, cache_dir), cache_dir=cache_dir)
    except UserError as error:
        pytest.skip(str(error))
