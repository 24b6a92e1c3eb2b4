"""The product's own DFlash drafter, held, or with something wrong and its steps written down.

    python tests/dflash_drafters.py VARIANT REPORT serve --draft dflash --draft-model F ...

is `python -m drafter_service serve --draft dflash --draft-model F ...` as a drafter that

    forced  leaves the first `seed % 8` draft tokens of a round as they are and replaces the others
            by wrong ids; and appends each step of the draft to the file REPORT, a JSON line each
    held    waits before a step that drafts while there is a file REPORT, and says by a file of the
            suffix .held that it waits
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # NOTE: the script's own folder holds `splitspec/` and `drafter_service/` of the tests, which
    # would hide the packages of these names.
    sys.path[0] = str(Path(__file__).parents[1])

import torch

import drafter_service.__main__ as drafter_main
from drafter_service import dflash
from graph_runtime.dflash.draft import BlockDraft, BlockWork
from tests.eagle3_drafters import ForcedDrafter


class DraftBehind:
    """A draft behind another that looks at its works."""

    def __init__(self, draft: BlockDraft) -> None:
        self._draft = draft

    def run(self, works: Sequence[BlockWork]) -> list[torch.Tensor]:
        """Run one packed step."""
        return self._draft.run(works)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)


class Recorded(DraftBehind):
    """Writes each step down: its works' slots, starts, features, pending tokens and counts."""

    def __init__(self, draft: BlockDraft, report: Path) -> None:
        super().__init__(draft)
        self._report = report

    def run(self, works: Sequence[BlockWork]) -> list[torch.Tensor]:
        """Run the step and write it down."""
        lines = [
            {
                "slot": work.slot,
                "start": work.start,
                "features": [] if work.features is None else work.features.tolist(),
                "pending_token_id": work.pending_token_id,
                "draft_count": work.draft_count,
            }
            for work in works
        ]
        with self._report.open("a") as file:
            file.write(json.dumps(lines) + "\n")
        return self._draft.run(works)


class Held(DraftBehind):
    """Waits before a step that drafts while the file is there."""

    def __init__(self, draft: BlockDraft, hold: Path) -> None:
        super().__init__(draft)
        self._hold = hold

    def run(self, works: Sequence[BlockWork]) -> list[torch.Tensor]:
        """Wait, then run the step."""
        while self._hold.exists() and any(work.draft_count for work in works):
            self._hold.with_suffix(".held").touch()
            time.sleep(0.001)
        return self._draft.run(works)


def main() -> None:
    """Serve a variant until SIGTERM."""
    variant, report = sys.argv.pop(1), Path(sys.argv.pop(1))
    load, load_draft = dflash.load, dflash.load_draft
    wraps: dict[str, Callable[[BlockDraft], DraftBehind]] = {
        "forced": partial(Recorded, report=report),
        "held": partial(Held, hold=report),
    }
    if variant == "forced":
        dflash.load = lambda *arguments: ForcedDrafter(load(*arguments))  # type: ignore[assignment]

    def load_wrapped(*arguments: Any, **flags: Any) -> Any:
        draft, checkpoint = load_draft(*arguments, **flags)
        return wraps[variant](draft), checkpoint

    dflash.load_draft = load_wrapped
    drafter_main.main()


if __name__ == "__main__":
    main()
