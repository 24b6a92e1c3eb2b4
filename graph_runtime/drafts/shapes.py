"""The shapes of the tensors that a draft's decoder layer has, for every method."""

from __future__ import annotations

from graph_runtime.decoder import LayerShape

Shape = tuple[int, ...]


def layer_shapes(config: LayerShape, prefix: str, *, input_width: int) -> dict[str, Shape]:
    """Return the shapes of one layer's norms, attention and MLP under `prefix`.

    Args:
        config: the layer's shape.
        prefix: what the names begin with, without the dot.
        input_width: elements that q, k and v project from.
    """
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }
    if config.qk_norm:
        shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
        shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
    for name, fan_out, fan_in, has_bias in (
        ("self_attn.q_proj", q_width, input_width, config.qkv_bias),
        ("self_attn.k_proj", kv_width, input_width, config.qkv_bias),
        ("self_attn.v_proj", kv_width, input_width, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_width, config.o_bias),
        ("mlp.gate_proj", inner, hidden, bias),
        ("mlp.up_proj", inner, hidden, bias),
        ("mlp.down_proj", hidden, inner, bias),
    ):
        shapes[f"{prefix}.{name}.weight"] = (fan_out, fan_in)
        if has_bias:
            shapes[f"{prefix}.{name}.bias"] = (fan_out,)
    return shapes
