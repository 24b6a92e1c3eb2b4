"""What a draft has to know of its target, which may be of a family that the decoder cannot run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from graph_runtime.architecture import MOST, read_config
from graph_runtime.config_values import boolean, integer, number, read_config_object, refused
from graph_runtime.drafts.keys import is_given, size
from splitspec.errors import UserError

_GEMMA = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_SOFTCAP = "final_logit_softcapping"
_DEFAULT_SOFTCAPS = {"gemma2": 30.0}
"""What `transformers` caps with where config.json has no such key; null is no cap."""
_TARGET_HIDDEN_SIZE = "target_hidden_size"


class TargetSizes(Protocol):
    """The sizes of a target that every draft is checked against."""

    @property
    def hidden_size(self) -> int:
        """Return Ht."""
        ...

    @property
    def n_layers(self) -> int:
        """Return the number of layers, each of which may be a tap."""
        ...

    @property
    def vocab_size(self) -> int:
        """Return V."""
        ...


@dataclass(frozen=True, kw_only=True)
class DraftTarget:
    """A target, as far as its draft computes with its embedding and head."""

    hidden_size: int
    n_layers: int
    vocab_size: int
    tied: bool
    """The head is the embedding."""
    embedding_scale: float = 1.0
    """What embedded tokens are multiplied by."""
    final_softcap: float | None = None
    """Logits become cap * tanh(logits / cap); None: they stay."""


@contextmanager
def reading_target(folder: Path) -> Iterator[None]:
    """Say in every error that it is about the target in `folder`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"target {folder}: {error}") from error


def read_target(folder: Path) -> DraftTarget:
    """Read what a draft needs of the target in `folder`.

    Raises:
        UserError: no readable config.json, or a family that is unknown or broken, named.
    """
    with reading_target(folder):
        content = read_config_object(folder / "config.json")
        family = content.get("model_type")
        if isinstance(family, str) and family in _GEMMA:
            return _gemma(content, family)
        config = read_config(folder)
    return DraftTarget(
        hidden_size=config.hidden_size,
        n_layers=config.n_layers,
        vocab_size=config.vocab_size,
        tied=config.tied,
    )


def target_hidden_size(top: Mapping[str, Any], hidden: int, target: TargetSizes | None) -> int:
    """Return Ht: the target's, else what the draft's file states, else the draft's own width.

    Raises:
        UserError: what the file states is no size, or not the target's.
    """
    width = hidden if target is None else target.hidden_size
    if not is_given(top, _TARGET_HIDDEN_SIZE):
        return width
    stated = integer(top, _TARGET_HIDDEN_SIZE, least=1, most=MOST["hidden_size"])
    if target is not None and stated != width:
        raise UserError(
            f"config.json: {_TARGET_HIDDEN_SIZE} is {stated}; the target's hidden_size is {width}"
        )
    return stated


def check_target_layers(key: str, stated: object, target: TargetSizes | None) -> None:
    """Refuse a target with another number of layers than a draft's file states.

    Raises:
        UserError: names the key and both numbers.
    """
    if target is not None and stated is not None and stated != target.n_layers:
        raise refused(key, stated, f"the target's {target.n_layers}")


def _gemma(content: Mapping[str, Any], family: str) -> DraftTarget:
    names = content.get("architectures")
    if names not in (None, [_GEMMA[family]]):
        raise refused("architectures", names, f"['{_GEMMA[family]}']")
    hidden = size(content, "hidden_size")
    cap = None
    if family != "gemma" and content.get(_SOFTCAP, _DEFAULT_SOFTCAPS.get(family)) is not None:
        cap = number({_SOFTCAP: _DEFAULT_SOFTCAPS.get(family), **content}, _SOFTCAP)
    return DraftTarget(
        hidden_size=hidden,
        n_layers=size(content, "num_hidden_layers"),
        vocab_size=size(content, "vocab_size"),
        tied=boolean(content, "tie_word_embeddings", default=True),
        embedding_scale=math.sqrt(hidden),
        final_softcap=cap,
    )
