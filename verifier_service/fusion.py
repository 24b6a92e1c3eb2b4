"""The projection of the draft that `--fuse-for` names, and the taps that go with it."""

from __future__ import annotations

from pathlib import Path

from graph_runtime.checkpoint import stored_tensors
from graph_runtime.config_values import read_config_object
from graph_runtime.eagle3.checkpoint import Eagle3Source
from graph_runtime.eagle3.config_reader import read_keys
from graph_runtime.eagle3.layouts import find_layout
from graph_runtime.eagle3.load import load_fusion_module
from graph_runtime.eagle3.taps import stated_tap_layers
from splitspec.errors import UserError
from verifier_service.committed_rows import DraftFusion
from verifier_service.config import VerifierConfig


def load_draft_fusion(config: VerifierConfig, target: Path) -> DraftFusion | None:
    """Load the projection that `config.fuse_for` asks for onto the target's device; None: none.

    Args:
        config: as the process was started.
        target: the target's HF-layout folder.

    Raises:
        UserError: the draft is broken, reads layers or widths that the target does not have, or
            other layers than `--tap-layers`.
    """
    if config.fuse_for is None:
        return None
    folder = config.fuse_for.expanduser()
    source = Eagle3Source(
        folder=folder,
        target=target,
        tap_layers=config.tap_layers,
        # What is fed back concerns the drafter alone: a file that is vague about it is no mistake.
        feedback="pre-norm",
    )
    shape, model_hash, fuse = load_fusion_module(
        source, config.cache_dir.expanduser(), config.device
    )
    if shape.use_aux_hidden_state and config.tap_layers is not None:
        _check_stated(folder, config.tap_layers)
    return DraftFusion(
        model_hash=model_hash,
        tap_layers=shape.tap_layers,
        row_width=shape.raw_row_width,
        hidden_size=shape.hidden_size,
        fuse=fuse,
    )


def _check_stated(folder: Path, tap_layers: tuple[int, ...]) -> None:
    """Refuse layers that contradict the draft's file; one that states none is what they are for.

    Raises:
        UserError: names both.
    """
    content = read_config_object(folder / "config.json")
    keys = read_keys(find_layout(content, stored_tensors(folder)), content)
    try:
        stated = stated_tap_layers(keys.layout, keys.top, keys.nested)
    except UserError:  # it cannot be told what the file means
        return
    if stated is not None and stated != tap_layers:
        raise UserError(
            f"--tap-layers {','.join(map(str, tap_layers))} is not what the draft of --fuse-for "
            f"reads, {','.join(map(str, stated))}; leave it out, or --fuse-for"
        )
