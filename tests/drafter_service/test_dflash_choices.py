"""Which tokens the DFlash drafter chooses from a block's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from drafter_service.drafter import DraftSampling, SessionParameters
from graph_runtime.choice import Sampling, choose
from tests.drafter_service.block_drafts import (
    VOCAB,
    RecordingDraft,
    drafter,
    work,
)
from tests.graph_runtime.test_choice import reference_choice

COUPLED = DraftSampling.COUPLED


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.2, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05},
    ],
)
def test_coupled_drafts_from_the_target_s_logits_are_the_target_s_own_choices(
    kwargs: dict[str, Any], reduced: bool
) -> None:
    ids = torch.arange(0, 2 * VOCAB, 2) if reduced else None
    own = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    draft = RecordingDraft(logits=lambda _context, _pending, count: own[:count], target_ids=ids)
    whole = own
    if ids is not None:  # the target's logits, where it would never choose what the draft lacks
        whole = torch.full((7, 2 * VOCAB), -1e30)
        whole[:, ids] = own
    made = drafter(draft, draft_sampling=COUPLED)
    differs = 0
    for slot, seed in enumerate((1, 2**63 + 5)):
        made.open(slot, SessionParameters(seed=seed, **kwargs))
        (drafts,) = made.step([work(slot, 0, [10, 11, 12], pending=13, count=7)])
        target = choose(whole, Sampling(seed=seed, **kwargs), range(4, 11))
        assert drafts == target
        greedy = own.argmax(dim=1)
        differs += drafts != (greedy if ids is None else ids[greedy]).tolist()
    assert differs == (2 if kwargs else 0), "the noise decides something, and at temperature 0 not"


def test_argmax_is_served_unless_a_session_or_the_service_says_otherwise() -> None:
    own = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(4))
    truth = {
        "argmax": own.argmax(dim=1).tolist(),
        "coupled": choose(own, Sampling(temperature=1.0, seed=9), range(2, 9)),
    }
    assert truth["argmax"] != truth["coupled"]
    for served in (DraftSampling.ARGMAX, COUPLED):
        draft = RecordingDraft(logits=lambda _context, _pending, count: own[:count])
        made = drafter(draft, draft_sampling=served)
        for slot, (asked, wanted) in enumerate(
            [
                (DraftSampling.METHOD_DEFAULT, served.value),
                (DraftSampling.ARGMAX, "argmax"),
                (COUPLED, "coupled"),
            ]
        ):
            parameters = SessionParameters(temperature=1.0, seed=9, draft_sampling=asked)
            made.open(slot, parameters)
            assert made.step([work(slot, 0, [10], pending=11, count=7)]) == [truth[wanted]]


def _noisy(context: Sequence[Sequence[float]], pending: int, count: int) -> torch.Tensor:
    """Return random logits that everything that a session holds decides."""
    seed = pending + sum(int(31 * c[0] + c[1]) * (p + 1) for p, c in enumerate(context))
    return torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(seed))[:count]


def test_v8_a_session_s_drafts_do_not_depend_on_its_mates_their_order_or_its_slot() -> None:
    def parameters(text: int) -> SessionParameters:
        return SessionParameters(temperature=0.9, seed=text % 2, draft_sampling=COUPLED)

    def alone(text: int) -> list[list[int]]:
        made = drafter(RecordingDraft(logits=_noisy))
        made.open(0, parameters(text))
        (first,) = made.step([work(0, 0, [5] * (text + 1), 7, 2 * text + 1, text=text)])
        (second,) = made.step([work(0, text + 1, [7, first[0]], 8, 7, text=text)])
        return [first, second]

    made = drafter(RecordingDraft(logits=_noisy))
    slot_of = {0: 2, 1: 0, 2: 3, 3: 1}
    for text, slot in slot_of.items():
        made.open(slot, parameters(text))
    first = made.step([work(s, 0, [5] * (t + 1), 7, 2 * t + 1, text=t) for t, s in slot_of.items()])
    second = made.step(
        [work(slot_of[t], t + 1, [7, first[t][0]], 8, 7, text=t) for t in reversed(range(4))]
    )
    assert [list(pair) for pair in zip(first, reversed(second), strict=True)] == [
        alone(text) for text in range(4)
    ]


def test_d7_each_draft_token_meets_the_noise_of_its_own_absolute_position() -> None:
    sampling = Sampling(temperature=1.0, seed=5)
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(1))
    draft = RecordingDraft(logits=lambda _context, _pending, count: logits[:count])
    made = drafter(draft, draft_sampling=COUPLED)
    for slot, length in enumerate((1, 2, 9)):
        made.open(slot, SessionParameters(temperature=1.0, seed=5))
        (ids,) = made.step([work(slot, 0, [10] * length, pending=11, count=7)])
        # Pending is at `length`, after positions [0, length).
        assert ids == [
            reference_choice(logits[k - 1].tolist(), sampling, length + k) for k in range(1, 8)
        ]
