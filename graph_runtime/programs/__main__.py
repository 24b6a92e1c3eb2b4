"""Export one program in a process of its own: `__main__.py PARENT KIND PATH SOURCE KEY`.

An export takes over a gigabyte and imports the exporter; both end with this process, so that the
service that needed the program keeps neither. PARENT is the process id of that service: this
process does not outlive it. SOURCE and KEY are JSON, see `export`. What it says on stdout is in
`exporter`. Exit code 2: a user's mistake.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run; returns the exit code."""
    parent, kind, path, source, key = sys.argv[1:]
    _tie_to(int(parent))
    answers = _take_stdout()
    # Imported here: they take seconds, in which a killed parent would leave this process behind.
    from graph_runtime.programs.kinds import export_here, read_key
    from splitspec.errors import UserError

    def report(phase: str) -> None:
        print(f"phase {phase}", file=answers, flush=True)

    wanted = read_key(kind, json.loads(key))
    try:
        export_here(json.loads(source), Path(path), wanted, report)
    except UserError as error:
        print(f"error {error}", file=answers, flush=True)
        return 2
    return 0


def _tie_to(parent: int) -> None:
    """End when `parent` does, even by SIGKILL; until then it alone decides when.

    A terminal's Ctrl-C and a signal to the whole process group reach both: the parent kills this
    process. Elsewhere than on Linux a killed parent leaves it to finish its export.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.getppid() != parent:  # it died before the tie held
        sys.exit(1)


def _take_stdout() -> TextIO:
    """Return stdout for our own lines; what libraries print there goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    sys.exit(main())
