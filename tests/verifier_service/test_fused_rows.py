"""ROW_KIND_FUSED: a draft's own projection of the committed rows, and of no others."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from graph_runtime.choice import Sampling
from graph_runtime.projection import RowProjection
from graph_runtime.target import Target
from splitspec.errors import InvalidArgument, UserError
from splitspec.v1 import rows_pb2
from splitspec.v1 import verifier_pb2 as pb
from tests.eagle3_layouts import DraftWeights, random_weights, write_draft
from tests.fakes import FakeTarget
from tests.tiny import write_tiny_model
from tests.verifier_service.fusing import (
    PROMPT,
    Rig,
    config,
    prefilling,
    values,
    verified,
    verifying,
)
from tests.verifier_service.service import opening, prefill, serving, stream_of, window
from verifier_service.engine import Engine
from verifier_service.fusion import load_draft_fusion
from verifier_service.server import _check_message_size
from verifier_service.steps import (
    ForkItem,
    OpenItem,
    PrefillOutcome,
)

NONE, RAW, FUSED = rows_pb2.ROW_KIND_NONE, rows_pb2.ROW_KIND_RAW_TAPS, rows_pb2.ROW_KIND_FUSED
N_LAYERS, HT, H, TAPS, EPS = 4, 64, 32, (0, 1, 3), 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", n_layers=N_LAYERS, hidden=HT)


def weights(**sizes: Any) -> DraftWeights:
    return random_weights(3, **{"hidden": H, "target_hidden": HT, "n_heads": 2, **sizes})


def draft(folder: Path, layout: str = "specforge", **sizes: Any) -> Path:
    return write_draft(folder / layout, layout=layout, weights=weights(**sizes), tap_layers=TAPS)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def fused_in_float64(raw: torch.Tensor, w: DraftWeights) -> torch.Tensor:
    """Return what fused rows are, written down again: norms, of the whole or a tap, then fc."""
    x, t = raw.double(), w.tensors
    if "fusion.input_norm.weight" in t:
        x = rms_norm(x, t["fusion.input_norm.weight"])
    if "fusion.fc_norm.0.weight" in t:
        taps = x.split(HT, dim=-1)
        x = torch.cat(
            [rms_norm(tap, t[f"fusion.fc_norm.{i}.weight"]) for i, tap in enumerate(taps)], dim=-1
        )
    return x @ t["fusion.fc.weight"].double().T


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("specforge", {}),
        ("specforge", {"n_taps": 1}),
        ("eagle-3.1", {"fc_norm": True}),
        ("speculators", {"norm_before_fc": True}),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fused_row_is_the_drafts_own_projection_of_the_raw_row(
    layout: str, sizes: dict[str, Any], precision: str, model: Path, tmp_path: Path
) -> None:
    w = weights(**sizes)
    taps = TAPS[: w.n_taps]
    folder = write_draft(tmp_path / "draft", layout=layout, weights=w, tap_layers=taps)
    rig = Rig(model, folder, tmp_path, precision=precision)
    assert rig.engine.model.tap_layers == taps
    _, raw = rig.prompt(1, RAW)
    _, fused = rig.prompt(2, FUSED)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    expected = fused_in_float64(values(raw, w.n_taps * HT, dtype), w)
    torch.testing.assert_close(values(fused, H).double(), expected, rtol=1e-6, atol=3e-6)


def test_without_taps_a_fused_row_is_the_last_layers_output_after_the_targets_norm(
    model: Path, tmp_path: Path
) -> None:
    w = weights(n_taps=0, hidden=HT, hidden_norm=False)
    folder = write_draft(tmp_path / "draft", layout="modelopt", weights=w)
    rig = Rig(model, folder, tmp_path)
    assert rig.engine.model.tap_layers == (N_LAYERS - 1,)
    norm = load_file(model / "model.safetensors")["model.norm.weight"]
    expected = rms_norm(values(rig.prompt(1, RAW)[1], HT).double(), norm)
    fused = values(rig.prompt(2, FUSED)[1], HT).double()
    torch.testing.assert_close(fused, expected, rtol=1e-6, atol=1e-6)


def test_L4_a_fused_row_has_the_same_bits_in_every_chunk_and_window(
    model: Path, tmp_path: Path
) -> None:
    rig = Rig(model, draft(tmp_path), tmp_path)
    truth = rig.continuation(8)
    _, whole = rig.prompt(1, FUSED)
    for session, chunk in ((2, 1), (3, 3), (4, 8)):
        assert rig.prompt(session, FUSED, chunk)[1] == whole
        rig.engine.release_all(rig.stream)
    one_by_one = b""
    rig.prompt(1, FUSED)
    for i, token in enumerate(truth[:-1]):
        rows = verified(rig.run(verifying(1, len(PROMPT) + i, token))).rows
        assert rows is not None
        one_by_one += rows.data
    for count in range(1, 8):
        # Beside others, whose rows share its projection.
        rig.engine.release_all(rig.stream)
        for session in (1, 2, 3):
            rig.prompt(session, FUSED)
        items = [
            verifying(2, len(PROMPT), truth[0], [5]),
            verifying(1, len(PROMPT), truth[0], truth[1:count]),
            verifying(3, len(PROMPT), truth[0], truth[1:4]),
        ]
        rows = verified(rig.run(*items), 1).rows
        assert rows is not None
        assert rows.data == one_by_one[: count * H * 4]


@pytest.mark.parametrize("stands", range(4))
def test_L6_a_round_copies_the_committed_rows_alone_of_either_kind(
    stands: int, model: Path, tmp_path: Path
) -> None:
    rig = Rig(model, draft(tmp_path), tmp_path)
    truth = rig.continuation(6)
    wrong = (truth[1 + stands] + 1) % 300
    drafts = [*truth[1 : 1 + stands], wrong, wrong]
    for session, kind, row_bytes in ((1, FUSED, H * 4), (2, RAW, len(TAPS) * HT * 4)):
        rig.prompt(session, kind)
        step = rig.run(verifying(session, len(PROMPT), truth[0], drafts))
        outcome = verified(step)
        assert outcome.accepted_count == stands
        assert outcome.rows is not None
        assert (outcome.rows.start, outcome.rows.row_format.kind) == (len(PROMPT), kind)
        assert step.row_bytes == len(outcome.rows.data) == (stands + 1) * row_bytes


def test_sessions_of_every_kind_share_a_step_and_get_their_own_rows(
    model: Path, tmp_path: Path
) -> None:
    rig = Rig(model, draft(tmp_path), tmp_path)
    kinds = {1: FUSED, 2: NONE, 3: RAW, 4: FUSED}
    alone = {session: rig.prompt(session, kind)[1] for session, kind in kinds.items()}
    rig.engine.release_all(rig.stream)
    for session, kind in kinds.items():
        rig.open(session, kind)
    # The prompts of 1 and 4 differ in length, so that swapped rows would show.
    lengths = {1: 11, 2: 11, 3: 9, 4: 5}
    step = rig.run(*(prefilling(s, 0, PROMPT[:n]) for s, n in lengths.items()))
    assert step.pass_count == 1
    for result, (session, count) in zip(step.results, lengths.items(), strict=True):
        assert isinstance(result.outcome, PrefillOutcome)
        rows = result.outcome.rows
        if kinds[session] == NONE:
            assert rows is None
            continue
        assert rows is not None
        row_format = rows.row_format
        assert row_format.kind == kinds[session]
        assert rows.data == alone[session][: count * row_format.row_bytes]


def test_a_fork_may_take_fused_rows_from_a_raw_source(model: Path, tmp_path: Path) -> None:
    rig = Rig(model, draft(tmp_path), tmp_path)
    _, whole = rig.prompt(1, FUSED)
    rig.prompt(2, RAW)
    fork = ForkItem(
        session_id=3, source_session_id=2, length=6, sampling=Sampling(), row_kind=FUSED
    )
    step = rig.run(fork, prefilling(3, 6, PROMPT[6:]))
    outcome = step.results[1].outcome
    assert isinstance(outcome, PrefillOutcome)
    assert outcome.rows is not None
    assert outcome.rows.data == whole[6 * H * 4 :]


def test_fused_rows_are_refused_where_none_are_made_naming_the_kinds_offered(
    model: Path, tmp_path: Path
) -> None:
    rig = Rig(model, None, tmp_path)
    (result,) = rig.run(OpenItem(session_id=1, sampling=Sampling(), row_kind=FUSED)).results
    assert isinstance(result.error, InvalidArgument)
    assert "ROW_KIND_NONE or ROW_KIND_RAW_TAPS" in result.error.message
    assert "FUSED" not in result.error.message.partition("expected")[2]
    assert rig.engine.model.fused_model_hash == ""
    with_draft = Rig(model, draft(tmp_path), tmp_path)
    (result,) = with_draft.run(OpenItem(session_id=1, sampling=Sampling(), row_kind=9)).results
    assert result.error is not None
    assert "ROW_KIND_RAW_TAPS or ROW_KIND_FUSED" in result.error.message


def test_taps_are_the_drafts_and_a_contradiction_names_both(model: Path, tmp_path: Path) -> None:
    folder = draft(tmp_path)

    def load(fuse_for: Path = folder, **fields: Any) -> RowProjection:
        fusion = load_draft_fusion(config(model, fuse_for, tmp_path, **fields), model)
        assert fusion is not None
        return fusion

    assert load().tap_layers == load(tap_layers=TAPS).tap_layers == TAPS
    with pytest.raises(UserError, match=r"^--tap-layers 0,1,2 .* --fuse-for reads, 0,1,3;"):
        load(tap_layers=(0, 1, 2))
    with pytest.raises(UserError, match="takes 3 taps"):
        load(tap_layers=(0, 1))
    # A file that says nothing, or nothing that is certain, leaves the layers to the flag.
    unsaid = write_draft(
        tmp_path / "unsaid",
        layout="specforge",
        weights=weights(),
        tap_layers=TAPS,
        nested={"eagle_aux_hidden_state_layer_ids": None},
    )
    assert load(unsaid, tap_layers=(0, 2, 3)).tap_layers == (0, 2, 3)
    vague = write_draft(
        tmp_path / "vague",
        layout="specforge",
        weights=weights(),
        tap_layers=TAPS,
        config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    )
    with pytest.raises(UserError, match="give --tap-layers"):
        load(vague)
    assert load(vague, tap_layers=(0, 2, 3)).tap_layers == (0, 2, 3)


def test_a_draft_for_another_target_is_a_users_mistake(model: Path, tmp_path: Path) -> None:
    wide = write_draft(
        tmp_path / "wide", layout="specforge", weights=weights(target_hidden=128), tap_layers=TAPS
    )
    with pytest.raises(UserError, match=r"target_hidden_size is 128; .* is 64"):
        load_draft_fusion(config(model, wide, tmp_path), model)
    deep = write_draft(
        tmp_path / "deep", layout="specforge", weights=weights(), tap_layers=(1, 2, 4)
    )
    with pytest.raises(UserError, match=r"\[1, 2, 4\].*layers 0\.\.3"):
        load_draft_fusion(config(model, deep, tmp_path), model)
    with pytest.raises(UserError, match=r"^--fuse-for .*nowhere is not a folder$"):
        config(model, tmp_path / "nowhere", tmp_path)


def test_a_draft_that_is_vague_about_its_feedback_is_no_matter_to_the_verifier(
    model: Path, tmp_path: Path
) -> None:
    folder = write_draft(
        tmp_path / "draft",
        layout="specforge",
        weights=weights(),
        tap_layers=TAPS,
        post_norm_feedback=True,
    )
    assert load_draft_fusion(config(model, folder, tmp_path), model) is not None


class Recorder:
    """A fusion that notes how it was called."""

    def __init__(self, target: Target, hidden: int = 3) -> None:
        self.calls: list[tuple[int, str]] = []
        self.fusion = RowProjection(
            method="eagle3",
            model_hash="d" * 64,
            tap_layers=target.info.tap_layers,
            row_width=target.info.row_width,
            hidden_size=hidden,
            fuse=self.fuse,
        )

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        assert rows.dtype == torch.float32
        assert torch.is_inference_mode_enabled()
        self.calls.append((len(rows), threading.current_thread().name))
        return rows[:, :3] * 2


def test_the_warm_up_fuses_as_many_rows_as_any_item_can_have() -> None:
    target = FakeTarget(max_prefill_chunk=16, row_dtype=torch.bfloat16)
    recorder = Recorder(target)
    Engine(target, max_draft_count=7, fusion=recorder.fusion).warm_up()
    assert [count for count, _ in recorder.calls] == [8, 16]


async def test_the_engines_thread_fuses_and_the_handshake_tells_the_draft(tmp_path: Path) -> None:
    target = FakeTarget()
    recorder = Recorder(target)

    def load(engine: Engine) -> Engine:
        engine.warm_up()
        return engine

    async with (
        serving(tmp_path, target, load, fusion=recorder.fusion) as service,
        stream_of(service) as stream,
    ):
        model = await service.stub.GetModel(pb.VerifierGetModelRequest())
        assert model.fused_model_hash == "d" * 64
        assert [(layout.kind, layout.width) for layout in model.row_layouts] == [
            (NONE, 0),
            (RAW, 4),
            (FUSED, 3),
        ]
        assert model.row_layouts[2].dtype == rows_pb2.ROW_DTYPE_FLOAT32
        _, chunk = await stream.run(opening(1, FUSED), prefill(1, 0, [7, 8]))
        rows = chunk.prefill.rows
        assert (rows.kind, rows.width, rows.start, rows.count) == (FUSED, 3, 0, 2)
        assert values(rows.inline, 3)[:, :2].tolist() == [[0.0, 14.0], [2.0, 16.0]]
        bonus = chunk.prefill.bonus_token_id
        (verified,) = await stream.run(window(1, 2, bonus))
        assert (verified.verify.rows.kind, verified.verify.rows.count) == (FUSED, 1)
    assert {name for _, name in recorder.calls} == {"engine"}


def test_limits_under_which_the_widest_rows_outgrow_a_message_are_refused() -> None:
    target = FakeTarget()
    engine = Engine(target, max_draft_count=7, fusion=Recorder(target, hidden=2**20).fusion)
    with pytest.raises(UserError, match=r"--max-prefill-chunk 16 of 4 slots is 268435456 bytes"):
        _check_message_size(engine.model)
