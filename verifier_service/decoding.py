"""From messages to the engine's items and back.

Everything that a peer can send is checked here or in the engine, and what is not understood is
refused: a parameter is never ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graph_runtime.choice import Sampling
from splitspec import PROTOCOL_VERSION
from splitspec.checks import check_sampling, refuse_unknown, require_seed, top_p_of
from splitspec.errors import InvalidArgument, SplitspecError
from splitspec.rows import fill_rows
from splitspec.v1 import rows_pb2, sampling_pb2
from splitspec.v1 import verifier_pb2 as pb
from splitspec.wire_errors import item_error
from verifier_service.steps import (
    Committed,
    EngineModel,
    ForkItem,
    Item,
    ItemResult,
    OpenItem,
    PrefillItem,
    RefusedItem,
    ReleaseItem,
    VerifyItem,
    VerifyOutcome,
)


def decode_items(items: Sequence[pb.VerifyItem]) -> list[Item]:
    """Return one engine item each; what cannot be decoded becomes a `RefusedItem`."""
    return [_decode(item) for item in items]


def _decode(item: pb.VerifyItem) -> Item:
    try:
        return _decode_action(item)
    except SplitspecError as error:
        return RefusedItem(session_id=item.session, error=error)


def _decode_action(item: pb.VerifyItem) -> Item:
    session_id = item.session
    if session_id == 0:
        raise InvalidArgument.of("session", 0, "a number that is not 0")
    refuse_unknown("item", item)
    action = item.WhichOneof("action")
    if action == "release":
        refuse_unknown("release", item.release)
        return ReleaseItem(session_id=session_id)
    _require(item, "committed_length", "the length the sender believes")
    match action:
        case "verify":
            return _decode_verify(item)
        case "prefill":
            refuse_unknown("prefill", item.prefill)
            return PrefillItem(
                session_id=session_id,
                committed_length=item.committed_length,
                token_ids=item.prefill.token_ids,
                final=item.prefill.final,
            )
        case "open" | "fork":
            if item.committed_length:
                raise InvalidArgument.of(
                    "committed_length", item.committed_length, f"0 for {action}"
                )
            return _decode_open(item) if action == "open" else _decode_fork(item)
    raise InvalidArgument.of("action", "not set", "open, prefill, verify, fork or release")


def _decode_verify(item: pb.VerifyItem) -> VerifyItem:
    refuse_unknown("verify", item.verify)
    _require(item.verify, "pending_token_id", "the pending token's id", "verify.")
    return VerifyItem(
        session_id=item.session,
        committed_length=item.committed_length,
        pending_token_id=item.verify.pending_token_id,
        draft_token_ids=item.verify.draft_token_ids,
    )


def _decode_open(item: pb.VerifyItem) -> OpenItem:
    sampling, row_kind = _decode_parameters(item.open)
    return OpenItem(session_id=item.session, sampling=sampling, row_kind=row_kind)


def _decode_fork(item: pb.VerifyItem) -> ForkItem:
    fork = item.fork
    refuse_unknown("fork", fork)
    _require(fork, "length", "the positions to copy", "fork.")
    sampling, row_kind = _decode_parameters(fork.open)
    return ForkItem(
        session_id=item.session,
        source_session_id=fork.source_session,
        length=fork.length,
        sampling=sampling,
        row_kind=row_kind,
    )


def _decode_parameters(opened: pb.OpenSession) -> tuple[Sampling, int]:
    refuse_unknown("open", opened)
    return decode_sampling(opened.sampling), opened.row_kind


def decode_sampling(message: sampling_pb2.SamplingParameters) -> Sampling:
    """Return the parameters of a session.

    Raises:
        InvalidArgument: a value out of range, a parameter that is not implemented or not known, or
            no seed where noise needs one.
    """
    check_sampling(message)
    require_seed(message)
    return Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=top_p_of(message),
        min_p=message.min_p,
        seed=message.seed,
    )


def _require(message: Any, field: str, expected: str, prefix: str = "") -> None:
    if not message.HasField(field):
        raise InvalidArgument.of(f"{prefix}{field}", "not set", expected)


def encode_results(response: pb.VerifierRunStepsResponse, results: Sequence[ItemResult]) -> None:
    """Append the wire form of `results` to `response`, in place: rows are copied once."""
    for result in results:
        message = response.results.add(
            session=result.session_id, committed_length=result.committed_length
        )
        outcome = result.outcome
        if result.error is not None:
            message.error.CopyFrom(item_error(result.error))
        elif isinstance(outcome, VerifyOutcome):
            message.verify.SetInParent()  # all of it may be zero
            message.verify.accepted_count = outcome.accepted_count
            message.verify.bonus_token_id = outcome.bonus_token_id
            if outcome.rows is not None:
                _fill(message.verify.rows, outcome.rows)
        elif outcome is not None:
            message.prefill.SetInParent()
            if outcome.bonus_token_id is not None:
                message.prefill.bonus_token_id = outcome.bonus_token_id
            if outcome.rows is not None:
                _fill(message.prefill.rows, outcome.rows)


def _fill(message: rows_pb2.Rows, rows: Committed) -> None:
    fill_rows(message, rows.row_format, rows.start, rows.data)


def encode_model(model: EngineModel) -> pb.VerifierGetModelResponse:
    """Return the handshake."""
    return pb.VerifierGetModelResponse(
        protocol_version=PROTOCOL_VERSION,
        model_id=model.model_id,
        model_hash=model.model_hash,
        tokenizer_hash=model.tokenizer_hash,
        vocab_size=model.vocab_size,
        tap_layers=model.tap_layers,
        row_layouts=[
            pb.RowLayout(kind=form.kind, width=form.width, dtype=form.dtype)
            for form in model.row_formats
        ],
        max_draft_count=model.max_draft_count,
        min_prefill_chunk=model.min_prefill_chunk,
        max_prefill_chunk=model.max_prefill_chunk,
        max_context_length=model.max_context_length,
        slot_count=model.slot_count,
        precision=model.precision,
        runtime=model.runtime,
        fused_model_hash=model.fused_model_hash,
    )
