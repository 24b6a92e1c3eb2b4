"""Tell the formats of DFlash draft checkpoints apart, and give their tensors one set of names.

The network's names are those of `expected_shapes`; besides them a file holds `d2t` and `t2d`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from graph_runtime.config_values import refused
from graph_runtime.dflash.config import DFlashConfig
from graph_runtime.drafts.shapes import Shape, layer_shapes
from splitspec.drafts import stated_method
from splitspec.errors import UserError

_ZLAB = ("DFlashDraftModel",)
"""ModelOpt's too."""
_SPECULATORS = ("DFlashSpeculator", "DFlashDraftModel")
_DEEPSPEC = ("Qwen3DSparkModel",)
"""NOTE: DeepSpec writes DSpark's name for a DFlash draft: one without Markov and confidence heads.
"""
_KNOWN = sorted({*_ZLAB, *_SPECULATORS, *_DEEPSPEC})
_FROZEN = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Copies of the target's final norm and head, which some speculators versions saved along. Training
compares with them; no draft computes with them."""
_STARTS = {
    "candidate_selector.": "DFlash2",
    "markov_head.": "DSpark",
    "logit_head.": "DSpark",
    "confidence_head.": "DSpark",
    "prefix_gru.": "Domino",
    "embed_proj.": "Domino",
    "fusion_weights": "DFlare",
    "fusion_norms.": "DFlare",
    "mask_embedding": "MiMo's DFlash",
    "aux_hidden_norms.": "Laguna's DFlash",
    "encoder.": "Muse-Glimmer's DFlash",
    "midlayer.": "EAGLE-3",
    "mask_hidden": "P-EAGLE",
    "model.": "a whole model",
}
_PARTS = {
    ".attention_conv.": "DFlash2",
    ".mlp_conv.": "DFlash2",
    ".attention_sink_bias": "MiMo's DFlash",
    ".sinks": "a DFlash with attention sinks",
    ".qkv_proj.": "Laguna's DFlash",
    ".g_proj.": "Laguna's DFlash",
    ".0.hidden_norm.": "EAGLE-3",
    ".mlp.experts.": "a DFlash with experts (MoE)",
    ".mlp.gate.": "a DFlash with experts (MoE)",
    ".q_a_proj.": "a DFlash with latent attention (MLA)",
    ".kv_a_proj_with_mqa.": "a DFlash with latent attention (MLA)",
}
_ARCHITECTURES = {
    "DFlash2": "DFlash2",
    "DSpark": "DSpark",
    "Domino": "Domino",
    "DFlare": "DFlare",
    "MuseGlimmer": "Muse-Glimmer's DFlash",
    "Eagle": "EAGLE-3",
}
"""By what the name holds."""
_KINDS = {"dflash2": "DFlash2", "dspark": "DSpark", "domino": "Domino", "eagle3": "EAGLE-3"}
"""By `speculators_model_type`."""
_SUCCESSORS = ("DFlash2", "DSpark", "Domino", "DFlare", "Muse-Glimmer's DFlash")
_HIDDEN_NORM = "hidden_norm."
_NO_DFLASH = "which is no DFlash that this drafter computes"


def is_dflash(content: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether a draft is DFlash or a successor of it, readable or not, and no EAGLE-3.

    Args:
        content: of config.json, unchecked.
        names: tensors as they are stored.
    """
    stated = stated_method(content)
    if stated is not None:
        return stated == "dflash"
    return any(
        name.startswith(_HIDDEN_NORM) or _method_of_tensor(name) in _SUCCESSORS for name in names
    )


def find_layout(content: Mapping[str, Any], names: Collection[str]) -> str:
    """Return the layout of a file: see `DFlashConfig.layout`.

    Args:
        content: of config.json.
        names: tensors as they are stored.

    Raises:
        UserError: it is another method's, a successor's or an unknown format, named.
    """
    for name in sorted(names):
        method = _method_of_tensor(name)
        if method is not None:
            raise UserError(f"tensor {name}: this is {method}, {_NO_DFLASH}")
    kind = content.get("speculators_model_type")
    if kind is not None and kind != "dflash":
        method = _KINDS.get(kind) if isinstance(kind, str) else None
        said = "" if method is None else f": this is {method}, {_NO_DFLASH}"
        raise refused("speculators_model_type", kind, f"'dflash'{said}")
    stated = content.get("architectures") or []
    if not isinstance(stated, list) or len(stated) > 1 or not all(_is_text(n) for n in stated):
        raise refused("architectures", stated, "a list of one name")
    architecture = stated[0] if stated else None
    if kind is not None or architecture == _SPECULATORS[0]:
        return _of_known(architecture, _SPECULATORS, "speculators")
    if architecture in _DEEPSPEC:
        return "deepspec"
    if architecture is None and content.get("dflash_config") is None:
        raise refused("architectures", None, f"['{_ZLAB[0]}']: nothing else says which DFlash")
    return _of_known(architecture, _ZLAB, "z-lab")


def network_names(names: Collection[str]) -> dict[str, str]:
    """Return the stored name of each tensor under its name in the network."""
    found = {}
    for name in names:
        if name.startswith("fc."):
            found[f"fusion.{name}"] = name
        elif name.startswith(_HIDDEN_NORM):
            found["fusion.norm." + name.removeprefix(_HIDDEN_NORM)] = name
        elif name.startswith("fusion."):  # not a name that any format stores
            found[f"?{name}"] = name
        else:
            found[name] = name
    return found


def stored_name(name: str) -> str:
    """Return the name that a file has for one of the network's tensors."""
    if name.startswith("fusion.norm."):
        return _HIDDEN_NORM + name.removeprefix("fusion.norm.")
    return name.removeprefix("fusion.")


def expected_shapes(config: DFlashConfig) -> dict[str, Shape]:
    """Return the shape of each of the network's tensors, embeddings and head included."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "fusion.fc.weight": (hidden, config.raw_row_width),
        "fusion.norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    for i in range(config.n_layers):
        shapes |= layer_shapes(config, f"layers.{i}", input_width=hidden)
    return shapes


def ignored_shapes(config: DFlashConfig) -> dict[str, Shape]:
    """Return the shape of each tensor that a file of the layout may hold and no network reads."""
    if config.layout != "speculators":
        return {}
    width = config.hidden_size
    return dict(zip(_FROZEN, ((width,), (config.draft_vocab_size, width)), strict=True))


def _of_known(name: str | None, known: Collection[str], layout: str) -> str:
    if name is None or name in known:
        return layout
    method = _method_of_architecture(name)
    said = "" if method is None else f": this is {method}, {_NO_DFLASH}"
    raise refused("architectures", [name], f"a DFlash draft: one of {', '.join(_KNOWN)}{said}")


def _method_of_tensor(name: str) -> str | None:
    """Return the method that a stored name gives away; None: DFlash, or nobody knows."""
    for start, method in _STARTS.items():
        if name.startswith(start):
            return method
    return next((method for part, method in _PARTS.items() if part in name), None)


def _method_of_architecture(name: str) -> str | None:
    return next((method for part, method in _ARCHITECTURES.items() if part in name), None)


def _is_text(value: object) -> bool:
    return isinstance(value, str)
