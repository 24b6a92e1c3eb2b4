"""The EAGLE-3 drafter over a real draft of random weights, against a longhand recomputation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from drafter_service.config import DrafterConfig
from drafter_service.drafter import Drafter, DraftSampling, DraftWork, SessionParameters
from drafter_service.eagle3 import load
from graph_runtime.choice import Sampling
from splitspec.errors import UserError
from splitspec.v1 import rows_pb2
from tests.eagle3_layouts import DraftWeights, random_weights, write_draft
from tests.eagle3_reference import Maths, chain_logits, fused
from tests.graph_runtime.test_choice import reference_choice
from tests.tiny import write_tiny_model

PROMPT = (5, 17, 200, 3, 3, 91, 154, 8, 260, 11, 42)
RowBytes = Callable[[torch.Tensor], bytes]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A tiny target's folder, a draft's, and the draft's weights."""

    target: Path
    draft: Path
    weights: DraftWeights

    def config(self, **fields: Any) -> DrafterConfig:
        """Return what loads the draft in plain torch."""
        return DrafterConfig(
            **{
                "draft": "eagle3",
                "draft_model": self.draft,
                "target": str(self.target),
                "embeddings": "own",
                "runtime": "torch",
                "max_context_length": 96,
                "slot_count": 4,
                "cache_dir": self.target.parent / "cache",
                **fields,
            }
        )

    def load(self, **fields: Any) -> Drafter:
        """Load the draft."""
        return load(self.config(**fields))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Write a target of eight layers and a draft of three taps and a reduced vocabulary."""
    folder = tmp_path_factory.mktemp("eagle3")
    weights = random_weights(4)
    return Pair(
        target=write_tiny_model(folder / "target", n_layers=8),
        draft=write_draft(
            folder / "tiny-draft", layout="specforge", weights=weights, embeddings=True
        ),
        weights=weights,
    )


def raw_rows(seed: int, count: int, width: int) -> torch.Tensor:
    """Return raw rows [count, width] float32."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def as_bytes(rows: torch.Tensor) -> bytes:
    """Return rows as they cross the wire."""
    return cast("bytes", rows.contiguous().view(torch.uint8).numpy().tobytes())


@dataclass
class Session:
    """One session of a drafter, driven by hand."""

    drafter: Drafter
    slot: int
    rows: torch.Tensor
    """[S, W] of every position there will be."""
    parameters: SessionParameters = field(default_factory=SessionParameters)
    tokens: list[int] = field(default_factory=list)
    to_bytes: RowBytes = as_bytes

    def __post_init__(self) -> None:
        self.drafter.open(self.slot, self.parameters)

    def work(self, ids: Sequence[int], pending: int | None = None, count: int = 0) -> DraftWork:
        """Return a work that commits `ids`."""
        start = len(self.tokens)
        self.tokens += ids
        return DraftWork(
            slot=self.slot,
            parameters=self.parameters,
            start=start,
            token_ids=ids,
            rows=self.to_bytes(self.rows[start : len(self.tokens)]) if ids else None,
            pending_token_id=pending,
            draft_count=count,
        )

    def draft(self, ids: Sequence[int], pending: int | None = None, count: int = 0) -> list[int]:
        """Run one work alone."""
        (drafts,) = self.drafter.step([self.work(ids, pending, count)])
        return drafts


def expected(
    weights: DraftWeights,
    tokens: Sequence[int],
    rows: torch.Tensor,
    count: int,
    sampling: Sampling | None = None,
) -> list[int]:
    """Return the drafts after `tokens`, pending last, by float64 and slow loops.

    The draft's choice among its own ids is written into the target's vocabulary, where it does not
    know the other ids; noise and lowest ids are then those of target ids.
    """
    features = fused(weights, rows[: len(tokens) - 1])
    ids = list(tokens[1:])
    for j in range(count):
        logits = chain_logits(weights, Maths(), ids, features, j + 1)[-1]
        whole = torch.full((weights.vocab_size,), -math.inf, dtype=torch.float64)
        whole[torch.tensor(weights.target_ids or range(weights.vocab_size))] = logits
        # d_j is decided at its own absolute position: pending is at len(tokens) - 1.
        position = len(tokens) + j
        ids.append(reference_choice(whole.tolist(), sampling or Sampling(), position))
    return ids[len(tokens) - 1 :]


@pytest.mark.parametrize("count", range(1, 8))
def test_e15_drafts_equal_a_longhand_recomputation_for_a_prompt_and_the_rounds_after_it(
    pair: Pair, count: int
) -> None:
    rows = raw_rows(count, 60, 192)
    session = Session(pair.load(), 0, rows)
    session.draft(PROMPT[:4])
    pending = 7
    drafts = session.draft(PROMPT[4:], pending, count)
    assert drafts == expected(pair.weights, [*PROMPT, pending], rows, count)
    for accepted, bonus in ((0, 9), (min(2, count), 250), (count, 31)):
        drafts = session.draft([pending, *drafts[:accepted]], bonus, count)
        pending = bonus
        assert drafts == expected(pair.weights, [*session.tokens, pending], rows, count)


