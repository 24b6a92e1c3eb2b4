"""Read a decoder's shape from an HF `config.json`, and refuse what the decoder cannot compute.

Policy for keys. Every key is one of four kinds:
1. read here, for the families whose `transformers` model reads it;
2. `HARMLESS`: training, generation and bookkeeping keys, which no forward pass reads;
3. `ONLY`: keys with one value that the decoder computes; any other value is refused;
4. unknown, or read only by another family: accepted when its value is "off" (null, false, 0 or
   empty), refused otherwise, because nobody can tell whether it changes the maths.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graph_runtime.config_values import boolean, integer, number, read_config_object
from graph_runtime.rope_config import RopeScaling, rope_from_config
from splitspec.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one architecture differs from Llama."""

    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None
    reads: frozenset[str] = frozenset()
    """Keys that this family reads besides `SHARED`."""
    default_sliding_window: int | None = None
    default_eps: float = 1e-6
    default_kv_heads: int | None = None


_WINDOW_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers"})
FAMILIES = {
    "LlamaForCausalLM": Family(model_type="llama", reads=frozenset({"attention_bias", "mlp_bias"})),
    "MistralForCausalLM": Family(
        model_type="mistral",
        reads=frozenset({"sliding_window"}),
        default_sliding_window=4096,
        default_kv_heads=8,
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        qkv_bias=True,
        reads=_WINDOW_KEYS,
        default_sliding_window=4096,
        default_kv_heads=32,
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        qk_norm=True,
        default_head_dim=128,
        reads=_WINDOW_KEYS | {"attention_bias"},
        default_sliding_window=4096,
        default_kv_heads=32,
    ),
}

_SHARED = """
vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
head_dim hidden_act rms_norm_eps max_position_embeddings rope_theta rope_scaling rope_parameters
original_max_position_embeddings tie_word_embeddings layer_types architectures model_type
"""
_HARMLESS = """
_name_or_path attention_dropout attn_implementation _attn_implementation bos_token_id
chunk_size_feed_forward classifier_dropout decoder_start_token_id dtype embd_pdrop eos_token_id
finetuning_task gradient_checkpointing hidden_dropout id2label initializer_range is_llama_config
label2id max_length model_max_length output_attentions output_hidden_states pad_token_id prefix
pretraining_tp problem_type resid_pdrop return_dict sep_token_id task_specific_params
tokenizer_class torch_dtype transformers.js_config transformers_version unk_token_id unsloth_fixed
use_cache use_return_dict
"""
SHARED = frozenset(_SHARED.split())
HARMLESS = frozenset(_HARMLESS.split())
ONLY: dict[str, Any] = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
"""NOTE: `rope_interleaved`, `quantization_config`, softcaps, multipliers and expert counts need no
entry: off is the value computed, and everything else is refused by the rule for unknown keys."""

MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "max_position_embeddings": 2**31,
    "sliding_window": 2**31,
    "max_window_layers": 2**31,
}
"""Far above every model's: what is more is damage, and would be found as a lack of memory only."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that shapes the decoder's maths. Sizes are elements, positions or counts."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeScaling
    tied: bool
    """The head is the embedding."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over every head of q and k, before RoPE."""
    sliding_windows: tuple[int | None, ...]
    """One a layer: how many positions, its own included, a row attends to; None is all."""

    def __post_init__(self) -> None:
        """Refuse sizes that no decoder has.

        Raises:
            UserError: names the field and its value.
        """
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "n_layers", "n_heads", "n_kv_heads",
            "head_dim", "max_position_embeddings",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"config.json: {name} is {value!r}; expected a positive integer")
        if self.n_heads % self.n_kv_heads:
            raise UserError(
                f"config.json: num_attention_heads is {self.n_heads}; "
                f"expected a multiple of num_key_value_heads, {self.n_kv_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"config.json: head_dim is {self.head_dim}; expected an even number")
        if any(window is not None and window < 1 for window in self.sliding_windows):
            raise UserError("config.json: sliding_window is less than 1")


def read_config(folder: Path) -> DecoderConfig:
    """Read `folder`/config.json.

    Raises:
        UserError: missing, no JSON, or something that the decoder cannot compute, named.
    """
    path = folder / "config.json"
    content = read_config_object(path)
    try:
        return parse_config(content)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} holds a value of a wrong type: {error}") from error


