"""The kinds of programs there are, and what the exporter's process does for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graph_runtime.programs import (
    dflash_export,
    eagle3_export,
    speculator_export,
    target_export,
)
from graph_runtime.programs.export import (
    ProgramKey,
    Report,
    Source,
    cannot_write,
    write_program,
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of program."""

    key: type[ProgramKey]
    build: Callable[[Any, Source, Report], bytes]
    """Returns the `.pte` that a key describes; raises UserError for what is wrong with a model."""


KINDS = {
    target_export.TargetKey.kind: Kind(key=target_export.TargetKey, build=target_export.build),
    eagle3_export.Eagle3Key.kind: Kind(key=eagle3_export.Eagle3Key, build=eagle3_export.build),
    dflash_export.DFlashKey.kind: Kind(key=dflash_export.DFlashKey, build=dflash_export.build),
    speculator_export.SpeculatorKey.kind: Kind(
        key=speculator_export.SpeculatorKey, build=speculator_export.build
    ),
}
"""By `ProgramKey.kind`."""


def read_key(kind: str, values: Mapping[str, Any]) -> ProgramKey:
    """Return the key of `kind` that was written as the JSON object `values`."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return KINDS[kind].key(**fields)


def export_here(source: Source, path: Path, key: ProgramKey, report: Report) -> None:
    """Export in this process and write the program to `path`.

    Args:
        source: what the kind's `build` reads.
        path: where the program goes.
        key: what to export.
        report: is told of each phase.

    Raises:
        UserError: the weights cannot be read, do not fit the precision, or the disk is full.
    """
    data = KINDS[key.kind].build(key, source, report)
    try:
        write_program(path, data)
    except OSError as error:
        raise cannot_write(path, error) from error