def test_e15_the_unshifted_pairing_would_draft_otherwise(pair: Pair) -> None:
    rows = raw_rows(1, 60, 192)
    drafts = Session(pair.load(), 0, rows).draft(PROMPT, 7, 5)
    unshifted = chain_logits(
        pair.weights, Maths(), PROMPT, fused(pair.weights, rows[: len(PROMPT)]), 1
    )
    assert pair.weights.target_ids is not None
    assert drafts[0] != pair.weights.target_ids[int(unshifted[0].argmax())]


def test_e17_drafts_are_target_ids_with_d2t_applied_once(pair: Pair) -> None:
    ids = pair.weights.target_ids
    assert ids is not None
    drafts = Session(pair.load(), 0, raw_rows(3, 60, 192)).draft(PROMPT, 7, 7)
    assert set(drafts) <= set(ids)
    assert any(token_id >= len(ids) for token_id in drafts), "beyond any draft id"


@pytest.mark.parametrize("one_width", [False, True])
def test_raw_and_fused_rows_give_the_same_drafts_bit_for_bit(
    tmp_path: Path, one_width: bool
) -> None:
    # One tap of the draft's own width: there a fused row fits fc, and must not meet it again.
    weights = random_weights(6, n_taps=1 if one_width else 3)
    target = write_tiny_model(tmp_path / "target", n_layers=8)
    folder = write_draft(tmp_path / "draft", layout="specforge", weights=weights, embeddings=True)
    pair = Pair(target=target, draft=folder, weights=weights)
    raw, over = pair.load(), pair.load(rows="fused")
    assert raw.info.row_format.width == (64 if one_width else 192)
    assert (over.info.row_format.kind, over.info.row_format.width) == (rows_pb2.ROW_KIND_FUSED, 64)
    rows = raw_rows(8, 60, raw.info.row_format.width)
    fuse = raw._draft.fuse  # type: ignore[attr-defined]
    sampled = SessionParameters(temperature=1.0, seed=3, draft_sampling=DraftSampling.COUPLED)
    for slot, parameters in enumerate((SessionParameters(), sampled)):
        pairs = (Session(raw, slot, rows, parameters), Session(over, slot, fuse(rows), parameters))
        drafts = [s.draft(PROMPT, 7, 7) for s in pairs]
        assert drafts[0] == drafts[1]
        assert drafts[0] == expected(weights, [*PROMPT, 7], rows, 7, _sampling(parameters))
        drafts = [s.draft([7, *d[:3]], 8, 7) for s, d in zip(pairs, drafts, strict=True)]
        assert drafts[0] == drafts[1]


def _sampling(parameters: SessionParameters) -> Sampling:
    return Sampling(temperature=parameters.temperature, seed=parameters.seed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_half_the_bytes_are_read_as_the_numbers_that_they_are(
    pair: Pair, dtype: str
) -> None:
    half = raw_rows(5, 60, 192).to(getattr(torch, dtype))
    wide = Session(pair.load(), 0, half.float())
    narrow = Session(pair.load(row_dtype=dtype), 0, half)
    assert narrow.drafter.info.row_format.row_bytes == 384
    assert narrow.draft(PROMPT, 7, 7) == wide.draft(PROMPT, 7, 7)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.2, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05},
    ],
)
def test_coupled_drafts_meet_the_noise_of_their_target_ids_and_positions(
    pair: Pair, kwargs: dict[str, Any]
) -> None:
    rows = raw_rows(11, 60, 192)
    drafter = pair.load()
    differs = 0
    for seed in (1, 2**63 + 5):
        parameters = SessionParameters(seed=seed, draft_sampling=DraftSampling.COUPLED, **kwargs)
        session = Session(drafter, 1, rows, parameters)
        sampling = Sampling(seed=seed, **kwargs)
        drafts = session.draft(PROMPT, 7, 6)
        assert drafts == expected(pair.weights, [*PROMPT, 7], rows, 6, sampling)
        differs += drafts != expected(pair.weights, [*PROMPT, 7], rows, 6)
        drafts = session.draft([7, drafts[0]], 9, 6)
        assert drafts == expected(pair.weights, [*session.tokens, 9], rows, 6, sampling)
        drafter.release(1)
    assert differs, "the noise decides something"


