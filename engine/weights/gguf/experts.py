"""GGUF families with experts, and those with latent attention.

Settings missing in the metadata take the values of the published models, as in llama.cpp's code.
"""

from __future__ import annotations

from typing import Any

from remora.engine.weights.gguf.dense import granite_factors
from remora.engine.weights.gguf.family import GGUFFamily, decimal, refused, whole
from remora.engine.weights.gguf.file import GGUFFile
from remora.engine.weights.gguf.rope import rope_of

AFTER_ATTENTION = {"post_attention_norm": "post_attention_layernorm"}
SOFTMAX, SIGMOID = 1, 2  # as `expert_gating_func`, where 0 is not said
LLAMA4_CHUNK = 8192
MAVERICK_EXPERTS = 128
# Files from before 2025-10 lack the number of expert groups and of those chosen.
DEEPSEEK_GROUPS = {160: (8, 3), 256: (8, 4)}


def _experts(file: GGUFFile) -> dict[str, Any]:
    return {
        "num_experts": whole(file, "expert_count"),
        "num_experts_per_tok": whole(file, "expert_used_count"),
        "moe_intermediate_size": whole(file, "expert_feed_forward_length"),
    }


def _local_experts(file: GGUFFile) -> dict[str, Any]:
    """Return the experts' settings under Mixtral's keys."""
    return {
        "num_local_experts": whole(file, "expert_count"),
        "num_experts_per_tok": whole(file, "expert_used_count"),
    }


def _routed_experts(file: GGUFFile) -> dict[str, Any]:
    """Return the experts' settings under DeepSeek's keys."""
    return {
        "n_routed_experts": whole(file, "expert_count"),
        "num_experts_per_tok": whole(file, "expert_used_count"),
        "moe_intermediate_size": whole(file, "expert_feed_forward_length"),
        "n_shared_experts": whole(file, "expert_shared_count", 0),
        "first_k_dense_replace": whole(file, "leading_dense_block_count", 0),
        "routed_scaling_factor": decimal(file, "expert_weights_scale", 1.0),
        "norm_topk_prob": bool(file.setting("expert_weights_norm", False)),
    }


def _qwen2_moe(file: GGUFFile) -> dict[str, Any]:
    return {
        **_experts(file),
        "norm_topk_prob": bool(file.setting("expert_weights_norm", False)),
        "shared_expert_intermediate_size": whole(file, "expert_shared_feed_forward_length"),
    }


def _olmoe(file: GGUFFile) -> dict[str, Any]:
    return {
        "num_experts": whole(file, "expert_count"),
        "num_experts_per_tok": whole(file, "expert_used_count"),
        "norm_topk_prob": bool(file.setting("expert_weights_norm", False)),
    }


def _granite_moe(file: GGUFFile) -> dict[str, Any]:
    return {
        **granite_factors(file),
        **_local_experts(file),
        "shared_intermediate_size": whole(file, "expert_shared_feed_forward_length", 0),
    }


def _gpt_oss(file: GGUFFile) -> dict[str, Any]:
    rope = rope_of(file, whole(file, "attention.key_length"))
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return {
        **_local_experts(file),
        "intermediate_size": whole(file, "expert_feed_forward_length"),
        "sliding_window": whole(file, "attention.sliding_window"),
        "rope_parameters": rope,
    }


def _llama4(file: GGUFFile) -> dict[str, Any]:
    if whole(file, "attention.sliding_window", LLAMA4_CHUNK) == 0:
        raise refused(file, "holds a Llama 4 without chunks, which is not known here")
    return {
        **_local_experts(file),
        "intermediate_size": whole(file, "expert_feed_forward_length"),
        "intermediate_size_mlp": whole(file, "feed_forward_length"),
        "interleave_moe_layer_step": whole(file, "interleave_moe_layer_step"),
        "attention_chunk_size": LLAMA4_CHUNK,
        "use_qk_norm": whole(file, "expert_count") != MAVERICK_EXPERTS,
    }


def _glm4_moe(file: GGUFFile) -> dict[str, Any]:
    return {
        **_routed_experts(file),
        "n_group": whole(file, "expert_group_count", 1),
        "topk_group": whole(file, "expert_group_used_count", 1),
        "attention_bias": "blk.0.attn_q.bias" in file.shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.shapes,
    }


def _latents(file: GGUFFile) -> dict[str, Any]:
    """Return the settings of latent attention, for files of both layouts.

    Newer files have the heads' sizes under separate keys; the attention keys hold cached sizes.
    """
    rotated = whole(file, "rope.dimension_count")
    key = whole(file, "attention.key_length_mla", file.setting("attention.key_length"))
    value = whole(file, "attention.value_length_mla", file.setting("attention.value_length"))
    rope = rope_of(file, rotated)
    log_multiplier = file.setting("rope.scaling.yarn_log_multiplier", 0.0)
    if rope["rope_type"] == "yarn" and log_multiplier:
        everywhere = round(log_multiplier * 10, 4)
        rope |= {"mscale": everywhere, "mscale_all_dim": everywhere}
    return {
        "q_lora_rank": file.setting("attention.q_lora_rank"),
        "kv_lora_rank": whole(file, "attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "rope_parameters": rope,
    }


def _groups(file: GGUFFile) -> tuple[int, int]:
    groups, best = DEEPSEEK_GROUPS.get(whole(file, "expert_count"), (1, 1))
    return (
        whole(file, "expert_group_count", groups),
        whole(file, "expert_group_used_count", best),
    )


def _deepseek_v2(file: GGUFFile) -> dict[str, Any]:
    gating = whole(file, "expert_gating_func", SOFTMAX)
    if gating not in (0, SOFTMAX):
        raise refused(file, f"chooses experts by expert_gating_func {gating}, not known here")
    groups, best = _groups(file)
    return {
        **_latents(file),
        **_routed_experts(file),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": best,
    }


def _deepseek_v3(file: GGUFFile) -> dict[str, Any]:
    groups, best = _groups(file)
    return {**_latents(file), **_routed_experts(file), "n_group": groups, "topk_group": best}


EXPERTS = {
    "qwen2moe": GGUFFamily(
        architecture="Qwen2MoeForCausalLM", model_type="qwen2_moe", settings=_qwen2_moe
    ),
    "qwen3moe": GGUFFamily(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        settings=lambda file: {**_experts(file), "norm_topk_prob": True},
    ),
    "olmoe": GGUFFamily(architecture="OlmoeForCausalLM", model_type="olmoe", settings=_olmoe),
    "granitemoe": GGUFFamily(
        architecture="GraniteMoeSharedForCausalLM",
        model_type="granitemoeshared",
        is_permuted=True,
        settings=_granite_moe,
    ),
    "gpt-oss": GGUFFamily(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        names=AFTER_ATTENTION,
        settings=_gpt_oss,
    ),
    "llama4": GGUFFamily(
        architecture="Llama4ForCausalLM", model_type="llama4_text", settings=_llama4
    ),
    "glm4moe": GGUFFamily(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        names=AFTER_ATTENTION,
        settings=_glm4_moe,
    ),
    "deepseek2": GGUFFamily(
        architecture="DeepseekV2ForCausalLM", model_type="deepseek_v2", settings=_deepseek_v2
    ),
}
MIXTRAL = GGUFFamily(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    is_permuted=True,
    settings=lambda file: {**_local_experts(file), "sliding_window": None},
)
DEEPSEEK_V3 = GGUFFamily(
    architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3", settings=_deepseek_v3
)
