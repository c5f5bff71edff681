"""GPT-2, GPT-NeoX (Pythia) and Falcon: layer norms, no gates, fused q, k and v."""

from __future__ import annotations

from remora.engine.models.config import BlockConfig, DecoderConfig, EmbeddingConfig, HeadConfig
from remora.engine.models.families.config_values import (
    RawConfig,
    alike,
    biases,
    eos_token_ids,
    flag,
    heads,
    layer_norm,
    number,
    partial_rotary,
    positive,
    refuse,
    renamed,
    ungated,
    without_nulls,
)
from remora.engine.models.families.llama import like_llama
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
    scale = {} if flag(raw, "scale_attn_weights", True) else {"scale": 1.0}
    shape = heads(raw, qkv_bias=True, out_bias=True, **scale)
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
        layers=alike(raw, NO_ROPE, ungated(raw, "gelu_new")),
        block=BlockConfig(norm=layer_norm(raw, "layer_norm_epsilon")),
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
    return like_llama(
        architecture,
        raw,
        attention=biases(raw, default=True),
        mlp=ungated(raw, "gelu"),
        partial=partial_rotary(raw, 0.25, key="rotary_pct"),
        block=BlockConfig(
            norm=layer_norm(raw, "layer_norm_eps"),
            parallel=flag(raw, "use_parallel_residual", True),
        ),
        rules=(
            *of_layers(prefix, {"attention.query_key_value": QKV}, qkv_groups(heads(raw))),
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
    raw = {
        "ffn_hidden_size": 4 * positive(raw, "hidden_size"),
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        **without_nulls(raw),
    }
    is_new, is_parallel = flag(raw, "new_decoder_architecture"), flag(raw, "parallel_attn", True)
    has_one_kv_head = flag(raw, "multi_query", True) and not is_new
    num_heads = positive(raw, "num_attention_heads")
    raw["num_key_value_heads"] = 1 if has_one_kv_head else raw.get("num_kv_heads", num_heads)
    raw["intermediate_size"] = raw["ffn_hidden_size"]
    shape, has_alibi = heads(raw), flag(raw, "alibi")
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
    return like_llama(
        architecture,
        raw,
        attention={**biases(raw, "bias"), "alibi": shape.scale if has_alibi else None},
        mlp=ungated(raw, "gelu", key="activation", bias=flag(raw, "bias")),
        rotates=[not has_alibi] * positive(raw, "num_hidden_layers"),
        block=BlockConfig(
            norm=layer_norm(raw, "layer_norm_epsilon"),
            mlp_norm="post_attention_layernorm" if has_two_norms or not is_parallel else None,
            parallel=is_parallel,
        ),
        rules=(
            *of_layers(r"transformer\.h\.", {"self_attention.query_key_value": QKV}, split),
            *of_layers(r"transformer\.h\.", names),
            *of_ends(ends),
        ),
    )
