"""Guards programs of short contexts, where every step wrote its K/V at position 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graph_runtime.eagle3.checkpoint import Eagle3Source
from graph_runtime.eagle3.draft import DraftSpan
from graph_runtime.eagle3.load import load_draft
from graph_runtime.load import load_target
from graph_runtime.target import Span
from tests.eagle3_layouts import random_weights, write_draft
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.usefixtures("exported_here")
CONTEXT = 100
"""Less than the rows of the longest step."""


def test_a_target_of_a_context_shorter_than_its_chunk_continues_where_it_was(
    tmp_path: Path, program_cache: Path
) -> None:
    folder = write_tiny_model(tmp_path / "target", n_layers=1)
    logits = []
    for runtime in ("torch", "executorch"):
        target = load_target(
            folder=folder,
            model_id="tiny",
            runtime=runtime,
            precision="fp32",
            cache_dir=program_cache,
            tap_layers=(0,),
            max_context_length=CONTEXT,
            slot_count=1,
            max_prefill_chunk=128,
            threads=1,
        )
        for start, ids in ((0, [5, 6, 7]), (3, [8, 9])):
            span = Span(slot=0, start=start, token_ids=ids, logits_count=1, wants_rows=False)
            output = target.step([span])[0]
        assert output.logits is not None
        logits.append(output.logits)
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)


def test_a_draft_of_a_short_context_continues_where_it_was(
    tmp_path: Path, program_cache: Path
) -> None:
    folder = write_draft(
        tmp_path / "draft", layout="specforge", weights=random_weights(1), embeddings=True
    )
    features = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    outputs = []
    for runtime in ("torch", "executorch"):
        draft, _ = load_draft(
            Eagle3Source(folder=folder, embeddings="own"),
            runtime=runtime,
            precision="fp32",
            cache_dir=program_cache,
            max_context_length=CONTEXT,
            slot_count=1,
            threads=1,
        )
        for start, ids in ((0, [5, 6, 7]), (3, [8, 9])):
            rows = features[start : start + len(ids)]
            output = draft.run([DraftSpan(slot=0, start=start, token_ids=ids, features=rows)])
        outputs.append(output)
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=0)
