"""GPT-2, GPT-NeoX (Pythia) and Falcon: layer norms, no gates, fused q, k and v."""

from __future__ import annotations

from remora.engine.models.config import (
    BlockConfig,
    DecoderConfig,
    EmbeddingConfig,
    HeadConfig,
    MLPConfig,
    NormConfig,
)
from remora.engine.models.families.config_values import (
    RawConfig,
    activation,
    alike,
    eos_token_ids,
    flag,
    heads,
    number,
    partial_rotary,
    positive,
    refuse,
    renamed,
    rope,
    without_nulls,
)
from remora.engine.models.families.tensor_rules import (
    QKV,
    of_ends,
    of_layers,
    qkv_blocks,
    qkv_groups,
    unused,
)
from remora.engine.models.rope_config import NO_ROPE

GPT2_WORDS = {
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
}
TRANSFORMER = r"(?:transformer\.)?h\."


def parse_gpt2(architecture: str, raw: RawConfig) -> DecoderConfig:
    """GPT-2: learned positions; weights are stored transposed."""
    refuse(raw, "scale_attn_by_inverse_layer_idx", False, "one scale for all layers is known")
    refuse(raw, "add_cross_attention", False, "only decoders without an encoder are known")
    raw = without_nulls(renamed(raw, GPT2_WORDS))
    size = positive(raw, "hidden_size")
    raw = {"intermediate_size": 4 * size, **raw}
    raw["num_key_value_heads"] = raw.get("num_attention_heads")
    shape = heads(raw, qkv_bias=True, out_bias=True)
    if not flag(raw, "scale_attn_weights", True):
        shape = heads(raw, qkv_bias=True, out_bias=True, scale=1.0)
    transposed_modules = {
        "attn.c_proj": "self_attn.o_proj",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    }
    norms = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
    ends = {"wte": "model.embed_tokens", "wpe": "model.embed_positions", "ln_f": "model.norm"}
    num_positions = positive(raw, "max_position_embeddings")
    return DecoderConfig(
        architecture=architecture,
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=size,
        max_position=num_positions,
        attention=shape,
        layers=alike(raw, NO_ROPE, _plain(raw, "gelu_new")),
        block=BlockConfig(norm=_norm(raw, "layer_norm_epsilon")),
        embedding=EmbeddingConfig(num_positions=num_positions),
        head=HeadConfig(tied=flag(raw, "tie_word_embeddings", True)),
        eos_token_ids=eos_token_ids(raw),
        rules=(
            *of_layers(TRANSFORMER, {"attn.c_attn": QKV}, qkv_blocks(shape), is_transposed=True),
            *of_layers(TRANSFORMER, transposed_modules, is_transposed=True),
            *of_layers(TRANSFORMER, norms),
            *of_ends({rf"(?:transformer\.)?{theirs}": ours for theirs, ours in ends.items()}),
            *unused(TRANSFORMER + r"\d+\.attn\.(masked_)?bias"),
        ),
    )


def parse_gpt_neox(architecture: str, raw: RawConfig) -> DecoderConfig:
    """GPT-NeoX, Pythia: RoPE in a quarter of each head."""
    raw = {
        "rope_theta": number(raw, "rotary_emb_base", 10_000.0),
        **without_nulls(raw),
        "num_key_value_heads": raw.get("num_attention_heads"),
    }
    bias = flag(raw, "attention_bias", True)
    shape = heads(raw, qkv_bias=bias, out_bias=bias)
    partial = partial_rotary(raw, 0.25, key="rotary_pct")
    turn, max_position = rope(raw, shape.head_dim, partial=partial)
    prefix = r"gpt_neox\.layers\."
    names = {
        "attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.up_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
    }
    ends = {
        r"gpt_neox\.embed_in": "model.embed_tokens",
        r"gpt_neox\.final_layer_norm": "model.norm",
        "embed_out": "lm_head",
    }
    return DecoderConfig(
        architecture=architecture,
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=positive(raw, "hidden_size"),
        max_position=max_position,
        attention=shape,
        layers=alike(raw, turn, _plain(raw, "gelu")),
        block=BlockConfig(
            norm=_norm(raw, "layer_norm_eps"), parallel=flag(raw, "use_parallel_residual", True)
        ),
        head=HeadConfig(tied=flag(raw, "tie_word_embeddings")),
        eos_token_ids=eos_token_ids(raw),
        rules=(
            *of_layers(prefix, {"attention.query_key_value": QKV}, qkv_groups(shape)),
            *of_layers(prefix, names),
            *of_ends(ends),
            *unused(prefix + r"\d+\.attention\.(masked_)?bias"),
        ),
    )


def parse_falcon(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Falcon 1 and 2: 1B with ALiBi, 7B with one KV head, 40B and 11B with several."""
    refuse(
        raw,
        "apply_residual_connection_post_layernorm",
        False,
        "only the block's input is supported as the residual",
    )
    raw = {"ffn_hidden_size": 4 * positive(raw, "hidden_size"), **without_nulls(raw)}
    is_new, is_parallel = flag(raw, "new_decoder_architecture"), flag(raw, "parallel_attn", True)
    has_one_kv_head = flag(raw, "multi_query", True) and not is_new
    num_heads = positive(raw, "num_attention_heads")
    raw["num_key_value_heads"] = 1 if has_one_kv_head else raw.get("num_kv_heads", num_heads)
    raw["intermediate_size"] = raw["ffn_hidden_size"]
    bias = flag(raw, "bias")
    shape = heads(raw, qkv_bias=bias, out_bias=bias)
    turn, max_position = rope({"max_position_embeddings": 2048, **raw}, shape.head_dim)
    if flag(raw, "alibi"):
        shape, turn = heads(raw, qkv_bias=bias, out_bias=bias, alibi=shape.scale), NO_ROPE
    mlp = MLPConfig(
        size=positive(raw, "intermediate_size"),
        activation=activation(raw, "activation", "gelu"),
        gated=False,
        bias=bias,
    )
    has_two_norms = is_parallel and is_new and raw.get("num_ln_in_parallel_attn", 2) == 2
    is_parallel = is_parallel or is_new
    names = {
        "self_attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.up_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
        "ln_attn": "input_layernorm",
        "ln_mlp": "post_attention_layernorm",
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
    }
    ends = {
        r"transformer\.word_embeddings": "model.embed_tokens",
        r"transformer\.ln_f": "model.norm",
    }
    split = qkv_blocks(shape) if has_one_kv_head else qkv_groups(shape)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=positive(raw, "hidden_size"),
        max_position=max_position,
        attention=shape,
        layers=alike(raw, turn, mlp),
        block=BlockConfig(
            norm=_norm(raw, "layer_norm_epsilon"),
            mlp_norm="post_attention_layernorm" if has_two_norms or not is_parallel else None,
            parallel=is_parallel,
        ),
        head=HeadConfig(tied=flag(raw, "tie_word_embeddings", True)),
        eos_token_ids=eos_token_ids(raw),
        rules=(
            *of_layers(r"transformer\.h\.", {"self_attention.query_key_value": QKV}, split),
            *of_layers(r"transformer\.h\.", names),
            *of_ends(ends),
        ),
    )


def _plain(raw: RawConfig, act: str) -> MLPConfig:
    return MLPConfig(
        size=positive(raw, "intermediate_size"),
        activation=activation(raw, default=act),
        gated=False,
        bias=True,
    )


def _norm(raw: RawConfig, key: str) -> NormConfig:
    return NormConfig(kind="layer", eps=number(raw, key, 1e-5), bias=True)
