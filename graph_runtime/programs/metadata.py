"""What a program says about itself: one constant method a key.

Everything the engine needs besides weights is in the `.pte`; a key that is missing is a load error
that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from splitspec.errors import UserError

if TYPE_CHECKING:
    from executorch.runtime import Program

FORMAT_VERSION = 2
"""Of a target. Raised when the methods' arguments or meaning change; part of the cache key."""
EAGLE3_FORMAT_VERSION = 2
"""The same, of an EAGLE-3 draft."""
DFLASH_FORMAT_VERSION = 1
"""The same, of a DFlash draft."""
DRAFT_PRECISIONS = ("fp32", "8da8w", "8da4w")
"""Of a draft's program, whatever its method."""


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The constant methods of a program, without their prefix `get_`. A kind adds its own."""

    format_version: int

    def constant_methods(self) -> dict[str, Any]:
        """Return what the exporter stores, by method name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            f"get_{name}": list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }


@dataclass(frozen=True, kw_only=True)
class ProgramMetadata(Metadata):
    """What a target's program says."""

    model_hash: str
    precision: str
    max_seq_len: int
    """KV positions of one session."""
    max_capacity: int
    """Largest C of a cache [n_kv_heads, C, 1, D] handed to `step`."""
    vocab_size: int
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    min_prefill_chunk: int
    max_prefill_chunk: int
    max_step_rows: int
    """Largest N of `step`; its smallest is 2."""
    max_head_rows: int
    """Largest M of `head`; its smallest is 2."""
    tap_layers: tuple[int, ...]
    row_width: int
    windows: tuple[int, ...]
    """Sliding windows, one mask each in this order; 0 is none."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Metadata(Metadata):
    """What an EAGLE-3 draft's program says."""

    draft_hash: str
    """SHA-256 of the checkpoint's files."""
    target_hash: str
    """Of the target that was given to fill what the checkpoint lacks; "" is none."""
    precision: str
    max_seq_len: int
    """KV positions of one session."""
    max_capacity: int
    """Largest C of a cache [n_kv_heads, C, 1, D] handed to `attend`."""
    vocab_size: int
    draft_vocab_size: int
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_enter_rows: int
    """Largest N of `enter` and `attend`; the smallest of `enter` is 2."""
    max_leave_rows: int
    """Largest M of `leave` and `head`; its smallest is 2."""
    sliding_window: int
    """Slots, its own included, that a slot attends to; 0 is all."""


@dataclass(frozen=True, kw_only=True)
class DFlashMetadata(Metadata):
    """What a DFlash draft's program says."""

    draft_hash: str
    """SHA-256 of the checkpoint's files."""
    target_hash: str
    """Of the target that was given to fill what the checkpoint lacks; "" is none."""
    precision: str
    max_seq_len: int
    """Context positions of one session."""
    max_capacity: int
    """Largest C of a cache [n_kv_heads, C, 1, D] handed to `block`."""
    vocab_size: int
    draft_vocab_size: int
    n_draft_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    tap_layers: tuple[int, ...]
    """0-based layer outputs of the target that a raw row is made of."""
    mask_token_id: int
    block_size: int
    """Slots of a block as the draft was trained."""
    block_length: int
    """B: slots of a block here, all of which `block` takes."""
    first_draft_slot: int
    """Slot of the block whose output is d1."""
    draft_sliding_window: int
    """Context positions that the layers with a window see; 0: no layer has one."""
    mask_windows: tuple[int, ...]
    """The window of each mask of `block`, in their order; 0 is none."""
    mask_causal: tuple[int, ...]
    """Of each mask: 1 where it hides a slot's later slots, [1, group * B, C]; else 0, [1, 1, C]."""
    final_softcap: float
    """Cap of the logits, which `head` leaves to its caller; 0 is none."""
    max_context_rows: int
    """Largest N of `context`; its smallest is 2."""
    max_head_rows: int
    """Largest M of `head`; its smallest is 2."""

    @property
    def n_layers(self) -> int:
        """Return how many layers have a cache."""
        return self.n_draft_layers


def check_values(metadata: Metadata, path: Path, wanted: Mapping[str, object]) -> None:
    """Refuse a program of another model, precision or shape.

    Args:
        metadata: what the program says.
        path: where it lies.
        wanted: by metadata key.

    Raises:
        UserError: names both values.
    """
    for key, value in wanted.items():
        found = getattr(metadata, key)
        if found != value:
            name = key.replace("_", " ")
            raise UserError(
                f"program {path} has {name} {found or 'none'}; expected {value or 'none'}"
            )


def read_metadata(program: Program, path: Path) -> ProgramMetadata:
    """Read every key of the loaded target's `program` that lies at `path`; see `read_keys`."""
    return read_keys(ProgramMetadata, program, path)


AnyMetadata = TypeVar("AnyMetadata")


def read_keys(kind: type[AnyMetadata], program: Program, path: Path) -> AnyMetadata:
    """Read every key of the dataclass `kind` of the loaded `program` that lies at `path`.

    Raises:
        UserError: a key is missing, named; or a value is not of its type.
    """
    values: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        method = f"get_{field.name}"
        if method not in program.method_names:
            raise UserError(
                f"program {path} lacks the metadata key {method}: export it again, if it is of "
                "this kind"
            )
        loaded = program.load_method(method)
        assert loaded is not None, method
        found = list(loaded.execute([]))
        values[field.name] = _typed(found, str(field.type), method, path)
    return kind(**values)


def _typed(found: list[Any], wanted: str, method: str, path: Path) -> Any:
    if wanted.startswith("tuple"):
        kind: type = int
        value: Any = tuple(found)
    else:
        kind = {"int": int, "float": float, "str": str}[wanted]
        value = found[0] if len(found) == 1 else None
    elements = value if isinstance(value, tuple) else (value,)
    if not all(type(element) is kind for element in elements):
        raise UserError(f"program {path}: {method} is {value!r}; expected {wanted}")
    return value
