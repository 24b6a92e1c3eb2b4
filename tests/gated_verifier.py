"""A real verifier whose passes a test can hold or break, so that no moment depends on luck.

    python tests/gated_verifier.py GATE serve --model M ...

is `python -m verifier_service serve --model M ...`, with a look into the folder GATE before each
pass. While GATE/hold holds a number, a pass that starts at that position or beyond waits, and
GATE/held repeats the number. If GATE/fault exists, the device fails there instead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # NOTE: the script's own folder holds `splitspec/` and `verifier_service/` of the tests, which
    # would hide the packages of these names.
    sys.path[0] = str(Path(__file__).parents[1])

import verifier_service.__main__ as verifier
from graph_runtime.load import load_target
from graph_runtime.target import Span, SpanOutput, Target, TargetInfo


class GatedTarget:
    """A target behind the gate."""

    def __init__(self, target: Target, gate: Path) -> None:
        self._target = target
        self._gate = gate

    @property
    def info(self) -> TargetInfo:
        """Return what is loaded."""
        return self._target.info

    def step(self, spans: Sequence[Span]) -> list[SpanOutput]:
        """Wait at the gate, then run one packed step."""
        start = max(span.start for span in spans)
        while (limit := self._limit()) is not None and start >= limit:
            (self._gate / "held").write_text(str(limit))
            time.sleep(0.001)
            if (self._gate / "fault").exists():
                raise RuntimeError("device lost")
        return self._target.step(spans)

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        """Copy positions [0, length)."""
        self._target.copy_prefix(source, destination, length)

    def _limit(self) -> int | None:
        try:
            return int((self._gate / "hold").read_text())
        except FileNotFoundError:
            return None


def main() -> None:
    """Serve the target behind the gate."""
    gate = Path(sys.argv.pop(1))

    def load_gated(**flags: Any) -> GatedTarget:
        return GatedTarget(load_target(**flags), gate)

    verifier.load_target = load_gated  # type: ignore[assignment]
    verifier.main()


if __name__ == "__main__":
    main()
