"""A draft's projection of the target's taps: what a verifier needs of a draft of any method.

It stands above the methods, as it tells them apart. graph_runtime/drafts stands below them: what it
holds, both methods import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graph_runtime.checkpoint import stored_tensors
from graph_runtime.config_values import read_config_object
from graph_runtime.dflash.keys import read_keys as read_dflash_keys
from graph_runtime.dflash.layouts import find_layout as find_dflash_layout
from graph_runtime.dflash.layouts import is_dflash
from graph_runtime.dflash.load import load_fusion_module as load_dflash_fusion
from graph_runtime.dflash.taps import stated_tap_layers as stated_by_dflash
from graph_runtime.drafts.source import DraftSource
from graph_runtime.eagle3.checkpoint import Eagle3Source
from graph_runtime.eagle3.config_reader import read_keys as read_eagle3_keys
from graph_runtime.eagle3.layouts import find_layout as find_eagle3_layout
from graph_runtime.eagle3.load import load_fusion_module as load_eagle3_fusion
from graph_runtime.eagle3.taps import stated_tap_layers as stated_by_eagle3
from splitspec.errors import UserError


@dataclass(frozen=True, kw_only=True)
class RowProjection:
    """A draft's own projection of a raw row, applied where the taps are: one hidden width."""

    method: str
    """"eagle3" or "dflash"."""
    model_hash: str
    """Of the draft's files."""
    tap_layers: tuple[int, ...]
    """0-based layer outputs that it takes, ascending."""
    row_width: int
    """Elements of the raw row that it takes."""
    hidden_size: int
    """H: elements of a fused row."""
    fuse: Callable[[torch.Tensor], torch.Tensor]
    """[N, row_width] float32 -> [N, H] float32, on the target's device; a row's bits do not depend
    on N or on its place."""


def load_projection(
    folder: Path,
    *,
    target: Path,
    tap_layers: tuple[int, ...] | None,
    cache_dir: Path,
    device: str,
) -> RowProjection:
    """Load the projection of the draft in `folder`, whichever method's it is.

    Args:
        folder: the draft's checkpoint.
        target: the target's HF-layout folder.
        tap_layers: what the user says that the draft reads; None: what its file says.
        cache_dir: where hashes are kept.
        device: where the rows are: "cpu" or "cuda".

    Raises:
        UserError: the draft is broken, reads layers or widths that the target does not have, or
            other layers than `tap_layers`.
    """
    content = read_config_object(folder / "config.json")
    source = DraftSource(folder=folder, target=target, tap_layers=tap_layers)
    load = _load_dflash if is_dflash(content, stored_tensors(folder)) else _load_eagle3
    return load(source, content, cache_dir, device)


def _load_dflash(
    source: DraftSource, content: Mapping[str, Any], cache_dir: Path, device: str
) -> RowProjection:
    shape, model_hash, fuse = load_dflash_fusion(source, cache_dir, device)
    keys = read_dflash_keys(find_dflash_layout(content, stored_tensors(source.folder)), content)
    _check_stated(source, lambda: stated_by_dflash(keys.layout, keys.top, keys.nested))
    return RowProjection(
        method="dflash",
        model_hash=model_hash,
        tap_layers=shape.tap_layers,
        row_width=shape.raw_row_width,
        hidden_size=shape.hidden_size,
        fuse=fuse,
    )


def _load_eagle3(
    source: DraftSource, content: Mapping[str, Any], cache_dir: Path, device: str
) -> RowProjection:
    own = Eagle3Source(
        folder=source.folder,
        target=source.target,
        tap_layers=source.tap_layers,
        # What is fed back concerns the drafter alone: a file that is vague about it is no mistake.
        feedback="pre-norm",
    )
    shape, model_hash, fuse = load_eagle3_fusion(own, cache_dir, device)
    if shape.use_aux_hidden_state:  # else whatever layers the file states are not read
        keys = read_eagle3_keys(find_eagle3_layout(content, stored_tensors(own.folder)), content)
        _check_stated(own, lambda: stated_by_eagle3(keys.layout, keys.top, keys.nested))
    return RowProjection(
        method="eagle3",
        model_hash=model_hash,
        tap_layers=shape.tap_layers,
        row_width=shape.raw_row_width,
        hidden_size=shape.hidden_size,
        fuse=fuse,
    )


def _check_stated(source: DraftSource, stated: Callable[[], tuple[int, ...] | None]) -> None:
    """Refuse layers that contradict the draft's file; one that states none is what they are for.

    Raises:
        UserError: names both.
    """
    if source.tap_layers is None:
        return
    try:
        layers = stated()
    except UserError:  # it cannot be told what the file means
        return
    if layers is not None and layers != source.tap_layers:
        raise UserError(
            f"--tap-layers {','.join(map(str, source.tap_layers))} is not what the draft of "
            f"--fuse-for reads, {','.join(map(str, layers))}; leave it out, or --fuse-for"
        )
