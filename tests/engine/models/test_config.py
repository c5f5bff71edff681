from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.engine.models.architectures import parse_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}


def test_llama_without_kv_heads_or_head_dim_derives_them() -> None:
    config = parse_config(LLAMA)

    assert config.num_kv_heads == 4
    assert config.head_dim == 16
    assert config.windows == (None,) * 4
    assert not config.head.tied


@pytest.mark.parametrize(
    ("eos", "expected"), [(None, ()), (2, (2,)), ([128001, 128008], (128001, 128008))]
)
def test_end_of_sequence_may_be_one_id_or_several(eos: Any, expected: tuple[int, ...]) -> None:
    assert parse_config({**LLAMA, "eos_token_id": eos}).eos_token_ids == expected


@pytest.mark.parametrize(
    ("settings", "windows"),
    [({}, (4096,) * 4), ({"sliding_window": None}, (None,) * 4), ({"sliding_window": 8}, (8,) * 4)],
)
def test_mistral_has_a_window_on_every_layer_unless_it_is_null(
    settings: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}

    assert parse_config({**mistral, **settings}).windows == windows


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({"sliding_window": 8, "max_window_layers": 1}, (None,) * 4),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
    ],
)
def test_qwen2_has_windows_only_where_it_says_so(
    settings: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert parse_config({**QWEN2, **settings}).windows == windows


def test_families_differ_in_bias_and_head_norms() -> None:
    qwen3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"]}

    assert parse_config(QWEN2).attention.qkv_bias
    assert not parse_config(QWEN2).attention.out_bias
    assert parse_config({**LLAMA, "attention_bias": True}).attention.out_bias
    assert parse_config(qwen3).attention.head_norm is not None
    assert parse_config(qwen3).head_dim == 128


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16},
}


@pytest.mark.parametrize("kind", ROPES)
def test_both_spellings_of_rope_settings_mean_the_same(kind: str) -> None:
    settings = ROPES[kind]
    new = {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **settings}}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": kind, **settings}}

    rope = parse_config({**LLAMA, **new}).layers[0].rope

    assert rope.kind == kind
    assert rope.theta == 5e5
    assert rope == parse_config({**LLAMA, **old}).layers[0].rope


@pytest.mark.parametrize(
    ("kind", "max_position"), [("linear", 256), ("dynamic", 512), ("llama3", 256), ("yarn", 512)]
)
def test_rope_scaling_decides_how_long_a_sequence_may_be(kind: str, max_position: int) -> None:
    scaling = {"rope_scaling": {"rope_type": kind, **ROPES[kind]}}

    assert parse_config({**LLAMA, **scaling}).max_position == max_position


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"architectures": ["LlamoForCausalLM"]},
            "LlamoForCausalLM .* own .the nearest: LlamaForCausalLM",
        ),
        ({"architectures": None}, "names no architecture"),
        ({"hidden_act": "softplus"}, "hidden_act in config.json is 'softplus'; known are silu"),
        ({"hidden_size": None}, "hidden_size in config.json is missing"),
        ({"vocab_size": "512"}, "vocab_size in config.json is '512'"),
        ({"num_attention_heads": None}, "num_attention_heads in config.json is missing"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) .* multiple of .* \(3\)"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor in config.json is 0.5"),
        ({"rope_scaling": {"type": "polar"}}, "'polar'; known are default, linear, dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' in config.json lack factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "speed": 1}}, "hold speed, which"),
        ({"rope_parameters": {"full_attention": {}}}, "hold full_attention"),
    ],
)
def test_what_would_change_the_numbers_and_is_not_known_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**LLAMA, **settings})


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("Qwen2ForCausalLM", "is_causal", False),
        ("MiniCPMForCausalLM", "num_experts", 8),
        ("Starcoder2ForCausalLM", "norm_type", "rms_norm"),
        ("Starcoder2ForCausalLM", "mlp_type", "gated"),
        ("Phi3ForCausalLM", "lm_head_bias", True),
        ("ChatGLMModel", "position_encoding_2d", True),
        ("FalconForCausalLM", "apply_residual_connection_post_layernorm", True),
    ],
)
def test_what_a_family_does_otherwise_is_refused(architecture: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key} in config.json is {value!r}"):
        parse_config({**QWEN2, "architectures": [architecture], key: value})


@pytest.mark.parametrize("key", sorted(LLAMA.keys() - {"hidden_act", "rms_norm_eps"}))
def test_a_key_that_is_not_there_is_named(key: str) -> None:
    raw = {name: value for name, value in LLAMA.items() if name != key}

    with pytest.raises(ConfigError, match="no architecture" if key == "architectures" else key):
        parse_config(raw)


def test_layer_types_must_cover_every_layer() -> None:
    settings = {"use_sliding_window": True, "layer_types": ["full_attention", "mamba"]}

    with pytest.raises(ConfigError, match=r"must hold 4 entries .* it has 2, with mamba"):
        parse_config({**QWEN2, **settings})
