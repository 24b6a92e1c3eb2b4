"""What a speculator program says about itself: one constant method a key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graph_runtime.programs.metadata import Metadata, read_keys
from splitspec.errors import UserError

if TYPE_CHECKING:
    from executorch.runtime import Program

SPECULATOR_FORMAT_VERSION = 2
"""Raised when the methods' arguments or meaning change; part of the cache key."""
MAX_CHAIN = 7
"""A verify runs at most 8 rows: it costs little more than one row up to there."""
_PROPERTIES = {
    "use_kv_cache": True,
    "use_sdpa_with_kv_cache": False,
    "enable_dynamic_shape": True,
}
"""Keys that runners of language models look for; the same for every speculator."""


@dataclass(frozen=True, kw_only=True)
class SpeculatorMetadata(Metadata):
    """What a speculator says."""

    model_hash: str
    """Of the target."""
    draft_model_hash: str
    tokenizer_hash: str
    precision: str
    """Of the target."""
    draft_precision: str
    max_seq_len: int
    """Positions of the session, [0, max_seq_len)."""
    vocab_size: int
    draft_vocab_size: int
    n_layers: int
    """Of the target."""
    hidden_size: int
    """H: width of a feature."""
    chain_len: int
    """K: `target_verify` takes K + 1 tokens."""
    min_prefill_chunk: int
    max_prefill_chunk: int

    def constant_methods(self) -> dict[str, Any]:
        """Return what the exporter stores, by method name."""
        return {**super().constant_methods(), **_PROPERTIES}


def read_speculator_metadata(program: Program, path: Path) -> SpeculatorMetadata:
    """Read every key of the loaded `program` that lies at `path`.

    Raises:
        UserError: a key is missing, named; or its value is none that a speculator has.
    """
    metadata = read_keys(SpeculatorMetadata, program, path)
    for name, least, most in (
        ("format_version", SPECULATOR_FORMAT_VERSION, SPECULATOR_FORMAT_VERSION),
        ("chain_len", 1, MAX_CHAIN),
        ("max_prefill_chunk", 1, metadata.max_seq_len - 1),
        ("min_prefill_chunk", 1, metadata.max_prefill_chunk),
    ):
        value = getattr(metadata, name)
        if not least <= value <= most:
            raise UserError(
                f"program {path}: get_{name} is {value}; expected {least} to {most}: "
                "export it again"
            )
    return metadata
