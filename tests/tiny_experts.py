"""Tiny checkpoints of families with experts, or with latents in the place of K and V."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENTS = {
    "num_key_value_heads": 6,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "head_dim": 8,
}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
GRANITE = {
    "num_local_experts": 4,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
EXPERT_FAMILIES: Mapping[str, tuple[type, type, Mapping[str, Any]]] = {
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4}),
    "qwen2-moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {**CHOSEN, "num_experts": 6, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen3-moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**CHOSEN, "num_experts": 5, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, {"num_experts": 4, "num_experts_per_tok": 2}),
    "granite-moe": (GraniteMoeConfig, GraniteMoeForCausalLM, GRANITE),
    "granite-moe-shared": (
        GraniteMoeSharedConfig,
        GraniteMoeSharedForCausalLM,
        {**GRANITE, "shared_intermediate_size": 56, "tie_word_embeddings": True},
    ),
    "gpt-oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    ),
    "llama4": (
        Llama4TextConfig,
        Llama4ForCausalLM,
        {
            "num_local_experts": 4,
            "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 24,
            "floor_scale": 8,
            "attn_scale": 0.5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "glm4-moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {**CHOSEN, "n_routed_experts": 6, "use_qk_norm": True, "routed_scaling_factor": 1.5},
    ),
    "glm4-moe-lite": (
        Glm4MoeLiteConfig,
        Glm4MoeLiteForCausalLM,
        {**CHOSEN, **LATENTS, "n_routed_experts": 6},
    ),
    "ernie4.5-moe": (
        Ernie4_5_MoeConfig,
        Ernie4_5_MoeForCausalLM,
        {
            "head_dim": 16,
            "moe_intermediate_size": 48,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "deepseek-v2": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        {
            **CHOSEN,
            **LATENTS,
            **GROUPS,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 4.0,
            "rope_parameters": DEEPSEEK_YARN,
        },
    ),
    "deepseek-v2-lite": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        {**CHOSEN, **LATENTS, "n_routed_experts": 6, "q_lora_rank": None},
    ),
    "deepseek-v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {
            **CHOSEN,
            **LATENTS,
            **GROUPS,
            "first_k_dense_replace": 1,
            "rope_parameters": {**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}
