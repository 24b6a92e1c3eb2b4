"""Messages in, items out: what is missing, out of range or unknown is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from graph_runtime.choice import Sampling
from splitspec.errors import InvalidArgument
from splitspec.rows import RowFormat
from splitspec.v1 import rows_pb2, sampling_pb2
from splitspec.v1 import verifier_pb2 as pb
from verifier_service.decoding import decode_items, decode_sampling, encode_results
from verifier_service.steps import (
    Committed,
    ForkItem,
    ItemResult,
    OpenItem,
    PrefillItem,
    PrefillOutcome,
    RefusedItem,
    ReleaseItem,
    VerifyItem,
    VerifyOutcome,
)

RAW = rows_pb2.ROW_KIND_RAW_TAPS
FORMAT = RowFormat(kind=RAW, dtype=rows_pb2.ROW_DTYPE_FLOAT32, width=2)
UNKNOWN = b"\x9a\x3f\x01x"  # field 1011, length-delimited


def opened(**sampling: Any) -> pb.OpenSession:
    return pb.OpenSession(sampling=sampling_pb2.SamplingParameters(**sampling), row_kind=RAW)


def with_unknown(message: Any) -> Any:
    message.MergeFromString(UNKNOWN)
    return message


def refusal(item: pb.VerifyItem) -> InvalidArgument:
    (decoded,) = decode_items([item])
    assert isinstance(decoded, RefusedItem)
    assert decoded.session_id == item.session
    assert isinstance(decoded.error, InvalidArgument)
    return decoded.error


def test_every_action_becomes_its_item() -> None:
    fork = pb.ForkSession(source_session=1, length=0, open=opened())
    verify = pb.VerifyWindow(pending_token_id=0, draft_token_ids=[4, 5])
    decoded = decode_items(
        [
            pb.VerifyItem(
                session=1, committed_length=0, open=opened(temperature=0.5, top_k=3, seed=2**64 - 1)
            ),
            pb.VerifyItem(session=2, committed_length=0, fork=fork),
            pb.VerifyItem(
                session=3, committed_length=7, prefill=pb.PrefillChunk(token_ids=[1], final=True)
            ),
            pb.VerifyItem(session=4, committed_length=8, verify=verify),
            pb.VerifyItem(session=5, release=pb.ReleaseSession()),
        ]
    )
    assert decoded == [
        OpenItem(
            session_id=1,
            sampling=Sampling(temperature=0.5, top_k=3, seed=2**64 - 1),
            row_kind=RAW,
        ),
        ForkItem(session_id=2, source_session_id=1, length=0, sampling=Sampling(), row_kind=RAW),
        PrefillItem(session_id=3, committed_length=7, token_ids=[1], final=True),
        VerifyItem(session_id=4, committed_length=8, pending_token_id=0, draft_token_ids=[4, 5]),
        ReleaseItem(session_id=5),
    ]


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (pb.VerifyItem(committed_length=0, open=opened()), "session"),
        (pb.VerifyItem(session=1, committed_length=0), "action"),
        (pb.VerifyItem(session=1), "committed_length"),
        (pb.VerifyItem(session=1, open=opened()), "committed_length"),
        (pb.VerifyItem(session=1, committed_length=3, open=opened()), "committed_length"),
        (
            pb.VerifyItem(session=1, committed_length=3, fork=pb.ForkSession(length=3)),
            "committed_length",
        ),
        (pb.VerifyItem(session=1, committed_length=0, fork=pb.ForkSession()), "fork.length"),
        (
            pb.VerifyItem(session=1, committed_length=0, verify=pb.VerifyWindow()),
            "verify.pending_token_id",
        ),
        (with_unknown(pb.VerifyItem(session=1, committed_length=0, open=opened())), "item"),
        (
            pb.VerifyItem(session=1, committed_length=0, open=with_unknown(opened())),
            "open",
        ),
        (
            pb.VerifyItem(
                session=1,
                committed_length=0,
                verify=with_unknown(pb.VerifyWindow(pending_token_id=1)),
            ),
            "verify",
        ),
        (
            pb.VerifyItem(session=1, committed_length=0, prefill=with_unknown(pb.PrefillChunk())),
            "prefill",
        ),
        (
            pb.VerifyItem(session=1, committed_length=0, fork=with_unknown(pb.ForkSession())),
            "fork",
        ),
        (pb.VerifyItem(session=1, release=with_unknown(pb.ReleaseSession())), "release"),
    ],
)
def test_what_is_missing_or_unknown_is_refused_by_name(item: pb.VerifyItem, field: str) -> None:
    assert refusal(item).metadata["field"] == field


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf, "seed": 1}, "temperature"),
        ({"temperature": 0.5}, "seed"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"frequency_penalty": 0.0}, "frequency_penalty"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"repetition_penalty": 1.0}, "repetition_penalty"),
        ({"logit_bias": {1: 2.0}}, "logit_bias"),
        ({"grammar": ""}, "grammar"),
        ({"min_tokens": 0}, "min_tokens"),
    ],
)
def test_a_sampling_parameter_is_honoured_or_refused_and_never_ignored(
    sampling: dict[str, Any], field: str
) -> None:
    error = refusal(pb.VerifyItem(session=1, committed_length=0, open=opened(**sampling)))
    assert error.metadata["field"] == f"sampling.{field}"


def test_an_unknown_sampling_field_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="unknown field 1011"):
        decode_sampling(with_unknown(sampling_pb2.SamplingParameters()))


def test_absent_sampling_is_greedy_and_absent_fields_keep_everything() -> None:
    assert decode_sampling(sampling_pb2.SamplingParameters()) == Sampling(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0
    )


def encoded(*results: ItemResult) -> list[pb.VerifyItemResult]:
    response = pb.VerifierRunStepsResponse()
    encode_results(response, results)
    return list(response.results)


def test_results_carry_rows_zero_values_and_errors() -> None:
    rows = Committed(row_format=FORMAT, start=3, data=bytes(16))
    verify, prefill, plain, failed = encoded(
        ItemResult(
            session_id=1,
            committed_length=5,
            outcome=VerifyOutcome(accepted_count=0, bonus_token_id=0, rows=None),
        ),
        ItemResult(
            session_id=2,
            committed_length=5,
            outcome=PrefillOutcome(bonus_token_id=0, rows=rows),
        ),
        ItemResult(session_id=3),
        ItemResult(session_id=4, error=InvalidArgument.of("top_k", 1, "2")),
    )
    assert verify.WhichOneof("result") == "verify"
    assert not verify.verify.HasField("rows")
    assert prefill.prefill.HasField("bonus_token_id")
    assert (prefill.prefill.rows.start, prefill.prefill.rows.count) == (3, 2)
    assert plain.WhichOneof("result") is None
    assert (failed.error.code, failed.error.reason) == (3, "INVALID_ARGUMENT")
    assert failed.error.metadata["field"] == "top_k"


def test_an_inner_chunk_has_no_bonus() -> None:
    (result,) = encoded(
        ItemResult(session_id=1, outcome=PrefillOutcome(bonus_token_id=None, rows=None))
    )
    assert result.WhichOneof("result") == "prefill"
    assert not result.prefill.HasField("bonus_token_id")
