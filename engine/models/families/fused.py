"""Llama-like families with fused projections or other tensor names: Phi-3 and 4, GLM-4, ChatGLM,
InternLM2 and 3, Baichuan.
"""

from __future__ import annotations

from typing import Any

from remora.configs.errors import ConfigError
from remora.engine.models.config import BlockConfig, DecoderConfig, TensorRule
from remora.engine.models.families.config_values import (
    RawConfig,
    biases,
    flag,
    gated,
    heads,
    number,
    partial_rotary,
    positive,
    refuse,
    renamed,
    rms,
    without_nulls,
)
from remora.engine.models.families.llama import like_llama
from remora.engine.models.families.tensor_rules import (
    GATE_UP,
    QKV,
    blocks,
    of_ends,
    of_layers,
    qkv_blocks,
    qkv_groups,
    unit_rows,
    unused,
)

LAYERS = r"model\.layers\."
BAICHUAN2_VOCABULARY = 125_696  # of those whose head has rows of length 1


def parse_phi3(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Phi-3, 3.5 and 4."""
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        refuse(raw, key, False, "only linear layers without biases are known")
    raw = {"num_key_value_heads": raw.get("num_attention_heads"), **raw}
    size = positive(raw, "intermediate_size")
    return like_llama(
        architecture,
        raw,
        windows=raw.get("sliding_window"),
        partial=partial_rotary(raw, 1.0),
        block=BlockConfig(norm=rms(raw, default=1e-5)),
        rules=(
            *of_layers(LAYERS, {"self_attn.qkv_proj": QKV}, qkv_blocks(heads(raw))),
            *of_layers(LAYERS, {"mlp.gate_up_proj": GATE_UP}, blocks(size, size)),
        ),
    )


def parse_glm(architecture: str, raw: RawConfig) -> DecoderConfig:
    """GLM-4 in transformers' format: interleaved RoPE in half of each head."""
    return _glm(architecture, raw)


def parse_glm4(architecture: str, raw: RawConfig) -> DecoderConfig:
    """GLM-4-0414: also norms after each part."""
    return _glm(
        architecture,
        raw,
        attention_out_norm="post_self_attn_layernorm",
        mlp_out_norm="post_mlp_layernorm",
    )


def _glm(architecture: str, raw: RawConfig, **norms: Any) -> DecoderConfig:
    size = positive(raw, "intermediate_size")
    return like_llama(
        architecture,
        {"head_dim": 128, **raw},
        attention={"qkv_bias": flag(raw, "attention_bias", True)},
        partial=partial_rotary(raw, 0.5),
        interleaved=True,
        block=BlockConfig(norm=rms(raw, default=1.5625e-07), **norms),
        rules=tuple(of_layers(LAYERS, {"mlp.gate_up_proj": GATE_UP}, blocks(size, size))),
    )


CHATGLM_WORDS = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
    "padded_vocab_size": "vocab_size",
    "seq_length": "max_position_embeddings",
}


def parse_chatglm(architecture: str, raw: RawConfig) -> DecoderConfig:
    """ChatGLM2, ChatGLM3 and GLM-4 in the format of their own code."""
    refuse(raw, "position_encoding_2d", False, "ChatGLM 1 is not known, later ones are")
    refuse(raw, "rmsnorm", True, "only root-mean-square norms are known")
    refuse(raw, "post_layer_norm", True, "only a norm after the last layer is known")
    refuse(
        raw,
        "apply_residual_connection_post_layernorm",
        False,
        "only the block's input is supported as the residual",
    )
    refuse(raw, "add_bias_linear", False, "only biases of q, k and v are known")
    theirs = renamed({k: v for k, v in raw.items() if k != "vocab_size"}, CHATGLM_WORDS)
    groups = raw.get("multi_query_group_num") if flag(raw, "multi_query_attention") else None
    theirs["num_key_value_heads"] = groups or raw.get("num_attention_heads")
    theirs["rope_theta"] = 10_000.0 * number(raw, "rope_ratio", 1.0)
    prefix = r"transformer\.encoder\.layers\."
    size = positive(theirs, "intermediate_size")
    shape = heads(theirs)
    names = {"self_attention.dense": "self_attn.o_proj", "mlp.dense_4h_to_h": "mlp.down_proj"}
    norms = {name: name for name in ("input_layernorm", "post_attention_layernorm")}
    return like_llama(
        architecture,
        theirs,
        attention={"qkv_bias": flag(raw, "add_qkv_bias")},
        partial=0.5,
        interleaved=True,
        block=BlockConfig(norm=rms(theirs, default=1e-5)),
        rules=(
            *of_layers(prefix, names | norms),
            *of_layers(prefix, {"self_attention.query_key_value": QKV}, qkv_blocks(shape)),
            *of_layers(prefix, {"mlp.dense_h_to_4h": GATE_UP}, blocks(size, size)),
            *of_ends(
                {
                    r"transformer\.embedding\.word_embeddings": "model.embed_tokens",
                    r"transformer\.encoder\.final_layernorm": "model.norm",
                    r"transformer\.output_layer": "lm_head",
                }
            ),
            *unused(r"transformer\.rotary_pos_emb\.inv_freq"),
        ),
    )


def parse_internlm2(architecture: str, raw: RawConfig) -> DecoderConfig:
    """InternLM2: q, k and v are fused in groups, one for each KV head."""
    raw = {"num_key_value_heads": raw.get("num_attention_heads"), **without_nulls(raw)}
    names: dict[str, str | tuple[str, ...]] = {
        "attention.wo": "self_attn.o_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
    }
    ends = {r"model\.tok_embeddings": "model.embed_tokens", "output": "lm_head"}
    return like_llama(
        architecture,
        raw,
        attention=biases(raw, "bias"),
        rules=(
            *of_layers(LAYERS, names),
            *of_layers(LAYERS, {"attention.wqkv": QKV}, qkv_groups(heads(raw))),
            *of_ends(ends),
        ),
    )


def parse_internlm3(architecture: str, raw: RawConfig) -> DecoderConfig:
    """InternLM3: Llama with biases under other keys."""
    bias = flag(raw, "bias")
    raw = {"num_key_value_heads": raw.get("num_attention_heads"), **without_nulls(raw)}
    return like_llama(
        architecture,
        raw,
        attention={"qkv_bias": flag(raw, "qkv_bias"), "out_bias": bias},
        mlp=gated(raw, bias=bias),
    )


def parse_baichuan(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Baichuan 1 and 2: 7B has RoPE, 13B has ALiBi and no `max_position_embeddings`."""
    raw = {**without_nulls(raw), "num_key_value_heads": raw.get("num_attention_heads")}
    shape = heads(raw)
    rules = list(of_layers(LAYERS, {"self_attn.W_pack": QKV}, qkv_blocks(shape)))
    if raw.get("vocab_size") == BAICHUAN2_VOCABULARY:
        rules.append(
            TensorRule(
                r"lm_head\.weight",
                ("lm_head.weight",),
                unit_rows,
                bars_updates="its rows are brought to length 1 as they load",
            )
        )
    if "max_position_embeddings" in raw:
        return like_llama(architecture, raw, rules=tuple(rules))
    if "model_max_length" not in raw:
        raise ConfigError(
            "config.json has neither max_position_embeddings, as Baichuan 7B, nor "
            "model_max_length, as Baichuan 13B."
        )
    raw["max_position_embeddings"] = raw["model_max_length"]
    rotates = [False] * positive(raw, "num_hidden_layers")
    return like_llama(
        architecture, raw, rotates=rotates, attention={"alibi": 1.0}, rules=tuple(rules)
    )
