"""Which peers fit: a verifier with our model folder, a drafter with the verifier.

A pair that does not fit would produce wrong drafts at best; it is refused, naming the field and
both values. At start that ends the coordinator. Later it does not: a drafter that does not fit is
done without, like one that is lost.
"""

from __future__ import annotations

from typing import Any

from splitspec import PROTOCOL_VERSION
from splitspec.errors import ModelMismatch, NotReady
from splitspec.v1 import drafter_pb2, rows_pb2, verifier_pb2

PINNED = (
    "model_hash",
    "tokenizer_hash",
    "vocab_size",
    "precision",
    "runtime",
    "tap_layers",
    "fused_model_hash",
    "row_layouts",
    "max_context_length",
)
"""What may not change while requests run: a replay must continue the same text (L4), and the rows
must stay those for which the drafter was accepted, since that is not asked again."""


class VerifierCheck:
    """Accepts a verifier that has our tokenizer, and after the first one only its equals."""

    def __init__(self, *, tokenizer_hash: str) -> None:
        self._tokenizer_hash = tokenizer_hash
        self.model: verifier_pb2.VerifierGetModelResponse | None = None

    def __call__(self, model: verifier_pb2.VerifierGetModelResponse) -> None:
        """Accept `model` or raise ModelMismatch."""
        _equal("protocol_version", "verifier", model.protocol_version, PROTOCOL_VERSION)
        _equal("tokenizer_hash", "verifier", model.tokenizer_hash, self._tokenizer_hash)
        if self.model is not None:
            for field in PINNED:
                _equal(
                    field, "verifier", getattr(model, field), getattr(self.model, field), "before"
                )
        self.model = model


class DrafterCheck:
    """Accepts a drafter that fits the verifier that is known."""

    def __init__(self, verifier: VerifierCheck) -> None:
        self._verifier = verifier

    def __call__(self, drafter: drafter_pb2.DrafterGetModelResponse) -> None:
        """Accept `drafter` or raise ModelMismatch; NotReady while no verifier has been seen."""
        target = self._verifier.model
        if target is None:
            raise NotReady("the verifier is not known yet")
        check_pair(drafter, target)


def check_pair(
    drafter: drafter_pb2.DrafterGetModelResponse, target: verifier_pb2.VerifierGetModelResponse
) -> None:
    """Raise ModelMismatch unless `drafter` can draft for `target`."""

    def equal(field: str, ours: Any, theirs: Any) -> None:
        _equal(field, "drafter", ours, theirs, "verifier")

    equal("protocol_version", drafter.protocol_version, PROTOCOL_VERSION)
    if drafter.HasField("vocab_size"):
        equal("vocab_size", drafter.vocab_size, target.vocab_size)
    if drafter.HasField("tokenizer_hash"):
        equal("tokenizer_hash", drafter.tokenizer_hash, target.tokenizer_hash)
    if drafter.HasField("target_model_hash"):
        equal("target_model_hash", drafter.target_model_hash, target.model_hash)
    if drafter.row_kind == rows_pb2.ROW_KIND_NONE:
        return
    layouts = {layout.kind: layout for layout in target.row_layouts}
    kinds = rows_pb2.RowKind
    if drafter.row_kind not in layouts:
        offered = ", ".join(_name(kinds, kind) for kind in layouts)
        equal("row_kind", _name(kinds, drafter.row_kind), offered or "none")
    layout = layouts[drafter.row_kind]
    equal("tap_layers", drafter.tap_layers, target.tap_layers)
    if drafter.row_kind == rows_pb2.ROW_KIND_FUSED:
        # Another draft's projection has the same width, and its rows would be silently wrong.
        equal("fused_model_hash", drafter.model_hash, target.fused_model_hash)
    equal("row_width", drafter.row_width, layout.width)
    dtypes = rows_pb2.RowDtype
    equal("row_dtype", _name(dtypes, drafter.row_dtype), _name(dtypes, layout.dtype))


def _name(enum: Any, value: int) -> str:
    """Return the name of an enum value; a peer may send one that this version does not know."""
    return enum.Name(value) if value in enum.values() else str(value)


def _equal(field: str, peer: str, value: Any, wanted: Any, whose: str = "coordinator") -> None:
    if value != wanted:
        shown, expected = _shown(value), _shown(wanted)
        mend = f"; {_MENDS[field]}" if whose == "verifier" and field in _MENDS else ""
        raise ModelMismatch(
            f"{field}: the {peer} has {shown}, {_OWNER[whose]} {expected}{mend}",
            field=field,
            value=shown,
            expected=expected,
        )


_MENDS = {
    "row_kind": "give the verifier --fuse-for, or the drafter --rows raw",
    "fused_model_hash": "give the verifier --fuse-for with the drafter's --draft-model",
    "tap_layers": "give the verifier --tap-layers or --fuse-for",
    "row_dtype": "give the drafter --row-dtype",
}
_OWNER = {
    "coordinator": "the coordinator",
    "verifier": "the verifier",
    "before": "the one before had",
}


def _shown(value: Any) -> str:
    if isinstance(value, (str, int)):
        return str(value) or "none"
    return str([_layout(x) if isinstance(x, verifier_pb2.RowLayout) else x for x in value])


def _layout(layout: verifier_pb2.RowLayout) -> str:
    kind, dtype = _name(rows_pb2.RowKind, layout.kind), _name(rows_pb2.RowDtype, layout.dtype)
    return f"{kind} {layout.width} {dtype}" if layout.width else kind
