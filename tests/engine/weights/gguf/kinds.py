"""Tiny models of each kind that GGUF knows: their settings, and what a converter writes of them.

Kinds that transformers does not have are written from checkpoints of one that computes the same.
"""

from __future__ import annotations

from typing import Any

from tests.engine.weights.gguf.converter import (
    Kind,
    corrected,
    falcon_qkv,
    flat_gate,
    fused_experts,
    granite_moe,
    latent_halves,
    neox_qkv,
    permuted,
    plus_one,
    transposed,
)

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ALL_HEADS = {"num_key_value_heads": 4}
WINDOW = {"head_dim": 16, "sliding_window": 8, "tie_word_embeddings": True}
EPS = "attention.layer_norm_epsilon"


def _some_experts(**further: Any) -> dict[str, Any]:
    return {"expert_count": 4, "expert_feed_forward_length": 16, **further}


LLAMA = {"head_dim": 12}
GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 5.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}
GRANITE_SAID = {
    "attention.scale": 0.3,
    "embedding_scale": 5.0,
    "residual_scale": 0.4,
    "logit_scale": 3.0,
}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_SAID = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
LATENTS = {
    **ALL_HEADS,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}
LATENTS_SAID = _some_experts(
    **{
        **YARN_SAID,
        "rope.scaling.yarn_log_multiplier": 0.0707,
        "rope.dimension_count": 4,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": 20,
        "attention.kv_lora_rank": 16,
        "attention.key_length": 20,
        "attention.value_length": 16,
        "attention.key_length_mla": 12,
        "attention.value_length_mla": 6,
        "expert_shared_count": 2,
        "leading_dense_block_count": 1,
        "expert_weights_scale": 1.5,
    }
)
# Older files: the product whole, the sizes of heads under attention's keys.
LATENTS_SAID_BEFORE = {
    **LATENTS_SAID,
    "attention.head_count_kv": 4,
    "attention.key_length": 12,
    "attention.value_length": 6,
    "attention.key_length_mla": None,
    "attention.value_length_mla": None,
    "expert_group_count": 2,
    "expert_group_used_count": 1,
    "expert_gating_func": 1,
}
FALCON = {"hidden_size": 48, "ffn_hidden_size": 96, "alibi": False, "parallel_attn": True}
FALCON_SAID = {"feed_forward_length": 96, EPS: 1e-3, "rope.freq_base": None}
LONGROPE = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 4.0, 8.0]}

