"""Running a program must not pay for the exporter."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("executorch")

SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
import graph_runtime.programs
assert not {"executorch.exir", "torchao"} & sys.modules.keys()
import executorch.exir
assert executorch.exir.__file__, "the real package must come after its stand-in"
assert executorch.exir.EdgeCompileConfig
"""


def test_a_loaded_program_has_not_imported_the_exporter_which_can_still_come() -> None:
    # Guards a start that took seconds longer and held over 100 MB more.
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
