"""What runs a program, without what makes one.

`executorch.runtime` needs a single warning class of `executorch.exir`, but importing it runs that
package's own start-up, the whole exporter: seconds of every start and over 100 MB. So the package
stands in as an empty one while the runtime is imported. `lowering.py` imports the real one later.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import torch

EXPORTER = "executorch.exir"


@contextlib.contextmanager
def _without_exporter() -> Iterator[None]:
    if EXPORTER in sys.modules:
        yield
        return
    spec = find_spec(EXPORTER)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    stand_in = ModuleType(EXPORTER)
    stand_in.__path__ = list(spec.submodule_search_locations)
    sys.modules[EXPORTER] = stand_in
    try:
        yield
    finally:
        for name in [EXPORTER, f"{EXPORTER}._warnings"]:
            sys.modules.pop(name, None)


with _without_exporter():
    from executorch.extension.pybindings.portable_lib import (
        _threadpool_get_thread_count,
        _unsafe_reset_threadpool,
    )
    from executorch.runtime import Method, Program, Runtime

__all__ = ["Method", "Program", "Runtime", "start_threadpool"]


def start_threadpool(threads: int | None) -> None:
    """Start the threads that run programs; None: the runtime's own choice.

    NOTE: the pool's first use looks for a phone's processor and logs what it lacks, straight
    to file descriptor 2. For the millisecond that this takes nobody's stderr is heard.

    NOTE: what torch itself does beside a program is small, and its threads spin while they wait:
    where two processes take turns on two busy cores, an fc of 8 rows took 28 ms with two of them,
    9 ms of processor time, and 0.8 ms with one. So torch has one.
    """
    torch.set_num_threads(1)
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            _threadpool_get_thread_count()
            if threads is not None:
                _unsafe_reset_threadpool(threads)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
