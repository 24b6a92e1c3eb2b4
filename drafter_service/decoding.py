"""From messages to the engine's items and back. Everything a peer can send is checked here or in
the engine; nothing that is not understood is ignored."""

from __future__ import annotations

from collections.abc import Sequence

from drafter_service.drafter import DrafterInfo, DraftSampling, SessionParameters
from drafter_service.engine import (
    DraftItem,
    Item,
    ItemResult,
    OpenItem,
    RefusedItem,
    ReleaseItem,
)
from splitspec import PROTOCOL_VERSION
from splitspec.checks import check_sampling, refuse_unknown, require_seed, top_p_of
from splitspec.errors import InvalidArgument, SplitspecError
from splitspec.rows import check_rows
from splitspec.v1 import drafter_pb2
from splitspec.wire_errors import item_error

TOKEN_ID_LIMIT = 2**31
"""Where the draft does not know the vocabulary: no model's ids reach 2^31, negative ones do."""

_DRAFT_SAMPLINGS = {
    drafter_pb2.DRAFT_SAMPLING_UNSPECIFIED: DraftSampling.METHOD_DEFAULT,
    drafter_pb2.DRAFT_SAMPLING_ARGMAX: DraftSampling.ARGMAX,
    drafter_pb2.DRAFT_SAMPLING_COUPLED: DraftSampling.COUPLED,
}


def decode_items(items: Sequence[drafter_pb2.DraftItem], info: DrafterInfo) -> list[Item]:
    """Return one engine item each; what cannot be decoded becomes a `RefusedItem`."""
    return [_decode(item, info) for item in items]


def _decode(item: drafter_pb2.DraftItem, info: DrafterInfo) -> Item:
    try:
        return _decode_action(item, info)
    except SplitspecError as error:
        return RefusedItem(session_id=item.session, error=error)


def _decode_action(item: drafter_pb2.DraftItem, info: DrafterInfo) -> Item:
    if item.session == 0:
        raise InvalidArgument.of("session", 0, "a number that is not 0")
    refuse_unknown("item", item)
    action = item.WhichOneof("action")
    if action == "release":  # whatever lengths the peers believe: they end with the session
        refuse_unknown("release", item.release)
        return ReleaseItem(session_id=item.session)
    if not item.HasField("context_length"):
        raise InvalidArgument.of("context_length", "not set", "the length the sender believes")
    if action == "draft":
        return _decode_draft(item, info)
    if action == "open":
        if item.context_length:
            raise InvalidArgument.of("context_length", item.context_length, "0 for open")
        return OpenItem(session_id=item.session, parameters=_decode_parameters(item.open))
    raise InvalidArgument.of("action", action, "open, draft or release")


def _decode_draft(item: drafter_pb2.DraftItem, info: DrafterInfo) -> DraftItem:
    draft = item.draft
    refuse_unknown("draft", draft)
    limit = info.vocab_size or TOKEN_ID_LIMIT
    token_ids = list(draft.token_ids)
    _check_ids("draft.token_ids", token_ids, limit)
    pending = draft.pending_token_id if draft.HasField("pending_token_id") else None
    if pending is not None:
        _check_ids("draft.pending_token_id", [pending], limit)
    if draft.draft_count > info.max_draft_count:
        raise InvalidArgument.of(
            "draft.draft_count", draft.draft_count, f"0..{info.max_draft_count}"
        )
    if draft.draft_count and pending is None:
        raise InvalidArgument.of("draft.pending_token_id", "not set", "the pending token's id")
    return DraftItem(
        session_id=item.session,
        context_length=item.context_length,
        token_ids=token_ids,
        rows=_decode_rows(item, info),
        pending_token_id=pending,
        draft_count=draft.draft_count,
    )


def _decode_rows(item: drafter_pb2.DraftItem, info: DrafterInfo) -> bytes | None:
    """Return the rows' bytes, checked against the positions and tokens they come with."""
    draft = item.draft
    count = len(draft.token_ids)
    if count == 0 or info.row_format.row_bytes == 0:
        if draft.HasField("rows"):
            wanted = "absent" if count else "absent without token ids"
            raise InvalidArgument.of("draft.rows", f"{draft.rows.count} rows", wanted)
        return None
    if not draft.HasField("rows"):
        raise InvalidArgument.of("draft.rows", "not set", f"{count} rows")
    refuse_unknown("draft.rows", draft.rows)
    return check_rows(draft.rows, info.row_format, item.context_length, count)


def _decode_parameters(opened: drafter_pb2.OpenDraftSession) -> SessionParameters:
    refuse_unknown("open", opened)
    if opened.draft_sampling not in _DRAFT_SAMPLINGS:
        raise InvalidArgument.of("open.draft_sampling", opened.draft_sampling, "0..2")
    sampling = opened.sampling
    check_sampling(sampling)
    require_seed(sampling)
    return SessionParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=top_p_of(sampling),
        min_p=sampling.min_p,
        seed=sampling.seed,
        draft_sampling=_DRAFT_SAMPLINGS[opened.draft_sampling],
    )


def _check_ids(field: str, token_ids: Sequence[int], limit: int) -> None:
    if token_ids and max(token_ids) >= limit:
        first = next(token_id for token_id in token_ids if token_id >= limit)
        raise InvalidArgument.of(field, first, f"ids in [0, {limit})")


def encode_results(results: Sequence[ItemResult]) -> list[drafter_pb2.DraftItemResult]:
    """Return the wire form of `results`."""
    encoded = []
    for result in results:
        message = drafter_pb2.DraftItemResult(
            session=result.session_id, context_length=result.context_length
        )
        if result.error is not None:
            message.error.CopyFrom(item_error(result.error))
        elif result.draft_token_ids is not None:
            message.draft.draft_token_ids.extend(result.draft_token_ids)
            message.draft.SetInParent()
        encoded.append(message)
    return encoded


def encode_info(info: DrafterInfo) -> drafter_pb2.DrafterGetModelResponse:
    """Return the handshake."""
    return drafter_pb2.DrafterGetModelResponse(
        protocol_version=PROTOCOL_VERSION,
        method=info.method,
        model_id=info.model_id,
        model_hash=info.model_hash,
        vocab_size=info.vocab_size,
        tokenizer_hash=info.tokenizer_hash,
        target_model_hash=info.target_model_hash,
        row_kind=info.row_format.kind,
        row_width=info.row_format.width,
        row_dtype=info.row_format.dtype,
        tap_layers=info.tap_layers,
        max_draft_count=info.max_draft_count,
        max_context_length=info.max_context_length,
        slot_count=info.slot_count,
    )