def test_how_a_session_drafts_is_its_own_choice_else_the_services(pair: Pair) -> None:
    rows = raw_rows(12, 60, 192)
    truth = {
        name: expected(pair.weights, [*PROMPT, 7], rows, 5, sampling)
        for name, sampling in (("argmax", None), ("coupled", Sampling(temperature=1.0, seed=9)))
    }
    assert truth["argmax"] != truth["coupled"]
    for served in ("argmax", "coupled"):
        drafter = pair.load(draft_sampling=served)
        for slot, (asked, wanted) in enumerate(
            [
                (DraftSampling.METHOD_DEFAULT, served),
                (DraftSampling.ARGMAX, "argmax"),
                (DraftSampling.COUPLED, "coupled"),
            ]
        ):
            parameters = SessionParameters(temperature=1.0, seed=9, draft_sampling=asked)
            session = Session(drafter, slot, rows, parameters)
            assert session.draft(PROMPT, 7, 5) == truth[wanted], (served, asked)
    cold = SessionParameters(temperature=0.0, seed=9, draft_sampling=DraftSampling.COUPLED)
    assert Session(drafter, 3, rows, cold).draft(PROMPT, 7, 5) == truth["argmax"]


def test_sessions_of_one_pack_draft_as_each_would_alone(pair: Pair) -> None:
    alone = []
    for i in range(4):
        session = Session(pair.load(), 0, raw_rows(20 + i, 60, 192), _coupled_if(i % 2))
        drafts = session.draft(PROMPT[i:], 7, 2 * i + 1)
        alone.append((drafts, session.draft([7, *drafts[:1]], 8, 7)))
    drafter = pair.load()
    sessions = [
        Session(drafter, i, raw_rows(20 + i, 60, 192), _coupled_if(i % 2)) for i in range(4)
    ]
    first = drafter.step([s.work(PROMPT[i:], 7, 2 * i + 1) for i, s in enumerate(sessions)])
    second = drafter.step(
        [s.work([7, *d[:1]], 8, 7) for s, d in reversed([*zip(sessions, first, strict=True)])]
    )
    assert list(zip(first, reversed(second), strict=True)) == alone
    assert drafter.pass_count == 7 + 7


def _coupled_if(coupled: int) -> SessionParameters:
    sampling = DraftSampling.COUPLED if coupled else DraftSampling.ARGMAX
    return SessionParameters(temperature=0.9, seed=coupled, draft_sampling=sampling)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows_kind", ["raw", "fused"])
def test_hostile_rows_stop_their_own_session_only_and_leave_nothing_behind(
    pair: Pair, bad: float, rows_kind: str
) -> None:
    width = 64 if rows_kind == "fused" else 192
    clean = raw_rows(30, 60, width)
    bad_rows = clean.clone()
    bad_rows[6, 1] = bad
    drafter = pair.load(rows=rows_kind)
    hostile, other = Session(drafter, 0, bad_rows), Session(drafter, 1, clean)
    drafter.step([hostile.work(PROMPT[:5]), other.work(PROMPT[:5])])
    drafts = drafter.step([hostile.work(PROMPT[5:], 7, 4), other.work(PROMPT[5:], 7, 4)])
    again = drafter.step([hostile.work([7], 8, 4), other.work([7, drafts[1][0]], 8, 4)])
    fresh = Session(pair.load(rows=rows_kind), 1, clean)
    fresh.draft(PROMPT[:5])
    assert drafts == [[], fresh.draft(PROMPT[5:], 7, 4)]
    assert again == [[], fresh.draft([7, drafts[1][0]], 8, 4)]
    drafter.release(0)
    assert Session(drafter, 0, clean).draft(PROMPT, 7, 4) == drafts[1]


def test_rows_that_overflow_fc_are_hostile_too(pair: Pair) -> None:
    rows = torch.full((60, 192), 3e38)
    session = Session(pair.load(), 0, rows)
    assert session.draft(PROMPT, 7, 4) == []
    assert session.draft([7], 8, 4) == []


