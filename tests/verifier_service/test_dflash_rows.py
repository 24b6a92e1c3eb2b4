"""ROW_KIND_FUSED of a DFlash draft: hidden_norm(fc(taps)) of the committed rows, no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from graph_runtime.dflash.load import load_draft
from graph_runtime.drafts.source import DraftSource
from graph_runtime.projection import RowProjection
from splitspec.errors import UserError
from splitspec.v1 import rows_pb2
from tests import eagle3_layouts
from tests.dflash_layouts import DFlashWeights, random_weights, write_draft
from tests.tiny import write_tiny_model
from tests.verifier_service.fusing import (
    NONE,
    PROMPT,
    Rig,
    config,
    values,
    verified,
    verifying,
)
from verifier_service.fusion import load_draft_fusion
from verifier_service.metrics import VerifierMetrics

RAW, FUSED = rows_pb2.ROW_KIND_RAW_TAPS, rows_pb2.ROW_KIND_FUSED
N_LAYERS, HT, TAPS, EPS = 4, 64, (0, 1, 3), 1e-5
OWN = {"hidden": 32, "target_hidden": HT}
"""A draft with embeddings of its own need not be as wide as its target."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", n_layers=N_LAYERS, hidden=HT)


def draft(folder: Path, seed: int = 3, *, layout: str = "z-lab", **fields: Any) -> Path:
    fields = {"tap_layers": TAPS, **fields}
    weights = random_weights(seed, n_taps=len(fields["tap_layers"]))
    return write_draft(folder, weights, layout=layout, **fields)


