"""The product's own EAGLE-3 drafter with something wrong, or with its passes written down.

    python tests/eagle3_drafters.py VARIANT REPORT serve --draft eagle3 --draft-model F ...

is `python -m drafter_service serve --draft eagle3 --draft-model F ...` as a drafter that

    forced         leaves the first `seed % 8` draft tokens of a round as they are and replaces the
                   others by wrong ids; and appends each pass of the draft to the file REPORT, one
                   JSON line a pass
    own-features   keeps its own recurrent features for the tokens that were accepted, where the
                   target's rows belong
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # NOTE: the script's own folder holds `splitspec/` and `drafter_service/` of the tests, which
    # would hide the packages of these names.
    sys.path[0] = str(Path(__file__).parents[1])

import torch

import drafter_service.__main__ as drafter_main
from drafter_service import eagle3
from drafter_service.drafter import Drafter, DrafterInfo, DraftWork, SessionParameters
from graph_runtime.eagle3.config import Eagle3Config
from graph_runtime.eagle3.draft import Draft, DraftSpan

FORCED_COUNTS = 8


class ForcedDrafter:
    """A drafter whose first `seed % 8` draft tokens are left as they are."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self._right_counts: dict[int, int] = {}

    @property
    def info(self) -> DrafterInfo:
        """Return what is loaded."""
        return self._inner.info

    @property
    def pass_count(self) -> int:
        """Return how many passes have run."""
        return self._inner.pass_count

    def open(self, slot: int, parameters: SessionParameters) -> None:
        """Begin an empty context."""
        self._right_counts[slot] = parameters.seed % FORCED_COUNTS
        self._inner.open(slot, parameters)

    def step(self, works: Sequence[DraftWork]) -> list[list[int]]:
        """Draft, and replace what comes after the right ones."""
        drafts = self._inner.step(works)
        return [
            ids[:count] + [token_id - 1 if token_id else 1 for token_id in ids[count:]]
            for ids, count in zip(
                drafts, (self._right_counts[work.slot] for work in works), strict=True
            )
        ]

    def release(self, slot: int) -> None:
        """Forget a context."""
        self._inner.release(slot)


class DraftBehind:
    """A draft behind another that looks at its spans."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    @property
    def config(self) -> Eagle3Config:
        """Return the draft's shape."""
        return self._draft.config

    @property
    def model_hash(self) -> str:
        """Return the checkpoint's hash."""
        return self._draft.model_hash

    @property
    def target_ids(self) -> torch.Tensor | None:
        """Return the target id of each draft id."""
        return self._draft.target_ids

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        """Return features of raw rows."""
        return self._draft.fuse(rows)

    def run(self, spans: Sequence[DraftSpan]) -> torch.Tensor:
        """Run one packed pass."""
        return self._draft.run(spans)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits of recurrent features."""
        return self._draft.logits(features)

    def reset(self, slot: int) -> None:
        """Forget a slot's cache."""
        self._draft.reset(slot)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)


class OwnFeatures(DraftBehind):
    """Runs a position again with the feature that the chain had there, if the token is the same."""

    def __init__(self, draft: Draft) -> None:
        super().__init__(draft)
        self._last: dict[int, torch.Tensor] = {}
        self._kept: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}

    def run(self, spans: Sequence[DraftSpan]) -> torch.Tensor:
        """Run the pass with the wrong features, and keep what the chain makes of them."""
        outputs = self._draft.run([self._with_kept(span) for span in spans])
        for span, output in zip(spans, outputs, strict=True):
            last = self._last.get(span.slot)
            if len(span.token_ids) == 1 and last is not None and last.equal(span.features[0]):
                self._kept[span.slot, span.start] = (span.token_ids[0], span.features[0].clone())
            self._last[span.slot] = output.clone()
        return outputs

    def _with_kept(self, span: DraftSpan) -> DraftSpan:
        features = span.features.clone()
        for index, token_id in enumerate(span.token_ids):
            kept = self._kept.get((span.slot, span.start + index))
            if kept is not None and kept[0] == token_id:
                features[index] = kept[1]
        return replace(span, features=features)

    def reset(self, slot: int) -> None:
        """Forget a slot's cache and what was kept for it."""
        super().reset(slot)
        self._last.pop(slot, None)
        self._kept = {key: value for key, value in self._kept.items() if key[0] != slot}


class Recorded(DraftBehind):
    """Writes each pass down: its spans' slots, starts, tokens and features."""

    def __init__(self, draft: Draft, report: Path) -> None:
        super().__init__(draft)
        self._report = report

    def run(self, spans: Sequence[DraftSpan]) -> torch.Tensor:
        """Run the pass and write it down."""
        outputs = self._draft.run(spans)
        lines = [
            {
                "slot": span.slot,
                "start": span.start,
                "token_ids": list(span.token_ids),
                "features": span.features.tolist(),
                "output": output.tolist(),
            }
            for span, output in zip(spans, outputs, strict=True)
        ]
        with self._report.open("a") as file:
            file.write(json.dumps(lines) + "\n")
        return outputs


def main() -> None:
    """Serve a variant until SIGTERM."""
    variant, report = sys.argv.pop(1), Path(sys.argv.pop(1))
    wrap: Callable[[Draft], Draft] = OwnFeatures
    load, load_draft = eagle3.load, eagle3.load_draft
    if variant == "forced":
        eagle3.load = lambda *arguments: ForcedDrafter(load(*arguments))  # type: ignore[assignment]
        wrap = partial(Recorded, report=report)

    def load_wrapped(*arguments: Any, **flags: Any) -> Any:
        draft, checkpoint = load_draft(*arguments, **flags)
        return wrap(draft), checkpoint

    eagle3.load_draft = load_wrapped
    drafter_main.main()


if __name__ == "__main__":
    main()
