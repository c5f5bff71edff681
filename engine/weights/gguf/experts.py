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


def _experts(file: GGUFFile, key: str = "num_experts") -> dict[str, Any]:
    """Return how many experts there are, under a family's key, and how many a token uses."""
    return {
        key: whole(file, "expert_count"),
        "num_experts_per_tok": whole(file, "expert_used_count"),
    }


def _local_experts(file: GGUFFile) -> dict[str, Any]:
    """Return the experts' settings under Mixtral's keys."""
    return _experts(file, "num_local_experts")


def _size(file: GGUFFile) -> dict[str, Any]:
    return {"moe_intermediate_size": whole(file, "expert_feed_forward_length")}


def _normalised(file: GGUFFile) -> dict[str, Any]:
    return {"norm_topk_prob": bool(file.setting("expert_weights_norm", False))}


def _routed_experts(file: GGUFFile) -> dict[str, Any]:
    """Return the experts' settings under DeepSeek's keys."""
    return {
        **_experts(file, "n_routed_experts"),
        **_size(file),
        **_normalised(file),
        "n_shared_experts": whole(file, "expert_shared_count", 0),
        "first_k_dense_replace": whole(file, "leading_dense_block_count", 0),
        "routed_scaling_factor": decimal(file, "expert_weights_scale", 1.0),
    }


def _qwen2_moe(file: GGUFFile) -> dict[str, Any]:
    return {
        **_experts(file),
        **_size(file),
        **_normalised(file),
        "shared_expert_intermediate_size": whole(file, "expert_shared_feed_forward_length"),
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
        **_groups(file),
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


def _groups(file: GGUFFile, usual: tuple[int, int] = (1, 1)) -> dict[str, int]:
    """Return the number of groups and of those chosen; `usual` are both where the file has none."""
    return {
        "n_group": whole(file, "expert_group_count", usual[0]),
        "topk_group": whole(file, "expert_group_used_count", usual[1]),
    }


def _deepseek_v2(file: GGUFFile) -> dict[str, Any]:
    gating = whole(file, "expert_gating_func", SOFTMAX)
    if gating not in (0, SOFTMAX):
        raise refused(file, f"chooses experts by expert_gating_func {gating}, not known here")
    made = _deepseek_v3(file)
    return made | {"topk_method": "group_limited_greedy" if made["n_group"] > 1 else "greedy"}


def _deepseek_v3(file: GGUFFile) -> dict[str, Any]:
    usual = DEEPSEEK_GROUPS.get(whole(file, "expert_count"), (1, 1))
    return {**_latents(file), **_routed_experts(file), **_groups(file, usual)}


EXPERTS = {
    "qwen2moe": GGUFFamily("Qwen2MoeForCausalLM", "qwen2_moe", _qwen2_moe),
    "qwen3moe": GGUFFamily(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        lambda file: {**_experts(file), **_size(file), "norm_topk_prob": True},
    ),
    "olmoe": GGUFFamily(
        "OlmoeForCausalLM", "olmoe", lambda file: _experts(file) | _normalised(file)
    ),
    "granitemoe": GGUFFamily(
        "GraniteMoeSharedForCausalLM", "granitemoeshared", _granite_moe, is_permuted=True
    ),
    "gpt-oss": GGUFFamily("GptOssForCausalLM", "gpt_oss", _gpt_oss, names=AFTER_ATTENTION),
    "llama4": GGUFFamily("Llama4ForCausalLM", "llama4_text", _llama4),
    "glm4moe": GGUFFamily("Glm4MoeForCausalLM", "glm4_moe", _glm4_moe, names=AFTER_ATTENTION),
    "deepseek2": GGUFFamily("DeepseekV2ForCausalLM", "deepseek_v2", _deepseek_v2),
}
MIXTRAL = GGUFFamily(
    "MixtralForCausalLM",
    "mixtral",
    lambda file: {**_local_experts(file), "sliding_window": None},
    is_permuted=True,
)
DEEPSEEK_V3 = GGUFFamily("DeepseekV3ForCausalLM", "deepseek_v3", _deepseek_v3)
