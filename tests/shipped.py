"""Lay tiny drafts as those that ship lie: `<target>-<method>/` with a `training.json` each.

Nothing of the product is imported here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import dflash_layouts, eagle3_layouts


def lay_draft(
    weights: Path, target: str, method: str, *, training: dict[str, Any] | None = None
) -> Path:
    """Write a tiny draft for a target of 4 layers into the tree `weights`; return its folder.

    Args:
        weights: the tree, created when missing.
        target: name of the model that it is for.
        method: "eagle3" or "dflash".
        training: content of its `training.json`; None: it has none.
    """
    folder = weights / f"{target}-{method}"
    if method == "dflash":
        dflash_layouts.write_draft(folder, dflash_layouts.random_weights(3), block_size=8)
    else:
        eagle3_layouts.write_draft(
            folder,
            layout="specforge",
            weights=eagle3_layouts.random_weights(2),
            tap_layers=(0, 1, 2),
        )
    if training is not None:
        (folder / "training.json").write_text(json.dumps(training))
    return folder
