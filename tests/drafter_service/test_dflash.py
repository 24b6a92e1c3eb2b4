"""The DFlash drafter over real drafts of random weights, against a longhand recomputation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from drafter_service.config import DrafterConfig
from drafter_service.dflash import load
from drafter_service.drafter import Drafter, DraftSampling, DraftWork, SessionParameters
from graph_runtime.choice import Sampling
from splitspec.v1 import rows_pb2
from tests.dflash_layouts import DFlashWeights, random_weights, write_draft
from tests.dflash_reference import block_logits, fused
from tests.graph_runtime.test_choice import reference_choice
from tests.tiny import write_tiny_model

MASK = 16
PROMPT = (5, 17, 200, 3, MASK, 91, 154, 8, 260, 11, 42)
RowBytes = Callable[[torch.Tensor], bytes]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A tiny target's folder, a draft's, and what the draft computes."""

    target: Path
    draft: Path
    weights: DFlashWeights
    maths: dict[str, Any] = field(default_factory=dict)
    """What the recomputation is told besides: windows, causality."""
    shares: bool = True
    """Whether embedding and head are the target's."""
    first_slot: int = 1
    """The slot of the block that drafts d1."""

    def config(self, **fields: Any) -> DrafterConfig:
        """Return what loads the draft in plain torch."""
        return DrafterConfig(
            **{
                "draft": "dflash",
                "draft_model": self.draft,
                "target": str(self.target),
                "embeddings": "auto" if self.shares else "own",
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

    def expected(
        self,
        tokens: Sequence[int],
        rows: torch.Tensor,
        count: int,
        sampling: Sampling | None = None,
        *,
        block_length: int = 8,
    ) -> list[int]:
        """Return the drafts after `tokens`, pending last, by float64 and slow loops.

        The draft's choice among its own ids is written into the target's vocabulary, where it does
        not know the other ids; noise and lowest ids are then those of target ids.
        """
        own = {}
        if self.shares:
            table = load_file(self.target / "model.safetensors")["model.embed_tokens.weight"]
            own = {"embedding": table, "head": table}
        length = len(tokens) - 1
        logits = block_logits(
            self.weights,
            features=fused(self.weights, rows[:length]),
            pending=tokens[-1],
            block_length=block_length,
            mask_token_id=MASK,
            **own,
            **self.maths,
        )[self.first_slot : self.first_slot + count]
        ids = torch.tensor(self.weights.target_ids or range(self.weights.vocab_size))
        whole = torch.full((count, self.weights.vocab_size), -math.inf, dtype=torch.float64)
        whole[:, ids] = logits
        # Pending is at position `length`; d_k is decided at its own.
        return [
            reference_choice(whole[k - 1].tolist(), sampling or Sampling(), length + k)
            for k in range(1, count + 1)
        ]


def make_pair(folder: Path, *, seed: int = 4, **layout: Any) -> Pair:
    """Write a target and a z-lab draft of a block of 8, which shares embedding and head."""
    weights = random_weights(seed)
    return Pair(
        target=write_tiny_model(folder / "target"),
        draft=write_draft(folder / "tiny-draft", weights, mask_token_id=MASK, **layout),
        weights=weights,
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Write the plainest pair."""
    return make_pair(tmp_path_factory.mktemp("dflash"))


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Write a pair whose draft has an embedding and a head of its own, of fewer ids."""
    folder = tmp_path_factory.mktemp("reduced")
    weights = random_weights(5, draft_vocab_size=120)
    return Pair(
        target=write_tiny_model(folder / "target"),
        draft=write_draft(
            folder / "tiny-draft",
            weights,
            layout="speculators",
            mask_token_id=MASK,
            own_embeddings=True,
        ),
        weights=weights,
        shares=False,
    )


def raw_rows(seed: int, count: int, width: int = 192) -> torch.Tensor:
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
            rows=as_bytes(self.rows[start : len(self.tokens)]) if ids else None,
            pending_token_id=pending,
            draft_count=count,
        )

    def draft(self, ids: Sequence[int], pending: int | None = None, count: int = 0) -> list[int]:
        """Run one work alone."""
        (drafts,) = self.drafter.step([self.work(ids, pending, count)])
        return drafts


@pytest.mark.parametrize("count", range(1, 8))
def test_d7_drafts_equal_a_longhand_recomputation_for_a_prompt_and_the_rounds_after_it(
    pair: Pair, count: int
) -> None:
    rows = raw_rows(count, 60)
    session = Session(pair.load(), 0, rows)
    session.draft(PROMPT[:4])
    pending = MASK if count % 2 else 7  # a token of the text may be the mask's id
    drafts = session.draft(PROMPT[4:], pending, count)
    assert drafts == pair.expected([*PROMPT, pending], rows, count)
    for accepted, bonus in ((0, 9), (min(2, count), 250), (count, 31)):
        drafts = session.draft([pending, *drafts[:accepted]], bonus, count)
        pending = bonus
        assert drafts == pair.expected([*session.tokens, pending], rows, count)
    assert session.drafter.pass_count == 4


def test_e17_drafts_are_target_ids_with_d2t_applied_once(reduced: Pair) -> None:
    ids = reduced.weights.target_ids
    assert ids is not None
    rows = raw_rows(3, 60)
    drafts = Session(reduced.load(), 0, rows).draft(PROMPT, 7, 7)
    assert drafts == reduced.expected([*PROMPT, 7], rows, 7)
    assert set(drafts) <= set(ids)
    assert any(token_id >= len(ids) for token_id in drafts), "beyond any draft id"


def test_where_every_slot_drafts_slot_k_drafts_the_token_after_its_own_position(
    tmp_path: Path,
) -> None:
    weights = random_weights(7)
    pair = Pair(
        target=write_tiny_model(tmp_path / "target"),
        draft=write_draft(
            tmp_path / "draft",
            weights,
            layout="deepspec",
            block_size=7,
            mask_token_id=MASK,
            own_embeddings=True,
        ),
        weights=weights,
        shares=False,
        first_slot=0,
    )
    drafter = pair.load()
    assert drafter.info.max_draft_count == 7, "the whole block"
    sampling = SessionParameters(temperature=1.0, seed=2, draft_sampling=DraftSampling.COUPLED)
    for slot, parameters in enumerate((SessionParameters(), sampling)):
        rows = raw_rows(8 + slot, 60)
        drafts = Session(drafter, slot, rows, parameters).draft(PROMPT, 7, 7)
        own = Sampling(temperature=parameters.temperature, seed=parameters.seed)
        assert drafts == pair.expected([*PROMPT, 7], rows, 7, own, block_length=7)


def test_raw_and_fused_rows_give_the_same_drafts_bit_for_bit(pair: Pair) -> None:
    raw, over = pair.load(), pair.load(rows="fused")
    assert raw.info.row_format.width == 192
    assert (over.info.row_format.kind, over.info.row_format.width) == (rows_pb2.ROW_KIND_FUSED, 64)
    rows = raw_rows(8, 60)
    features = raw._draft.fuse(rows)  # type: ignore[attr-defined]
    sampled = SessionParameters(temperature=1.0, seed=3, draft_sampling=DraftSampling.COUPLED)
    for slot, parameters in enumerate((SessionParameters(), sampled)):
        logits = [recorded(drafter) for drafter in (raw, over)]
        pairs = (
            Session(raw, slot, rows, parameters),
            Session(over, slot, features, parameters),
        )
        drafts = [s.draft(PROMPT, 7, 7) for s in pairs]
        assert drafts[0] == drafts[1]
        drafts = [s.draft([7, *d[:3]], 8, 7) for s, d in zip(pairs, drafts, strict=True)]
        assert drafts[0] == drafts[1]
        assert all(map(torch.equal, *logits))
        assert len(logits[0]) == 2


def recorded(drafter: Drafter) -> list[torch.Tensor]:
    """Return a list to which the logits of each work that drafts will be added."""
    draft: Any = drafter._draft  # type: ignore[attr-defined]
    logits: list[torch.Tensor] = []
    run = type(draft).run

    def run_and_keep(works: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = run(draft, works)
        logits.extend(own.clone() for own in found if len(own))
        return found

    draft.run = run_and_keep
    return logits


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_half_the_bytes_are_read_as_the_numbers_that_they_are(
    pair: Pair, dtype: str
) -> None:
    half = raw_rows(5, 60).to(getattr(torch, dtype))
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
@pytest.mark.parametrize("kind", ["pair", "reduced"])
def test_coupled_drafts_meet_the_noise_of_their_target_ids_and_positions(
    kind: str, kwargs: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    pair: Pair = request.getfixturevalue(kind)
    rows = raw_rows(11, 60)
    drafter = pair.load()
    differs = 0
    for seed in (1, 2**63 + 5):
        parameters = SessionParameters(seed=seed, draft_sampling=DraftSampling.COUPLED, **kwargs)
        session = Session(drafter, 1, rows, parameters)
        sampling = Sampling(seed=seed, **kwargs)
        drafts = session.draft(PROMPT, 7, 6)
        assert drafts == pair.expected([*PROMPT, 7], rows, 6, sampling)
        differs += drafts != pair.expected([*PROMPT, 7], rows, 6)
        drafts = session.draft([7, drafts[0]], 9, 6)
        assert drafts == pair.expected([*session.tokens, 9], rows, 6, sampling)
        drafter.release(1)
    assert differs, "the noise decides something"


def test_the_service_drafts_by_argmax_unless_its_flag_says_coupled(pair: Pair) -> None:
    rows = raw_rows(12, 60)
    parameters = SessionParameters(temperature=1.0, seed=9)
    argmax = pair.expected([*PROMPT, 7], rows, 5)
    coupled = pair.expected([*PROMPT, 7], rows, 5, Sampling(temperature=1.0, seed=9))
    assert argmax != coupled
    for fields, truth in (
        ({}, argmax),
        ({"draft_sampling": "argmax"}, argmax),
        ({"draft_sampling": "coupled"}, coupled),
    ):
        assert Session(pair.load(**fields), 0, rows, parameters).draft(PROMPT, 7, 5) == truth


def test_v8_sessions_of_one_pack_draft_as_each_would_alone_bit_for_bit(pair: Pair) -> None:
    alone = []
    for i in range(4):
        drafter = pair.load()
        logits = recorded(drafter)
        session = Session(drafter, 0, raw_rows(20 + i, 60), _coupled_if(i % 2))
        drafts = session.draft(PROMPT[i:], 7, 2 * i + 1)
        alone.append((drafts, session.draft([7, *drafts[:1]], 8, 7), logits))
    drafter = pair.load()
    logits = recorded(drafter)
    sessions = [Session(drafter, i, raw_rows(20 + i, 60), _coupled_if(i % 2)) for i in range(4)]
    first = drafter.step([s.work(PROMPT[i:], 7, 2 * i + 1) for i, s in enumerate(sessions)])
    second = drafter.step(
        [s.work([7, *d[:1]], 8, 7) for s, d in reversed([*zip(sessions, first, strict=True)])]
    )
    assert [*zip(first, reversed(second), strict=True)] == [own[:2] for own in alone]
    for i in range(4):
        assert torch.equal(logits[i], alone[i][2][0])
        assert torch.equal(logits[7 - i], alone[i][2][1])
    assert drafter.pass_count == 2


def _coupled_if(coupled: int) -> SessionParameters:
    sampling = DraftSampling.COUPLED if coupled else DraftSampling.ARGMAX
    return SessionParameters(temperature=0.9, seed=coupled, draft_sampling=sampling)


def test_d16_rows_that_no_window_reaches_change_nothing_however_the_prompt_came(
    tmp_path: Path,
) -> None:
    window = 5
    pair = make_pair(tmp_path, sliding_window=window, causal=False)
    pair = Pair(**{**vars(pair), "maths": {"windows": [window, window]}})
    rows = raw_rows(60, 90)
    prompt = [*PROMPT, *range(100, 160)]
    truth = pair.expected([*prompt, 7], rows, 7)
    drafter = pair.load()
    logits = recorded(drafter)
    whole = Session(drafter, 0, rows)
    assert whole.draft(prompt, 7, 7) == truth
    chunked = Session(drafter, 1, rows)
    for start in range(0, len(prompt), 16):
        chunked.draft(prompt[start : start + 16])
    assert chunked.draft([], 7, 7) == truth
    other = rows.clone()
    other[: len(prompt) - window] = raw_rows(61, len(prompt) - window)
    assert Session(drafter, 2, other).draft(prompt, 7, 7) == truth
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    other[len(prompt) - window] = 1.0
    assert Session(drafter, 3, other).draft(prompt, 7, 7) is not None
    assert not torch.equal(logits[0], logits[3]), "the last that the window reaches"


def test_d11_a_longer_prompt_in_a_slot_that_was_released_early_is_as_in_a_fresh_process(
    pair: Pair,
) -> None:
    drafter, fresh = pair.load(), pair.load()
    first = Session(drafter, 2, raw_rows(40, 90))
    drafts = first.draft(PROMPT, 7, 7)
    first.draft([7, *drafts], 8, 7)  # drafts are out, and the session ends
    drafter.release(2)
    logits = [recorded(drafter), recorded(fresh)]
    rows = raw_rows(40, 90)  # the same text, and more of it
    longer = [*PROMPT, 7, *drafts, 33, 34]
    used, other = Session(drafter, 2, rows), Session(fresh, 2, rows)
    for ids, pending in ((longer, 7), ([7], 8), ([8, 12, 13], 9)):
        assert used.draft(ids, pending, 7) == other.draft(ids, pending, 7)
    assert len(logits[0]) == 3
    assert all(map(torch.equal, *logits))


def test_d9_a_session_drafts_to_the_very_end_of_its_context(pair: Pair) -> None:
    rows = raw_rows(50, 16)
    session = Session(pair.load(max_context_length=16), 0, rows)
    session.draft(range(3, 12))
    pending = 12
    for bonus in range(110, 117):
        drafts = session.draft([pending], bonus, 7)
        pending = bonus
        assert drafts == pair.expected([*session.tokens, pending], rows, 7)
    assert len(session.tokens) == 16


def test_a_block_without_any_context_drafts_from_its_pending_token(pair: Pair) -> None:
    rows = raw_rows(51, 16)
    assert Session(pair.load(), 0, rows).draft([], 7, 7) == pair.expected([7], rows, 7)


def test_a_block_shorter_than_the_trained_one_drafts_what_a_block_of_its_length_does(
    pair: Pair,
) -> None:
    rows = raw_rows(52, 16)
    drafter = pair.load(block_length=4)
    assert drafter.info.max_draft_count == 3
    drafts = Session(drafter, 0, rows).draft(PROMPT, 7, 3)
    assert drafts == pair.expected([*PROMPT, 7], rows, 3, block_length=4)
    logits = recorded(drafter), recorded(whole := pair.load())
    for one in (drafter, whole):
        Session(one, 1, rows).draft(PROMPT, 7, 3)
    assert not torch.allclose(logits[0][0], logits[1][0]), "slots see fewer masks"
