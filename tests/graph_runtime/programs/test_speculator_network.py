"""The speculator's methods against independent code, with all that a draft and a target may have.

The target has a sliding window; the draft a norm a tap, a window of its own, and feeds its normed
output back (EAGLE-3.1).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.eagle3_layouts import DraftWeights, weights_for, write_draft
from tests.eagle3_reference import Maths, chain_logits, fused
from tests.graph_runtime.programs.speculators import CHUNK, export, greedy
from tests.graph_runtime.programs.test_program_target import tokens_of
from tests.tiny import write_tiny_model

pytest.importorskip("executorch")
pytestmark = pytest.mark.usefixtures("exported_here")
TAPS = (0, 1, 2)
WINDOW = 20
MATHS = Maths(post_norm_feedback=True, sliding_window=WINDOW)
PROMPT = tokens_of(36)


@pytest.fixture(scope="module")
def weights() -> DraftWeights:
    return weights_for("eagle-3.1", 5)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    config = {"sliding_window": WINDOW}
    return write_tiny_model(folder, family="mistral", n_layers=3, config=config)


@pytest.fixture
def speculator(
    target: Path,
    weights: DraftWeights,
    tmp_path_factory: pytest.TempPathFactory,
    program_cache: Path,
) -> Any:
    from graph_runtime.programs.speculator_load import load_speculator

    draft = write_draft(
        tmp_path_factory.mktemp("draft"),
        layout="eagle-3.1",
        weights=weights,
        tap_layers=TAPS,
        embeddings=True,
        config={"layer_types": ["sliding_attention"], "sliding_window": WINDOW},
    )
    return load_speculator(export(target, draft, program_cache, chain=2, embeddings="own"))


def hidden_rows(target: Path, tokens: list[int]) -> torch.Tensor:
    """Return the taps side by side [T, taps * H], by `transformers`."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    taps: list[torch.Tensor] = []
    for layer in TAPS:
        model.model.layers[layer].register_forward_hook(lambda _m, _i, out: taps.append(out[0]))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    return torch.cat(taps, dim=-1)


def test_tokens_beyond_the_window_are_the_target_s(speculator: Any, target: Path) -> None:
    emitted: list[int] = []
    speculator.generate(PROMPT, max_tokens=30, emit=emitted.extend)
    assert emitted == greedy(target, PROMPT, 30)


def test_features_are_the_fused_rows_of_both_target_methods(
    speculator: Any, target: Path, weights: DraftWeights
) -> None:
    tokens = tokens_of(39, seed=2)
    wanted = fused(weights, hidden_rows(target, tokens)).float()
    prefill, verify = speculator.methods["prefill"], speculator.methods["target_verify"]
    _, first = prefill.execute([torch.tensor([tokens[:36]]), torch.arange(36)])
    _, second = verify.execute([torch.tensor([tokens[36:]]), torch.arange(36, 39)])
    torch.testing.assert_close(torch.cat((first[0], second[0])), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [2, 3, WINDOW, WINDOW + 1, CHUNK - 4])
def test_drafts_are_those_of_a_longhand_recomputation(
    length: int, speculator: Any, weights: DraftWeights
) -> None:
    prefill, draft = speculator.methods["prefill"], speculator.methods["draft_decode"]
    bonus, features = prefill.execute([torch.tensor([PROMPT[:length]]), torch.arange(length)])
    tokens = [*PROMPT[1:length], int(bonus)]
    seed = features
    ids, features = draft.execute([torch.tensor([tokens]), seed, torch.arange(length)])
    proposals = [int(ids[0, -1])]
    for position in range(length, length + 2):
        last = features[:, -1:].contiguous()
        ids, features = draft.execute(
            [torch.tensor([proposals[-1:]]), last, torch.tensor([position])]
        )
        proposals.append(int(ids[0, -1]))
    logits = chain_logits(weights, MATHS, [*tokens, *proposals[:2]], seed[0], 3)
    assert weights.target_ids is not None
    assert proposals == [weights.target_ids[int(row.argmax())] for row in logits]
