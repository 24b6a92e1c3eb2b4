"""Print the requirements of one extra, so that an image layer can hold them without the sources."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements_of(extra: str, project: dict[str, dict[str, list[str]]]) -> list[str]:
    """Return the requirement lines of `extra`, its references to other extras resolved."""
    lines: list[str] = []
    for line in project["optional-dependencies"][extra]:
        if line.startswith("splitspec["):
            lines += requirements_of(line.removeprefix("splitspec[").removesuffix("]"), project)
        else:
            lines.append(line)
    return lines


if __name__ == "__main__":
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    print(*project["dependencies"], *requirements_of(sys.argv[1], project), sep="\n")
