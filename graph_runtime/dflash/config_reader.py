"""Read a draft's shape from its `config.json` and from the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graph_runtime.architecture import MOST
from graph_runtime.config_values import boolean, number, refused
from graph_runtime.dflash.config import DFlashConfig
from graph_runtime.dflash.keys import NESTED, DFlashKeys
from graph_runtime.dflash.taps import default_tap_layers, resolve_tap_layers, stated_tap_layers
from graph_runtime.dflash.windows import causality, layer_types, sliding_windows
from graph_runtime.drafts.keys import head_dim, is_given, kv_heads, rope, size
from graph_runtime.drafts.shapes import Shape
from graph_runtime.drafts.target import DraftTarget, check_target_layers, target_hidden_size
from graph_runtime.drafts.vocabulary import draft_vocab_size, vocab_size

_FC = "fusion.fc.weight"
_MOST_BLOCK = 1024
"""Far above every block: what is more is damage."""
_NESTED_KEYS = frozenset({
    "mask_token_id", "target_layer_ids", "block_size", "num_target_layers", "causal", "is_causal",
    "use_swa", "swa_window_size", "sample_from_anchor", "shift_label", "projector_type",
    "use_aux_hidden_state", "input_embedding_scale", "output_multiplier", "attention_value_scale",
    "final_logit_softcapping",
    # Training's, and the mask token's name, whose id is what counts.
    "num_anchors", "max_anchors", "mask_token", "draft_arch",
})  # fmt: skip
"""What `dflash_config` may hold. Any other key that is on may change the maths."""
_OFF = (
    "bias", "parallel_drafting", "quantization_config", "attn_logit_softcapping",
    "attention_sink_bias", "fc_layernorm", "fc_norm", "norm_before_fc", "dflash_query_causal",
    "log_snr_conditioning", "enable_qwen35_gated_q_proj",
)  # fmt: skip
"""Each changes the maths in some engine; off is what the network computes."""
_DSPARK = ("markov_rank", "enable_confidence_head")
_PROJECTORS = ("dflash", "")


def read_dflash_config(
    keys: DFlashKeys,
    shapes: Mapping[str, Shape],
    *,
    target: DraftTarget | None,
    taps: tuple[int, ...] | None,
) -> DFlashConfig:
    """Return the draft's shape.

    Args:
        keys: see `read_keys`.
        shapes: of the file's tensors, under the network's names.
        target: what the draft has to know of its target, where one was given.
        taps: tap layers that override the file's.

    Raises:
        UserError: names the key or tensor that is missing, unsupported, or in conflict.
    """
    layer = keys.layer
    _refuse_unsupported(keys)
    scale, cap = _scales(keys, target)
    n_target_layers = _target_layers(keys, target)
    hidden, n_heads = size(layer, "hidden_size"), size(layer, "num_attention_heads")
    n_layers = size(layer, "num_hidden_layers")
    target_hidden = target_hidden_size(keys.top, hidden, target)
    vocabulary = vocab_size(layer, target)
    default = None
    if keys.layout == "z-lab" and n_target_layers is not None:
        default = default_tap_layers(n_target_layers, n_layers)
    attention_bias = boolean(layer, "attention_bias")
    types = layer_types(layer, n_layers)
    return DFlashConfig(
        layout=keys.layout,
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        intermediate_size=size(layer, "intermediate_size"),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=kv_heads(layer, n_heads),
        head_dim=head_dim(layer, hidden, n_heads),
        rms_norm_eps=number(layer, "rms_norm_eps", 1e-6, most=1.0),
        vocab_size=vocabulary,
        draft_vocab_size=draft_vocab_size(keys.top, shapes, vocabulary),
        tap_layers=resolve_tap_layers(
            None if taps else stated_tap_layers(keys.layout, keys.top, keys.nested),
            shapes.get(_FC),
            target_hidden=target_hidden,
            target=target,
            default=default,
            override=taps,
        ),
        rope=rope(layer),
        qkv_bias=boolean(layer, "qkv_bias", default=attention_bias),
        o_bias=attention_bias,
        mlp_bias=boolean(layer, "mlp_bias"),
        qk_norm=True,
        block_size=_required(keys, "block_size", least=2, most=_MOST_BLOCK),
        mask_token_id=_required(keys, "mask_token_id", least=0, most=vocabulary - 1),
        sample_from_anchor=_sample_from_anchor(keys),
        sliding_windows=sliding_windows(keys, types),
        causal=causality(keys, types),
        embedding_scale=scale,
        final_softcap=cap,
    )


def _required(keys: DFlashKeys, key: str, *, least: int, most: int) -> int:
    value = keys.count(key, least=least, most=most)
    if value is None:
        raise refused(key, None, f"an integer in [{least}, {most}]")
    return value


def _sample_from_anchor(keys: DFlashKeys) -> bool:
    """Return whether slot k drafts the token after its own position.

    NOTE: DeepSpec's files do not say so, and all of them do. `shift_label` is speculators' older
    word for it; it is written as false by default, so that only true says anything.
    """
    stated = keys.flag("sample_from_anchor")
    anchored = keys.layout == "deepspec" if stated is None else stated
    if keys.flag("shift_label") and not anchored:
        raise refused("shift_label", True, "false or null where sample_from_anchor is not true")
    return anchored


def _target_layers(keys: DFlashKeys, target: DraftTarget | None) -> int | None:
    """Return the target's number of layers: its own, or what the file states."""
    key = "num_target_layers"
    stated = keys.count(key, least=1, most=MOST["num_hidden_layers"])
    check_target_layers(key, stated, target)
    return stated if target is None else target.n_layers


def _scales(keys: DFlashKeys, target: DraftTarget | None) -> tuple[float, float | None]:
    """Return what embedded tokens are multiplied by, and what caps logits: both the target's.

    Raises:
        UserError: the file states another one, or one that the network does not have.
    """
    scale = 1.0 if target is None else target.embedding_scale
    cap = None if target is None else target.final_softcap
    for key, computed in (
        ("input_embedding_scale", scale),
        ("final_logit_softcapping", cap),
        ("output_multiplier", 1.0),
        ("attention_value_scale", 1.0),
    ):
        for name, value in {**keys.stated(key), **_given(keys.layer, key)}.items():
            if computed is None and not value:
                continue
            same = (
                computed is not None
                and isinstance(value, int | float)
                and not isinstance(value, bool)
                and 0.999 * computed < value < 1.001 * computed  # files round it
            )
            if not same:
                raise refused(name, value, f"{computed or 'null'}: what is computed for the target")
    return scale, cap


def _given(place: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {key: place[key]} if is_given(place, key) else {}


def _refuse_unsupported(keys: DFlashKeys) -> None:
    for place in (keys.top, keys.layer, keys.nested):
        for key in ("hidden_act", "hidden_activation"):
            if place.get(key) not in (None, "silu"):
                raise refused(key, place[key], "'silu'")
        for key in _DSPARK:
            if place.get(key):
                raise refused(key, place[key], "0, false or null: with it this is DSpark")
        for key in _OFF:
            if place.get(key):
                raise refused(key, place[key], "false or null: a draft with it is not supported")
    for name, value in keys.stated("projector_type").items():
        if value not in _PROJECTORS:
            raise refused(name, value, "'dflash' or null: with it this is Domino or DSpark")
    if keys.flag("use_aux_hidden_state") is False:
        raise refused("use_aux_hidden_state", False, "true or null: DFlash reads the target")
    for key, value in sorted(keys.nested.items()):
        if value and key not in _NESTED_KEYS:
            said = "false or null: a draft with it is not supported"
            raise refused(f"{NESTED}.{key}", value, said)
