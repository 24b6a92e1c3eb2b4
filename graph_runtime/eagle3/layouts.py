"""Tell the formats of EAGLE-3 draft checkpoints apart, and give their tensors one set of names.

The network's names are those of `expected_shapes`; besides them a file holds `d2t` and `t2d`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from graph_runtime.config_values import refused
from graph_runtime.drafts.shapes import Shape, layer_shapes
from graph_runtime.eagle3.config import Eagle3Config
from splitspec.errors import UserError

_SPECULATORS = ("Eagle3Speculator", "Eagle3DraftModel")
_DEEPSPEC = ("Qwen3Eagle3Model",)
_LLAMA = ("LlamaForCausalLMEagle3", "LlamaForCausalLM", "Eagle3LlamaForCausalLM")
"""What SafeAILab, SpecForge, AngelSlim and ModelOpt write, whatever the target is."""
_LAYER_PREFIX = {"safeailab": "midlayer.", "specforge": "midlayer."}
_FUSION = ("fc.", "fc_norm.", "input_norm.")
_DFLASH = ("candidate_selector.", "markov_head.", "prefix_gru.", "hidden_norm.")
_MLA = (".q_a_proj.", ".kv_a_proj_with_mqa.", ".kv_b_proj.")


def find_layout(config: Mapping[str, Any], names: Collection[str]) -> str:
    """Return the layout of a file: see `Eagle3Config.layout`.

    Args:
        config: content of config.json.
        names: tensors as they are stored.

    Raises:
        UserError: it is another method's or an unknown format, named.
    """
    kind = config.get("speculators_model_type")
    if kind is not None and kind != "eagle3":
        raise refused("speculators_model_type", kind, "'eagle3': other methods are no EAGLE-3")
    stated = config.get("architectures") or []
    if not isinstance(stated, list) or len(stated) > 1 or not all(_is_text(n) for n in stated):
        raise refused("architectures", stated, "a list of one name")
    if kind is not None or (stated and stated[0] in _SPECULATORS):
        return "speculators"
    if stated and stated[0] in _DEEPSPEC:
        return "deepspec"
    if stated and (stated[0].startswith("DFlash") or "dflash_config" in config):
        raise refused("architectures", stated, "an EAGLE-3 draft; this is DFlash: --draft dflash")
    if stated and stated[0] not in _LLAMA:
        known = ", ".join((*_LLAMA, *_SPECULATORS, *_DEEPSPEC))
        raise refused("architectures", stated, f"an EAGLE-3 draft: one of {known}")
    if any(name.startswith("midlayer.") for name in names):
        return "specforge" if config.get("eagle_config") is not None else "safeailab"
    return "modelopt"


def network_names(layout: str, names: Collection[str]) -> dict[str, str]:
    """Return the stored name of each tensor under its name in the network.

    Raises:
        UserError: a name is a whole model's: no exporter gives drafts that prefix.
    """
    prefix = _LAYER_PREFIX.get(layout, "layers.0.")
    found = {}
    for name in names:
        if name.startswith("model."):
            raise UserError(f"tensor {name}: this is a whole model, no draft")
        if name.startswith(prefix):
            found["layer." + name.removeprefix(prefix)] = name
        elif name.startswith(_FUSION):
            found[f"fusion.{name}"] = name
        elif name.startswith(("layer.", "fusion.")):  # not a name that any format stores
            found[f"?{name}"] = name
        else:
            found[name] = name
    return found


def stored_name(layout: str, name: str) -> str:
    """Return the name that a file of the layout has for one of the network's tensors."""
    if name.startswith("layer."):
        return _LAYER_PREFIX.get(layout, "layers.0.") + name.removeprefix("layer.")
    return name.removeprefix("fusion.")


def refuse_other_methods(
    hidden_size: int, shapes: Mapping[str, Shape], *, use_aux_hidden_state: bool
) -> None:
    """Refuse weights that are no EAGLE-3 draft of one dense layer, whatever config.json says.

    Args:
        hidden_size: the draft's.
        shapes: of every tensor, under the network's names.
        use_aux_hidden_state: what config.json says.

    Raises:
        UserError: says what they are and by which tensor.
    """
    for name in sorted(shapes):
        if any(part in name for part in _MLA):
            raise UserError(f"tensor {name}: a draft with latent attention (MLA) is not supported")
        if name == "mask_hidden" or name.startswith(("layers.1.", "midlayer.1.")):
            raise UserError(f"tensor {name}: this is P-EAGLE, which drafts in parallel, no EAGLE-3")
        if name.startswith(_DFLASH):
            raise UserError(f"tensor {name}: this is a DFlash draft, no EAGLE-3")
    fc, q_proj = shapes.get("fusion.fc.weight"), shapes.get("layer.self_attn.q_proj.weight")
    older = "these are weights of EAGLE-1 or EAGLE-2, no EAGLE-3"
    if "layer.hidden_norm.weight" not in shapes:
        if fc == (hidden_size, 2 * hidden_size):
            raise UserError(f"tensor fc.weight is {list(fc)} and there is no hidden_norm: {older}")
        if q_proj is not None and q_proj[1:] == (hidden_size,):
            raise UserError(
                f"tensor self_attn.q_proj.weight is {list(q_proj)}, without the embedding's "
                f"{hidden_size} inputs besides: {older}"
            )
    if fc is None and "lm_head.weight" not in shapes and use_aux_hidden_state:
        raise UserError(f"tensors fc.weight and lm_head.weight are missing: {older}")


def expected_shapes(config: Eagle3Config) -> dict[str, Shape]:
    """Return the shape of each of the network's tensors, embeddings and head included."""
    hidden, taps = config.hidden_size, config.raw_row_width
    shapes: dict[str, Shape] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    if config.hidden_norm:
        shapes["layer.hidden_norm.weight"] = (hidden,)
    if config.use_aux_hidden_state:
        shapes["fusion.fc.weight"] = (hidden, taps)
    else:
        shapes["fusion.target_norm.weight"] = (config.target_hidden_size,)
    if config.norm_before_fc:
        shapes["fusion.input_norm.weight"] = (taps,)
    for i in range(len(config.tap_layers) if config.fc_norm else 0):
        shapes[f"fusion.fc_norm.{i}.weight"] = (config.target_hidden_size,)
    shapes |= layer_shapes(config, "layer", input_width=2 * hidden)
    return shapes


def _is_text(value: object) -> bool:
    return isinstance(value, str)
