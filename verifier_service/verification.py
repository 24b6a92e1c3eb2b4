"""Which draft tokens stand.

The target's own choice, greedy or sampled, is `graph_runtime.choice`. A draft token stands iff it
equals that choice, so the emitted tokens are a function of the target, the prompt and the
parameters only (law L4).
"""

from __future__ import annotations

from collections.abc import Sequence


def accept(draft_token_ids: Sequence[int], chosen: Sequence[int]) -> int:
    """Return how many leading draft tokens stand: those that equal the target's choice."""
    count = 0
    for draft_token_id, token_id in zip(draft_token_ids, chosen, strict=False):
        if draft_token_id != token_id:
            break
        count += 1
    return count
