"""Read a draft's shape from its `config.json` and from the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graph_runtime.architecture import DecoderConfig
from graph_runtime.config_values import boolean, number, refused
from graph_runtime.drafts.keys import head_dim, is_given, kv_heads, object_at, rope, size
from graph_runtime.drafts.target import check_target_layers, target_hidden_size
from graph_runtime.drafts.vocabulary import draft_vocab_size, vocab_size
from graph_runtime.eagle3.config import Eagle3Config
from graph_runtime.eagle3.layouts import Shape, refuse_other_methods
from graph_runtime.eagle3.taps import resolve_tap_layers, stated_tap_layers
from splitspec.errors import UserError

FEEDBACKS = ("auto", "pre-norm", "post-norm")
_FC = "fusion.fc.weight"
_MODELOPT_ONLY = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
}
_OFF = ("bias", "parallel_drafting", "quantization_config", "final_logit_softcapping",
        "attn_logit_softcapping")  # fmt: skip
"""Each changes the maths in some engine; off is what the network computes."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Keys:
    """Where a layout keeps its keys."""

    layout: str
    top: Mapping[str, Any]
    nested: Mapping[str, Any]
    """`eagle_config`, empty where there is none."""
    layer: Mapping[str, Any]
    """The decoder layer's: `transformer_layer_config` of speculators, else `top`."""

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a flag, which some exporters nest and others do not.

        Raises:
            UserError: it is no flag, or the two places disagree.
        """
        stated = {boolean(place, key) for place in (self.top, self.nested) if is_given(place, key)}
        if len(stated) > 1:
            raise UserError(f"config.json: {key} is true in one place and false in another")
        return stated.pop() if stated else default


def read_keys(layout: str, config: Mapping[str, Any]) -> Eagle3Keys:
    """Find the places of a layout's keys.

    Raises:
        UserError: a place is missing or no object.
    """
    layer: Mapping[str, Any] = config
    if layout == "speculators":
        layer = object_at(config, "transformer_layer_config")
        if not layer:
            raise refused("transformer_layer_config", None, "an object")
    nested = object_at(config, "eagle_config")
    return Eagle3Keys(layout=layout, top=config, nested=nested, layer=layer)


def read_eagle3_config(
    keys: Eagle3Keys,
    shapes: Mapping[str, Shape],
    *,
    target: DecoderConfig | None,
    taps: tuple[int, ...] | None,
    feedback: str,
) -> Eagle3Config:
    """Return the draft's shape. The number of its layers is told by its tensors alone.

    Args:
        keys: see `read_keys`.
        shapes: of the file's tensors, under the network's names.
        target: the target's shape, where a target was given.
        taps: tap layers that override the file's.
        feedback: one of FEEDBACKS.

    Raises:
        UserError: names the key or tensor that is missing, unsupported, or in conflict.
    """
    layer = keys.layer
    hidden = size(layer, "hidden_size")
    use_aux = keys.flag("use_aux_hidden_state", default=True)
    refuse_other_methods(hidden, shapes, use_aux_hidden_state=use_aux)
    _refuse_unsupported(keys)
    check_target_layers("num_target_layers", keys.top.get("num_target_layers"), target)
    n_heads = size(layer, "num_attention_heads")
    target_hidden = _target_hidden_size(keys, hidden, target, use_aux=use_aux)
    vocabulary = vocab_size(layer, target)
    norm_before_fc, fc_norm = _norms_before_fc(keys, shapes, use_aux=use_aux)
    attention_bias = boolean(layer, "attention_bias")
    eps = number(layer, "rms_norm_eps", 1e-6, most=1.0)
    return Eagle3Config(
        layout=keys.layout,
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        intermediate_size=size(layer, "intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=kv_heads(layer, n_heads),
        head_dim=head_dim(layer, hidden, n_heads),
        rms_norm_eps=eps,
        vocab_size=vocabulary,
        draft_vocab_size=draft_vocab_size(keys.top, shapes, vocabulary),
        tap_layers=resolve_tap_layers(
            stated_tap_layers(keys.layout, keys.top, keys.nested) if use_aux and not taps else None,
            shapes.get(_FC),
            target_hidden=target_hidden,
            target=target,
            override=taps,
        ),
        rope=rope(layer),
        qkv_bias=boolean(layer, "qkv_bias", default=attention_bias),
        o_bias=attention_bias,
        mlp_bias=boolean(layer, "mlp_bias"),
        qk_norm=_qk_norm(layer, shapes),
        sliding_window=_sliding_window(layer),
        use_aux_hidden_state=use_aux,
        target_norm_eps=eps if use_aux or target is None else target.rms_norm_eps,
        hidden_norm=use_aux or "layer.hidden_norm.weight" in shapes,
        norm_before_residual=keys.flag("norm_before_residual"),
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        post_norm_feedback=_post_norm_feedback(keys, fc_norm=fc_norm, feedback=feedback),
    )


def _refuse_unsupported(keys: Eagle3Keys) -> None:
    for place in (keys.top, keys.layer, keys.nested):
        if place.get("hidden_act") not in (None, "silu"):
            raise refused("hidden_act", place["hidden_act"], "'silu'")
        for key in _OFF:
            if place.get(key):
                raise refused(key, place[key], "false or null: a draft with it is not supported")
    for key, only in _MODELOPT_ONLY.items():
        if boolean(keys.nested, key, default=only) != only:
            raise refused(f"eagle_config.{key}", not only, f"{str(only).lower()}")
    step = keys.nested.get("parallel_draft_step")
    if step is not None and step != 1:
        raise refused("eagle_config.parallel_draft_step", step, "1: parallel drafts are no EAGLE-3")


def _norms_before_fc(
    keys: Eagle3Keys, shapes: Mapping[str, Shape], *, use_aux: bool
) -> tuple[bool, bool]:
    """Return whether there is one norm over all taps, and whether there is one a tap.

    Raises:
        UserError: both, or a flag of the fusion and its tensors disagree.
    """
    norm_before_fc = keys.flag("norm_before_fc")
    fc_norm = keys.flag("fc_norm") or keys.flag("use_aux_norm")  # EAGLE-3.1's older name
    if norm_before_fc and fc_norm:
        raise UserError(
            "config.json: norm_before_fc and fc_norm are both true; expected at most one"
        )
    for flag, on, start in (
        ("use_aux_hidden_state", use_aux, "fusion.fc."),
        ("norm_before_fc", norm_before_fc, "fusion.input_norm."),
        ("fc_norm", fc_norm, "fusion.fc_norm."),
    ):
        stored = sorted(name for name in shapes if name.startswith(start))
        if stored and not on:
            name, shape = stored[0].removeprefix("fusion."), list(shapes[stored[0]])
            raise UserError(f"unexpected tensor {name} {shape}: config.json's {flag} is false")
        if on and not stored:
            name = start.removeprefix("fusion.") + ("0.weight" if flag == "fc_norm" else "weight")
            raise UserError(f"missing tensor {name}: config.json's {flag} is true")
        if on and not use_aux:
            raise UserError(f"config.json: {flag} is true but use_aux_hidden_state is false")
    return norm_before_fc, fc_norm


def _target_hidden_size(
    keys: Eagle3Keys, hidden: int, target: DecoderConfig | None, *, use_aux: bool
) -> int:
    width = target_hidden_size(keys.top, hidden, target)
    if not use_aux and width != hidden:
        raise UserError(
            f"use_aux_hidden_state is false, so the target's hidden_size, {width}, has to be the "
            f"draft's, {hidden}"
        )
    return width


def _post_norm_feedback(keys: Eagle3Keys, *, fc_norm: bool, feedback: str) -> bool:
    """Return what the next chain step is fed.

    NOTE: `norm_output` means post-norm feedback in EAGLE-3.1 and speculators files. SpecForge
    writes true for "norm before the head", which every draft does, and feeds back the pre-norm.
    """
    if feedback != "auto":
        return feedback == "post-norm"
    norm_output = keys.flag("norm_output")
    if norm_output and not fc_norm and keys.layout != "speculators":
        raise UserError(
            "config.json: norm_output is true without fc_norm, which some exporters write for "
            "drafts that are fed the pre-norm state; give --feedback pre-norm or post-norm"
        )
    return norm_output


def _qk_norm(layer: Mapping[str, Any], shapes: Mapping[str, Shape]) -> bool:
    stored = any(f"layer.self_attn.{x}_norm.weight" in shapes for x in "qk")
    return stored or layer.get("model_type") == "qwen3"


def _sliding_window(layer: Mapping[str, Any]) -> int | None:
    """Return the window of the layer: the first that `layer_types` speaks of."""
    types = layer.get("layer_types")
    if types is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or not types or types[0] not in known:
            raise refused("layer_types", types, f"a list of {' and '.join(known)}")
        sliding = types[0] == "sliding_attention"
    else:  # as Qwen does: the layers below max_window_layers see everything
        sliding = boolean(layer, "use_sliding_window") and not layer.get("max_window_layers")
    return size(layer, "sliding_window") if sliding else None
