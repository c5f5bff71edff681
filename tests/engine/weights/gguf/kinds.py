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

LLAMA = {"head_dim": 12}
GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 5.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
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
LATENTS_SAID = {
    "rope.scaling.yarn_log_multiplier": 0.0707,
    "rope.dimension_count": 4,
    "attention.head_count_kv": 1,
    "attention.key_length": 20,
    "attention.value_length": 16,
    "attention.key_length_mla": 12,
    "attention.value_length_mla": 6,
}
# Older files: the product whole, the sizes of heads under attention's keys.
LATENTS_SAID_BEFORE = {
    "rope.scaling.yarn_log_multiplier": 0.0707,
    "rope.dimension_count": 4,
    "attention.key_length": 12,
    "attention.value_length": 6,
    "expert_gating_func": 1,
}
FALCON = {"hidden_size": 48, "ffn_hidden_size": 96, "alibi": False, "parallel_attn": True}
LONGROPE = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 4.0, 8.0]}

KINDS = {
    "llama": Kind("llama", "llama", LLAMA, {"rope.dimension_count": 12}, permuted),
    "mixtral": Kind(
        "llama",
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12},
        {},
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
        {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1},
        permuted,
    ),
    "qwen2moe": Kind(
        "qwen2moe",
        "qwen2_moe",
        {**QWEN_EXPERTS, "shared_expert_intermediate_size": 24, "norm_topk_prob": True},
        {},
        flat_gate,
    ),
    "qwen3moe": Kind(
        "qwen3moe",
        "qwen3_moe",
        {**QWEN_EXPERTS, "norm_topk_prob": True, "head_dim": 16},
    ),
    "olmoe": Kind(
        "olmoe",
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
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
        {},
        plus_one,
    ),
    "gemma3": Kind(
        "gemma3",
        "gemma3_text",
        {**WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
        {"rope.freq_base": 1_000_000.0},
        plus_one,
    ),
    "phi2": Kind(
        "phi2",
        "phi",
        {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-3},
    ),
    "phi3": Kind("phi3", "phi3", {"sliding_window": 8}),
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
    "granite": Kind("granite", "granite", GRANITE, {}, permuted),
    "granitemoe": Kind(
        "granitemoe",
        "granitemoeshared",
        {
            **GRANITE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
        {},
        granite_moe,
    ),
    # Granite's factors in MiniCPM's words.
    "minicpm": Kind(
        "minicpm",
        "granite",
        {**GRANITE, "attention_multiplier": 12**-0.5},
        {"attention.scale": None},
        permuted,
    ),
    # q, k and v, which its checkpoints have in one, are apart in GGUF.
    "internlm2": Kind("internlm2", "llama", {**LLAMA, "attention_bias": True}, {}, permuted),
    "baichuan": Kind("baichuan", "llama", {**LLAMA, **ALL_HEADS}, {}, permuted),
    "chatglm": Kind(
        "chatglm",
        "glm",
        {"head_dim": 12, "rms_norm_eps": 1e-3, "attention_bias": True},
        {"attention.key_length": None},
    ),
    "glm4": Kind("glm4", "glm4", {"head_dim": 12, "attention_bias": True}),
    "stablelm": Kind(
        "stablelm",
        "stablelm",
        {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-3},
    ),
    "stablelm, 12B": Kind(
        "stablelm",
        "stablelm",
        {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.5},
        {"use_parallel_residual": True},
    ),
    "starcoder2": Kind(
        "starcoder2",
        "starcoder2",
        {"sliding_window": 8, "norm_epsilon": 1e-3, "use_bias": False},
    ),
    "command-r": Kind(
        "command-r",
        "cohere",
        {"use_qk_norm": True, "logit_scale": 0.25, "layer_norm_eps": 1e-3},
        {"rope.scaling.type": "none"},
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
    ),
    "gpt2": Kind(
        "gpt2",
        "gpt2",
        {"n_embd": 48, "n_layer": 2, "n_head": 4, "layer_norm_epsilon": 1e-3},
        {"context_length": 128, "feed_forward_length": 192, "attention.head_count_kv": None},
        transposed,
    ),
    "gptneox": Kind(
        "gptneox",
        "gpt_neox",
        {**ALL_HEADS, "rotary_pct": 0.5, "layer_norm_eps": 1e-3, "use_parallel_residual": False},
        {"rope.freq_base": None, "use_parallel_residual": False},
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
        {"rope.freq_base": None, "attention.head_count_kv": 1},
        falcon_qkv,
    ),
    "falcon, 40B": Kind(
        "falcon",
        "falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "layer_norm_epsilon": 1e-3},
        {"rope.freq_base": None},
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
        {"expert_feed_forward_length": 32},
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
        {"expert_gating_func": 2},
        corrected,
    ),
    "deepseek2": Kind(
        "deepseek2",
        "deepseek_v3",
        {**LATENTS, "n_group": 2, "topk_group": 1},
        {**LATENTS_SAID, "expert_gating_func": 2},
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
        LATENTS_SAID,
        latent_halves,
    ),
}