def fused_in_float64(raw: torch.Tensor, w: DFlashWeights) -> torch.Tensor:
    """Return what fused rows are, written down again: fc, then hidden_norm."""
    x = raw.double() @ w.tensors["fusion.fc.weight"].double().T
    scale = (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    return x * scale * w.tensors["fusion.norm.weight"].double()


@pytest.mark.parametrize(
    ("layout", "sizes", "own_embeddings"),
    [
        ("z-lab", {}, False),
        ("z-lab", {"n_taps": 1}, False),
        ("modelopt", {"n_taps": 4}, False),
        ("speculators", OWN, True),
        ("deepspec", OWN, True),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fused_row_is_the_hidden_norm_of_the_fc_of_the_raw_row(
    layout: str,
    sizes: dict[str, Any],
    own_embeddings: bool,
    precision: str,
    model: Path,
    tmp_path: Path,
) -> None:
    w = random_weights(3, **sizes)
    taps = {1: (2,), 3: TAPS, 4: (0, 1, 2, 3)}[w.n_taps]
    folder = write_draft(
        tmp_path / "draft", w, layout=layout, tap_layers=taps, own_embeddings=own_embeddings
    )
    rig = Rig(model, folder, tmp_path, precision=precision)
    # Whatever numbering the file has: speculators count from the embedding's output.
    assert rig.engine.model.tap_layers == taps
    _, raw = rig.prompt(1, RAW)
    _, fused = rig.prompt(2, FUSED)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    expected = fused_in_float64(values(raw, w.n_taps * HT, dtype), w)
    torch.testing.assert_close(values(fused, w.hidden).double(), expected, rtol=1e-5, atol=1e-5)


def test_fused_rows_have_the_very_bits_that_the_drafter_makes_of_raw_ones(
    model: Path, tmp_path: Path
) -> None:
    folder = draft(tmp_path / "draft")
    rig = Rig(model, folder, tmp_path)
    drafter, _ = load_draft(
        DraftSource(folder=folder, target=model),
        block_length=None,
        runtime="torch",
        precision="bf16",  # of its network: a feature is float32 whatever that is
        cache_dir=tmp_path,
        max_context_length=64,
        slot_count=1,
        threads=None,
    )
    raw = values(rig.prompt(1, RAW)[1], len(TAPS) * HT)
    for chunk in (1, 3, 16):
        _, fused = rig.prompt(2, FUSED, chunk)
        rig.engine.release_all(rig.stream)
        parts = [drafter.fuse(raw[:2]), drafter.fuse(raw[2:])]
        assert fused == drafter.fuse(raw).numpy().tobytes() == torch.cat(parts).numpy().tobytes()
    # What the handshake compares before fused rows may flow.
    assert rig.engine.model.fused_model_hash == drafter.model_hash
    other = load(model, draft(tmp_path / "other", seed=4), tmp_path)
    assert other.model_hash != drafter.model_hash
    assert (other.row_width, other.hidden_size) == (len(TAPS) * HT, drafter.config.hidden_size)


@pytest.mark.parametrize("stands", range(4))
def test_D18_L6_committed_row_bytes_are_committed_rows_times_row_bytes(
    stands: int, model: Path, tmp_path: Path
) -> None:
    rig = Rig(model, draft(tmp_path / "draft"), tmp_path)
    truth = rig.continuation(8)
    wrong = (truth[1 + stands] + 1) % 300
    item = verifying(1, len(PROMPT), truth[0], [*truth[1 : 1 + stands], wrong, wrong])
    for kind, row_bytes in ((FUSED, 4 * HT), (RAW, 4 * HT * len(TAPS))):
        registry = CollectorRegistry()
        metrics = VerifierMetrics(registry)
        rig.prompt(1, kind)
        step = rig.run(item)
        metrics.count([item], step, 0, (0, 0))
        outcome = verified(step)
        committed = 1 + stands
        assert outcome.accepted_count == stands
        assert outcome.rows is not None
        assert (outcome.rows.start, outcome.rows.row_format.kind) == (len(PROMPT), kind)
        assert len(outcome.rows.data) == committed * row_bytes
        assert registry.get_sample_value("committed_row_bytes_total") == committed * row_bytes
        rig.engine.release_all(rig.stream)


def test_D18_row_bytes_of_a_packed_step_are_those_of_all_its_sessions(
    model: Path, tmp_path: Path
) -> None:
    rig = Rig(model, draft(tmp_path / "draft"), tmp_path)
    truth = rig.continuation(8)
    for session, kind in ((1, FUSED), (2, RAW), (3, NONE)):
        rig.prompt(session, kind)
    step = rig.run(
        verifying(1, len(PROMPT), truth[0], truth[1:4]),  # all 3 stand: 4 rows
        verifying(2, len(PROMPT), truth[0], [truth[1], (truth[2] + 1) % 300]),  # 2 rows
        verifying(3, len(PROMPT), truth[0], truth[1:3]),  # wants none
    )
    assert step.pass_count == 1
    assert step.row_bytes == 4 * HT * (4 + 2 * len(TAPS))


def load(model: Path, fuse_for: Path, cache: Path, **fields: Any) -> RowProjection:
    projection = load_draft_fusion(config(model, fuse_for, cache, **fields), model)
    assert projection is not None
    return projection


def test_fuse_for_tells_drafts_of_the_two_methods_apart(model: Path, tmp_path: Path) -> None:
    eagle3 = eagle3_layouts.write_draft(
        tmp_path / "eagle3",
        layout="speculators",
        weights=eagle3_layouts.weights_for("speculators", 3),
        tap_layers=TAPS,
    )
    assert load(model, eagle3, tmp_path).method == "eagle3"
    for layout in ("z-lab", "modelopt", "speculators", "deepspec"):
        folder = draft(tmp_path / layout, layout=layout, own_embeddings=True)
        assert load(model, folder, tmp_path).method == "dflash", layout


def test_taps_are_the_drafts_and_a_contradiction_names_both(model: Path, tmp_path: Path) -> None:
    folder = draft(tmp_path / "draft")
    assert load(model, folder, tmp_path).tap_layers == TAPS
    assert load(model, folder, tmp_path, tap_layers=TAPS).tap_layers == TAPS
    with pytest.raises(UserError, match=r"^--tap-layers 0,1,2 .* --fuse-for reads, 0,1,3;"):
        load(model, folder, tmp_path, tap_layers=(0, 1, 2))
    with pytest.raises(UserError, match="takes 3 taps"):
        load(model, folder, tmp_path, tap_layers=(0, 1))
    # The file's own numbers are one higher, and mean the same layers: no contradiction.
    counted = draft(tmp_path / "counted", layout="speculators", own_embeddings=True)
    assert load(model, counted, tmp_path, tap_layers=TAPS).tap_layers == TAPS
    # A file that says nothing, or nothing that is certain, leaves the layers to the flag.
    unsaid = draft(tmp_path / "unsaid", nested={"target_layer_ids": None})
    assert load(model, unsaid, tmp_path, tap_layers=(0, 2, 3)).tap_layers == (0, 2, 3)
    vague = draft(tmp_path / "vague", config={"aux_hidden_state_layer_ids": [1, 2, 3]})
    with pytest.raises(UserError, match="give --tap-layers"):
        load(model, vague, tmp_path)
    assert load(model, vague, tmp_path, tap_layers=(0, 2, 3)).tap_layers == (0, 2, 3)


def test_a_draft_for_another_target_or_of_a_successor_is_a_users_mistake(
    model: Path, tmp_path: Path
) -> None:
    deep = draft(tmp_path / "deep", tap_layers=(1, 2, 4))
    with pytest.raises(UserError, match=r"\[1, 2, 4\].*layers 0\.\.3"):
        load(model, deep, tmp_path)
    wide = write_draft(
        tmp_path / "wide",
        random_weights(3, target_hidden=128),
        layout="speculators",
        own_embeddings=True,
        tap_layers=TAPS,
    )
    with pytest.raises(UserError, match=r"target_hidden_size is 128; .* is 64"):
        load(model, wide, tmp_path)
    markov = {"markov_head.markov_w1": torch.zeros(300, 4)}
    dspark = draft(tmp_path / "dspark", layout="deepspec", own_embeddings=True, tensors=markov)
    with pytest.raises(UserError, match=r"dspark: tensor markov_head\.markov_w1: this is DSpark"):
        load(model, dspark, tmp_path)