def parse_config(config: dict[str, Any]) -> DecoderConfig:
    """Turn the content of a `config.json` into a DecoderConfig.

    Raises:
        UserError: names the key that is missing or not supported, and its value.
    """
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    _refuse_unsupported(config, family)
    hidden_size, n_heads, n_layers = (
        _positive(config, key)
        for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    computed = family.default_head_dim or max(hidden_size // n_heads, 1)
    head_dim = _positive(config, "head_dim") if config.get("head_dim") else computed
    attention_bias = boolean(config, "attention_bias")
    return DecoderConfig(
        architecture=architecture,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=_kv_heads(config, family, n_heads),
        head_dim=head_dim,
        rms_norm_eps=number(config, "rms_norm_eps", family.default_eps, most=1.0),
        max_position_embeddings=_positive(config, "max_position_embeddings"),
        rope=rope_from_config(config),
        tied=boolean(config, "tie_word_embeddings"),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=boolean(config, "mlp_bias"),
        qk_norm=family.qk_norm,
        sliding_windows=_sliding_windows(config, family, n_layers),
    )


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    if names is None:
        by_type = {family.model_type: name for name, family in FAMILIES.items()}
        names = [by_type.get(str(config.get("model_type")), config.get("model_type"))]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in FAMILIES:
        raise UserError(
            f"config.json: architectures is {names!r}; supported: {', '.join(FAMILIES)}"
        )
    model_type = config.get("model_type", FAMILIES[names[0]].model_type)
    if model_type != FAMILIES[names[0]].model_type:
        raise UserError(f"config.json: model_type is {model_type!r}, which is no {names[0]}")
    return str(names[0])


def _refuse_unsupported(config: dict[str, Any], family: Family) -> None:
    for key, value in sorted(config.items()):
        if key in ONLY:
            if value is not None and value != ONLY[key]:
                raise UserError(f"config.json: {key} is {value!r}; supported: {ONLY[key]!r}")
        elif key not in SHARED and key not in HARMLESS and key not in family.reads and value:
            raise UserError(
                f"config.json: {key} is {str(value)[:80]!r}, which this decoder does not compute"
            )


def _positive(config: dict[str, Any], key: str) -> int:
    return integer(config, key, least=1, most=MOST[key])


def _kv_heads(config: dict[str, Any], family: Family, n_heads: int) -> int:
    if config.get("num_key_value_heads") is not None:
        return _positive(config, "num_key_value_heads")
    stated_null = "num_key_value_heads" in config
    return n_heads if stated_null or family.default_kv_heads is None else family.default_kv_heads


def _sliding_windows(
    config: dict[str, Any], family: Family, n_layers: int
) -> tuple[int | None, ...]:
    """Return each layer's window, as the `transformers` model of the family applies it."""
    window = config.get("sliding_window", family.default_sliding_window)
    if "sliding_window" not in family.reads or not window:
        window = None
    elif "sliding_window" in config:
        window = _positive(config, "sliding_window")
    first = 0
    if "use_sliding_window" in family.reads:
        window = window if boolean(config, "use_sliding_window") else None
        first = config.get("max_window_layers", 28)
        integer({"max_window_layers": first}, "max_window_layers", least=0, most=2**31)
    computed = ["sliding_attention" if window and i >= first else "full_attention"
                for i in range(n_layers)]  # fmt: skip
    layer_types = config.get("layer_types") or computed
    if "max_window_layers" not in family.reads and layer_types != computed:
        raise UserError(f"config.json: layer_types is not what {family.model_type} computes")
    allowed = {"full_attention", "sliding_attention"} if window else {"full_attention"}
    if len(layer_types) != n_layers or not allowed.issuperset(layer_types):
        raise UserError(
            f"config.json: layer_types holds {sorted(set(layer_types))} for {len(layer_types)} "
            f"layers; expected {n_layers} of {sorted(allowed)}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
