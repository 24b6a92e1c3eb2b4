"""config.json: what is read, what is harmless, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from graph_runtime.architecture import FAMILIES, parse_config, read_config
from splitspec.errors import UserError
from tests.tiny import ARCHITECTURES, write_tiny_model

MINIMAL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "max_position_embeddings": 512,
}


def config_of(family: str, **keys: Any) -> dict[str, Any]:
    return {
        **MINIMAL,
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        **keys,
    }


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 4, "head_dim": 10, "attention_bias": True}),
        ("mistral", {}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 100}),
        ("qwen2", {}),
        ("qwen2", {"num_key_value_heads": None}),
        ("qwen2", {"use_sliding_window": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 3}),
        ("qwen3", {}),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0, "head_dim": 16}),
    ],
)
def test_missing_keys_mean_what_they_mean_in_transformers(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    written = config_of(family, **keys)
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = read_config(tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // 32
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 30
    window = getattr(theirs, "sliding_window", None)
    assert config.n_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == head_dim
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.tied == theirs.tie_word_embeddings
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert list(config.sliding_windows) == [
        window if kind == "sliding_attention" else None for kind in kinds
    ]


@pytest.mark.parametrize(
    ("family", "keys", "named"),
    [
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ("llama", {"architectures": None, "model_type": "gemma3"}, "gemma3"),
        ("llama", {"model_type": "mistral"}, "model_type"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is \"{'bits': 4}\""),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is '30.0'"),
        ("llama", {"attention_multiplier": 0.1}, "attention_multiplier"),
        ("llama", {"num_local_experts": 8}, "num_local_experts is '8'"),
        ("llama", {"sliding_window": 64}, "sliding_window"),
        ("llama", {"layer_types": ["sliding_attention"] * 30}, "layer_types"),
        ("llama", {"auto_map": {"AutoModel": "mine.Model"}}, "auto_map"),
        ("llama", {"a_key_of_tomorrow": 1}, "a_key_of_tomorrow"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": -2}}, "factor is -2"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2, "mscale": 3}}, "mscale is 3"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ("llama", {"hidden_size": "many"}, "hidden_size is 'many'"),
        ("llama", {"num_key_value_heads": 5}, "num_key_value_heads, 5"),
        ("llama", {"head_dim": 7}, "head_dim is 7"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 30}, "sliding_attention"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3", {"layer_types": ["linear_attention"] * 30}, "linear_attention"),
    ],
)
def test_what_would_change_the_maths_is_refused_by_name(
    family: str, keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse_config(config_of(family, **keys))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rms_norm_eps": NAN}, "rms_norm_eps is nan; expected a number above 0, up to 1"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; expected a number above 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True; expected a number above 0"),
        ({"rope_theta": -5}, "rope_theta is -5; expected a number above 1"),
        ({"rope_theta": INFINITE}, "rope_theta is inf; expected a number above 1, up to 1e+30"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_theta": 1.0, "rope_scaling": YARN}, "rope_theta is 1.0; expected a number above 1"),
        ({"rope_scaling": {"type": "linear", "factor": NAN}}, "factor is nan; expected a number"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor is True; expected a number"),
        ({"rope_scaling": YARN | {"beta_fast": -1}}, "beta_fast is -1; expected a number above 0"),
        ({"rope_scaling": YARN | {"beta_slow": NAN}}, "beta_slow is nan; expected a number"),
        ({"rope_scaling": YARN | {"mscale": -1, "mscale_all_dim": 1}}, "mscale is -1; expected"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor is 0; expected"),
        ({"rope_scaling": YARN | {"truncate": "no"}}, "truncate is 'no'; expected true or false"),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": 0.5}},
            "original_max_position_embeddings is 0.5; expected an integer in [1, 2147483648]",
        ),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1}},
            "high_freq_factor is 1; expected a number above 1, up to 1e+30",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected an object or null"),
        ({"rope_scaling": {"type": ["a"]}}, "rope_type is ['a']; expected one of default, linear"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; expected true or fal"),
        ({"attention_bias": 1}, "attention_bias is 1; expected true or false"),
        ({"mlp_bias": "no"}, "mlp_bias is 'no'; expected true or false"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000; expected an integer in [1, 131"),
        ({"vocab_size": 10**13}, "vocab_size is 10000000000000; expected an integer in [1, 16777"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648; expected an integer in"),
        ({"head_dim": 2.0}, "head_dim is 2.0; expected an integer in [1, 4096]"),
    ],
)
def test_a_value_out_of_its_range_names_key_value_and_range(
    keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse_config(config_of("llama", **keys))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "keys",
    [
        {"sliding_window": 2.5},
        {"sliding_window": -1},
        {"max_window_layers": "all"},
        {"use_sliding_window": "false"},
    ],
)
def test_a_window_out_of_its_range_is_named(keys: dict[str, Any]) -> None:
    (key,) = keys
    with pytest.raises(UserError, match=f"{key} is {keys[key]!r}; expected"):
        parse_config(config_of("qwen2", **{"use_sliding_window": True, **keys}))


def test_null_is_the_default_of_a_flag_and_of_a_number() -> None:
    keys = ("tie_word_embeddings", "attention_bias", "mlp_bias", "rms_norm_eps", "rope_theta")
    nulls = dict.fromkeys(keys)
    assert parse_config(config_of("llama", **nulls)) == parse_config(config_of("llama"))


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_keys_that_are_off_or_harmless_are_accepted(family: str) -> None:
    harmless = {
        "use_cache": True,
        "initializer_range": 0.02,
        "transformers_version": "5.0.0",
        "dtype": "bfloat16",
        "pretraining_tp": 1,
        "is_llama_config": True,
        "rope_interleaved": False,
        "quantization_config": None,
        "a_key_of_tomorrow": False,
    }
    assert parse_config(config_of(family, **harmless)) == parse_config(config_of(family))


def test_the_architecture_follows_from_the_model_type_where_it_is_not_named() -> None:
    for name, family in FAMILIES.items():
        config = config_of(family.model_type)
        del config["architectures"]
        assert parse_config(config).architecture == name


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"llama"', "[" * 200_000], ids=["none", "open", "list", "text", "deep"]
)
def test_a_config_that_is_no_json_object_is_one_clear_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "keys",
    [
        {"rms_norm_eps": "small"},
        {"rope_scaling": "linear"},
        {"rope_theta": ["x"]},
        {"head_dim": "a"},
    ],
)
def test_a_value_of_a_wrong_type_is_one_clear_line(keys: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama", **keys)))
    with pytest.raises(UserError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_folder_without_a_config_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_what_transformers_writes_itself_is_read(family: str, tmp_path: Path) -> None:
    """Transformers 5 writes rope_parameters and many defaults."""
    folder = write_tiny_model(tmp_path / "m", family=family)
    before = read_config(folder)
    AutoConfig.from_pretrained(folder).save_pretrained(tmp_path / "rewritten")
    assert read_config(tmp_path / "rewritten") == before


PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
        "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
        "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
    },
    "Llama-3.2-1B-Instruct": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "Qwen2.5-0.5B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896,
        "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.43.1", "use_cache": True,
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    config = parse_config(PUBLISHED[name])
    assert config.n_layers == PUBLISHED[name]["num_hidden_layers"]
    assert config.qk_norm == name.startswith("Qwen3")
    assert config.qkv_bias == name.startswith("Qwen2")
    window = 4096 if name.startswith("Mistral") else None
    assert config.sliding_windows == (window,) * config.n_layers