KINDS = {
    "llama": Kind("llama", "llama", LLAMA, {"rope.dimension_count": 12}, permuted),
    "mixtral": Kind(
        "llama",
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12},
        {"expert_count": 4},
        permuted,
        {"block_sparse_moe": "feed_forward", "model.layers": "layers"},
    ),
    "mistral3": Kind(
        "mistral3",
        "ministral3",
        {
            "head_dim": 12,
            "sliding_window": None,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        {
            **YARN_SAID,
            "rope.scaling.original_context_length": 8,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.1,
        },
        permuted,
    ),
    "qwen2moe": Kind(
        "qwen2moe",
        "qwen2_moe",
        {**QWEN_EXPERTS, "shared_expert_intermediate_size": 24, "norm_topk_prob": True},
        _some_experts(expert_shared_feed_forward_length=24, expert_weights_norm=True),
        flat_gate,
    ),
    "qwen3moe": Kind(
        "qwen3moe",
        "qwen3_moe",
        {**QWEN_EXPERTS, "norm_topk_prob": True, "head_dim": 16},
        _some_experts(),
    ),
    "olmoe": Kind(
        "olmoe",
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
        {"expert_count": 4},
    ),
    "gemma": Kind("gemma", "gemma", {"head_dim": 16}, {"rope.freq_base": None}, plus_one),
    "gemma2": Kind(
        "gemma2",
        "gemma2",
        {
            **WINDOW,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        {
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        plus_one,
    ),
    "gemma3": Kind(
        "gemma3",
        "gemma3_text",
        {**WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
        {"attention.sliding_window": 8, "rope.freq_base": 1_000_000.0},
        plus_one,
    ),
    "phi2": Kind(
        "phi2",
        "phi",
        {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-3},
        {EPS: 1e-3, "rope.dimension_count": 6},
    ),
    "phi3": Kind("phi3", "phi3", {"sliding_window": 8}, {"attention.sliding_window": 8}),
    "phi3, longrope": Kind(
        "phi3",
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
                "original_max_position_embeddings": 32,
                **LONGROPE,
            },
        },
        {
            "attention.sliding_window": 0,
            "rope.dimension_count": 6,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": 1.1832159566199232,
        },
        extra={
            "rope_factors_short.weight": LONGROPE["short_factor"],
            "rope_factors_long.weight": LONGROPE["long_factor"],
        },
    ),
    "olmo2": Kind("olmo2", "olmo2"),
    "smollm3": Kind(
        "smollm3", "smollm3", {"num_hidden_layers": 4, "use_sliding_window": False}, {}, permuted
    ),
    "granite": Kind("granite", "granite", GRANITE, GRANITE_SAID, permuted),
    "granitemoe": Kind(
        "granitemoe",
        "granitemoeshared",
        {
            **GRANITE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
        {**GRANITE_SAID, "expert_count": 4, "expert_shared_feed_forward_length": 24},
        granite_moe,
    ),
    # Granite's factors in MiniCPM's words.
    "minicpm": Kind(
        "minicpm",
        "granite",
        {**GRANITE, "attention_multiplier": 12**-0.5},
        {key: value for key, value in GRANITE_SAID.items() if key != "attention.scale"},
        permuted,
    ),
    # q, k and v, which its checkpoints have in one, are apart in GGUF.
    "internlm2": Kind("internlm2", "llama", {**LLAMA, "attention_bias": True}, {}, permuted),
    "baichuan": Kind(
        "baichuan", "llama", {**LLAMA, **ALL_HEADS}, {"rope.dimension_count": 12}, permuted
    ),
    "chatglm": Kind(
        "chatglm",
        "glm",
        {"head_dim": 12, "rms_norm_eps": 1e-3, "attention_bias": True},
        {"rope.dimension_count": 6, "attention.key_length": None},
    ),
    "glm4": Kind(
        "glm4", "glm4", {"head_dim": 12, "attention_bias": True}, {"rope.dimension_count": 6}
    ),
    "stablelm": Kind(
        "stablelm",
        "stablelm",
        {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-3},
        {EPS: 1e-3, "rope.dimension_count": 6},
    ),
    "stablelm, 12B": Kind(
        "stablelm",
        "stablelm",
        {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.5},
        {EPS: 1e-5, "rope.dimension_count": 6, "use_parallel_residual": True},
    ),
    "starcoder2": Kind(
        "starcoder2",
        "starcoder2",
        {"sliding_window": 8, "norm_epsilon": 1e-3, "use_bias": False},
        {EPS: 1e-3, "attention.sliding_window": 8},
    ),
    "command-r": Kind(
        "command-r",
        "cohere",
        {"use_qk_norm": True, "logit_scale": 0.25, "layer_norm_eps": 1e-3},
        {EPS: 1e-3, "logit_scale": 0.25, "rope.scaling.type": "none"},
    ),
    "cohere2": Kind(
        "cohere2",
        "cohere2",
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "logit_scale": 0.25,
            "head_dim": 12,
            "layer_norm_eps": 1e-3,
        },
        {EPS: 1e-3, "logit_scale": 0.25, "attention.sliding_window": 8},
    ),
    "gpt2": Kind(
        "gpt2",
        "gpt2",
        {"n_embd": 48, "n_layer": 2, "n_head": 4, "layer_norm_epsilon": 1e-3},
        {
            "block_count": 2,
            "context_length": 128,
            "embedding_length": 48,
            "feed_forward_length": 192,
            "attention.head_count": 4,
            "attention.head_count_kv": None,
            EPS: 1e-3,
        },
        transposed,
    ),
    "gptneox": Kind(
        "gptneox",
        "gpt_neox",
        {**ALL_HEADS, "rotary_pct": 0.5, "layer_norm_eps": 1e-3, "use_parallel_residual": False},
        {
            EPS: 1e-3,
            "rope.dimension_count": 6,
            "rope.freq_base": None,
            "use_parallel_residual": False,
        },
        neox_qkv,
    ),
    "falcon": Kind(
        "falcon",
        "falcon",
        {
            **FALCON,
            "multi_query": True,
            "new_decoder_architecture": False,
            "layer_norm_epsilon": 1e-3,
        },
        {**FALCON_SAID, "attention.head_count_kv": 1},
        falcon_qkv,
    ),
    "falcon, 40B": Kind(
        "falcon",
        "falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "layer_norm_epsilon": 1e-3},
        {**FALCON_SAID, "attention.head_count_kv": 2},
        falcon_qkv,
    ),
    "gpt-oss": Kind(
        "gpt-oss",
        "gpt_oss",
        {
            "head_dim": 12,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
        {
            **YARN_SAID,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            "expert_count": 4,
            "expert_feed_forward_length": 32,
            "attention.sliding_window": 8,
        },
        fused_experts,
    ),
    "llama4": Kind(
        "llama4",
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "num_local_experts": 4,
            "intermediate_size_mlp": 40,
            "interleave_moe_layer_step": 2,
        },
        {
            "expert_count": 4,
            "expert_used_count": 1,
            "feed_forward_length": 40,
            "expert_feed_forward_length": 32,
            "interleave_moe_layer_step": 2,
        },
        fused_experts,
    ),
    "glm4moe": Kind(
        "glm4moe",
        "glm4_moe",
        {
            "head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": False,
            "n_group": 2,
            "topk_group": 1,
            "use_qk_norm": True,
            "attention_bias": True,
        },
        _some_experts(
            **{
                "rope.dimension_count": 6,
                "expert_shared_count": 1,
                "leading_dense_block_count": 0,
                "expert_gating_func": 2,
                "expert_group_count": 2,
                "expert_group_used_count": 1,
                "expert_weights_scale": 1.5,
                "expert_weights_norm": False,
            }
        ),
        corrected,
    ),
    "deepseek2": Kind(
        "deepseek2",
        "deepseek_v3",
        {**LATENTS, "n_group": 2, "topk_group": 1},
        {
            **LATENTS_SAID,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
        },
        latent_halves,
    ),
    "deepseek2, V2": Kind(
        "deepseek2",
        "deepseek_v2",
        {**LATENTS, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
        LATENTS_SAID_BEFORE,
    ),
    "deepseek2, V2 Lite": Kind(
        "deepseek2",
        "deepseek_v2",
        {**LATENTS, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        {
            key: value
            for key, value in LATENTS_SAID.items()
            if key not in ("attention.q_lora_rank", "expert_gating_func")
        },
        latent_halves,
    ),
}
