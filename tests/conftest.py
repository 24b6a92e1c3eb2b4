"""What every test shares: one thread for torch (the machine is shared), and exported programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def program_cache(pytestconfig: pytest.Config) -> Path:
    """Return a cache folder that outlives the run: one export serves all tests."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("splitspec")
