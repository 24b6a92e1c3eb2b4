"""Export one program in a process of its own: `python -m graph_runtime.programs FOLDER PATH KEY`.

An export takes over a gigabyte and imports the exporter; both end with this process, so that the
service that needed the program keeps neither. Exit code 2 and one line on stdout: a user's mistake.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from graph_runtime.programs.export import ProgramKey, export_here
from splitspec.errors import UserError


def main() -> int:
    """Run; returns the exit code."""
    folder, path, key = sys.argv[1:]
    values = json.loads(key)
    values["tap_layers"] = tuple(values["tap_layers"])
    try:
        export_here(Path(folder), Path(path), ProgramKey(**values))
    except UserError as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