def test_a_spoilt_session_is_told_of_in_the_log_once_and_with_its_slot(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(pair.load(), 3, torch.full((60, 192), math.nan))
    session.draft(PROMPT, 7, 4)
    session.draft([7], 8, 4)
    (warned,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "slot 3" in warned
    assert "features" in warned


def test_logits_that_are_not_finite_are_told_of_in_the_log_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafter: Any = pair.load()
    logits = drafter._draft.logits
    monkeypatch.setattr(drafter._draft, "logits", lambda features: logits(features) * math.nan)
    session = Session(drafter, 2, raw_rows(30, 60, 192))
    assert session.draft(PROMPT, 7, 4) == []
    assert session.draft([7], 8, 4) == []
    (warned,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "slot 2" in warned
    assert "logits" in warned


def test_a_draft_whose_logits_overflow_is_refused_at_load(pair: Pair, tmp_path: Path) -> None:
    weights = random_weights(4)
    weights.tensors["lm_head.weight"] = weights.tensors["lm_head.weight"].sign() * 3e38
    broken = write_draft(tmp_path / "broken", layout="specforge", weights=weights, embeddings=True)
    with pytest.raises(UserError, match=r"draft \S+broken gives logits that are not") as e:
        pair.load(draft_model=broken)
    assert "overflow at " in str(e.value)
    assert "\n" not in str(e.value)


def test_the_home_of_the_user_is_expanded_in_the_draft_s_folder(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(pair.draft.parent))
    assert pair.load(draft_model=Path("~/tiny-draft")).info.model_id == "tiny-draft"
    with pytest.raises(UserError, match="nobody-of-this-name"):
        pair.load(draft_model=Path("~nobody-of-this-name/d"))


def test_e22_a_session_in_a_used_slot_drafts_as_in_a_fresh_drafter(pair: Pair) -> None:
    drafter = pair.load()
    first = Session(drafter, 2, raw_rows(40, 90, 192))
    first.draft(list(range(3, 80)), 7, 7)
    drafter.release(2)
    rows = raw_rows(41, 60, 192)
    used, fresh = Session(drafter, 2, rows), Session(pair.load(), 2, rows)
    for ids, pending in ((PROMPT[:3], 7), ([7], 8), ([8, 12, 13], 9)):
        assert used.draft(ids, pending, 7) == fresh.draft(ids, pending, 7)


def test_e13_a_session_drafts_to_the_end_of_its_context_and_not_beyond(pair: Pair) -> None:
    rows = raw_rows(50, 16, 192)
    session = Session(pair.load(max_context_length=16), 0, rows)
    counts = []
    session.draft(range(3, 12))
    pending = 12
    for bonus in range(110, 117):
        drafts = session.draft([pending], bonus, 7)
        pending = bonus
        assert drafts == expected(pair.weights, [*session.tokens, pending], rows, len(drafts))
        counts.append(len(drafts))
    assert counts == [7, 6, 5, 4, 3, 2, 1]


def test_the_handshake_says_what_is_loaded_and_which_rows_it_wants(pair: Pair) -> None:
    info = pair.load(row_dtype="bfloat16", max_draft_count=5).info
    assert (info.method, info.model_id, info.instant) == ("eagle3", "tiny-draft", False)
    assert (info.vocab_size, info.tap_layers) == (300, (1, 3, 4))
    assert (info.max_draft_count, info.max_context_length, info.slot_count) == (5, 96, 4)
    assert info.tokenizer_hash is not None
    assert len(info.model_hash) == 64
    assert info.row_format.kind == rows_pb2.ROW_KIND_RAW_TAPS
    assert info.row_format.dtype == rows_pb2.ROW_DTYPE_BFLOAT16
    assert info.row_format.row_bytes == 3 * 64 * 2
    assert pair.load(target=None).info.tokenizer_hash is None
    moved = pair.load(tap_layers=(0, 2, 5)).info
    assert moved.tap_layers == (0, 2, 5)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"draft_model": Path("/nonexistent/draft")}, "/nonexistent/draft"),
        ({"target": "nobody/nothing"}, "nobody/nothing"),
        ({"precision": "int2"}, "int2"),
        ({"device": "tpu"}, "tpu"),
        ({"tap_layers": (1, 2)}, "tap"),
        ({"runtime": "executorch", "device": "cuda"}, "executorch"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(pair: Pair, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        pair.load(**fields)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_export_passes_its_flags_on_and_prints_the_programs_path(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    programs = pytest.importorskip("graph_runtime.programs")
    write_program = programs.export.write_program
    from drafter_service.__main__ import export_eagle3

    asked: list[tuple[Any, dict[str, Any]]] = []
    program = tmp_path / "draft.pte"
    write_program(program, b"a program")

    def ensure(source: Any, **flags: Any) -> Path:
        asked.append((source, flags))
        return program

    monkeypatch.setattr(programs, "ensure_eagle3_program", ensure)
    export = partial(export_eagle3, draft_model=pair.draft, cache_dir=Path("/c"))
    export(target=str(pair.target), precision="fp32", max_context_length=64, feedback="pre-norm")
    export()
    assert capsys.readouterr().out.splitlines() == [str(program)] * 2
    (source, flags), (plain, defaults) = asked
    assert (source.folder, source.target, source.feedback) == (pair.draft, pair.target, "pre-norm")
    assert flags == {"precision": "fp32", "cache_dir": Path("/c"), "max_context_length": 64}
    assert plain.target is None
    assert defaults == {"precision": "8da8w", "cache_dir": Path("/c"), "max_context_length": 1024}
    program.write_bytes(b"a progran")
    with pytest.raises(UserError, match="is corrupt or truncated: delete it to export it again"):
        export()
    assert capsys.readouterr().out == ""
