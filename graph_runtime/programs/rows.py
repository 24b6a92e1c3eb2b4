"""Run methods whose rows do not know each other, with any number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graph_runtime.programs.executorch_runtime import Method
from graph_runtime.programs.slot_cache import MIN_ROWS


def run_rows(method: Method, inputs: Sequence[torch.Tensor], most: int) -> list[torch.Tensor]:
    """Return the outputs [N, ...] of inputs [N, ...], N >= 1, in calls of at most `most` rows.

    A single row is run twice, see MIN_ROWS.
    """
    parts = []
    for first in range(0, len(inputs[0]), most):
        part = [x[first : first + most].contiguous() for x in inputs]
        if len(part[0]) >= MIN_ROWS:
            parts.append(list(method.execute(part)))
        else:
            twice = [torch.cat((x,) * MIN_ROWS) for x in part]
            parts.append([x[: len(part[0])] for x in method.execute(twice)])
    return (
        parts[0] if len(parts) == 1 else [torch.cat(column) for column in zip(*parts, strict=True)]
    )
