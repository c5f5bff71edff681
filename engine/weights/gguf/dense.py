"""GGUF families with dense feed-forward layers.

Settings missing in the metadata take the values of the published models, as in llama.cpp's code.
"""

from __future__ import annotations

from typing import Any

from remora.engine.weights.gguf.family import (
    GGUFFamily,
    decimal,
    head_dim,
    num_layers,
    refused,
    whole,
)
from remora.engine.weights.gguf.file import GGUFFile
from remora.engine.weights.gguf.names import GATE_UP
from remora.engine.weights.gguf.rope import rope_of

GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA3_LOCAL_THETA = 10_000.0
GEMMA3_PATTERN = 6
COHERE2_PATTERN = 4
SMOLLM3_PATTERN = 4
BAICHUAN_13B_LAYERS = 40
FALCON_11B_THETA = 500_042.0
GELU = {"hidden_activation": "gelu_pytorch_tanh"}
LAYER_NORM = "attention.layer_norm_epsilon"


def _has(file: GGUFFile, part: str) -> bool:
    """Return whether the first block has a part."""
    return f"blk.0.{part}" in file.shapes


def _window(file: GGUFFile) -> int | None:
    """Return the sliding window; files write 0 for none."""
    return whole(file, "attention.sliding_window", 0) or None


def _sandwiched(file: GGUFFile) -> dict[str, Any]:
    """Return what Gemma 2 and 3 share; the largest model of each has another attention scale."""
    size, num_heads = whole(file, "embedding_length"), whole(file, "attention.head_count")
    is_largest = num_layers(file) == {"gemma2": 46, "gemma3": 62}[file.architecture]
    return {
        **GELU,
        "query_pre_attn_scalar": size // num_heads if is_largest else head_dim(file),
        "sliding_window": file.setting("attention.sliding_window"),
        "attn_logit_softcapping": file.setting("attn_logit_softcapping"),
        "final_logit_softcapping": file.setting("final_logit_softcapping"),
        "tie_word_embeddings": True,
    }


def _gemma3(file: GGUFFile) -> dict[str, Any]:
    every: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": decimal(file, "rope.freq_base", 1_000_000.0),
    }
    if file.setting("rope.scaling.type", "none") != "none":
        factor = file.setting("rope.scaling.factor")
        every |= {"rope_type": file.setting("rope.scaling.type"), "factor": factor}
    local = decimal(file, "rope.freq_base_swa", GEMMA3_LOCAL_THETA)
    return {
        **_sandwiched(file),
        "layer_types": _every(file, GEMMA3_PATTERN),
        "rope_parameters": {
            "full_attention": every,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _every(file: GGUFFile, period: int) -> list[str]:
    """Return kinds of layers of which each `period`-th has full attention."""
    return [
        "sliding_attention" if (layer + 1) % period else "full_attention"
        for layer in range(num_layers(file))
    ]


def _olmo2(file: GGUFFile) -> dict[str, Any]:
    if _window(file) is not None:
        raise refused(file, "holds an OLMo 3, whose windows are not known here")
    return {}


def granite_factors(file: GGUFFile) -> dict[str, Any]:
    """Return Granite's factors, with or without experts."""
    if not file.setting("rope.scaling.finetuned", True):
        raise refused(file, "holds a Granite without rotation, which is not known here")
    return {
        "attention_multiplier": decimal(file, "attention.scale", 1.0),
        "embedding_multiplier": decimal(file, "embedding_scale", 1.0),
        "residual_multiplier": decimal(file, "residual_scale", 1.0),
        "logits_scaling": decimal(file, "logit_scale", 1.0),
    }


def _minicpm(file: GGUFFile) -> dict[str, Any]:
    if file.setting("expert_count"):
        raise refused(file, "holds a MiniCPM with experts, which is not known here")
    depth, size = num_layers(file) ** 0.5, whole(file, "embedding_length")
    return {
        "scale_emb": decimal(file, "embedding_scale", 12.0),
        "scale_depth": file.setting("residual_scale", 1.4 / depth) * depth,
        "dim_model_base": size / file.setting("logit_scale", size / 256),
    }


def _ministral3(file: GGUFFile) -> dict[str, Any]:
    rope = rope_of(file, head_dim(file))
    growth = file.setting("attention.temperature_scale")
    if growth:
        rope["llama_4_scaling_beta"] = growth
    if rope["rope_type"] == "yarn":
        everywhere = decimal(file, "rope.scaling.yarn_log_multiplier", 0.0)
        rope |= {"mscale": 1.0, "mscale_all_dim": everywhere}
    return {"rope_parameters": rope, "sliding_window": None}


def _starcoder2(file: GGUFFile) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": decimal(file, LAYER_NORM, 1e-5),
        "sliding_window": _window(file),
        "use_bias": _has(file, "attn_q.bias"),
    }


def _stablelm(file: GGUFFile) -> dict[str, Any]:
    return {
        "layer_norm_eps": decimal(file, LAYER_NORM, 1e-5),
        "use_qkv_bias": _has(file, "attn_q.bias"),
        "qk_layernorm": _has(file, "attn_q_norm.weight"),
        "use_parallel_residual": not _has(file, "ffn_norm.weight"),
    }


def _phi2(file: GGUFFile) -> dict[str, Any]:
    return {"hidden_act": "gelu_new", "layer_norm_eps": decimal(file, LAYER_NORM, 1e-5)}


def _glm(file: GGUFFile) -> dict[str, Any]:
    return {"attention_bias": _has(file, "attn_q.bias") or _has(file, "attn_qkv.bias")}


def _cohere(file: GGUFFile) -> dict[str, Any]:
    return {
        "layer_norm_eps": decimal(file, LAYER_NORM, 1e-5),
        "logit_scale": decimal(file, "logit_scale", 0.0625),
        "use_qk_norm": _has(file, "attn_q_norm.weight"),
    }


def _cohere2(file: GGUFFile) -> dict[str, Any]:
    return {
        **_cohere(file),
        "sliding_window": whole(file, "attention.sliding_window"),
        "layer_types": _every(file, COHERE2_PATTERN),
    }


def _baichuan(file: GGUFFile) -> dict[str, Any]:
    if num_layers(file) != BAICHUAN_13B_LAYERS:
        return {}
    return {
        "max_position_embeddings": None,
        "model_max_length": whole(file, "context_length"),
        "rope_parameters": None,
    }


def _gpt2(file: GGUFFile) -> dict[str, Any]:
    return {"hidden_act": "gelu_new", "layer_norm_epsilon": decimal(file, LAYER_NORM, 1e-5)}


def _gpt_neox(file: GGUFFile) -> dict[str, Any]:
    return {
        "hidden_act": "gelu",
        "layer_norm_eps": decimal(file, LAYER_NORM, 1e-5),
        "use_parallel_residual": bool(file.setting("use_parallel_residual", True)),
        "attention_bias": _has(file, "attn_qkv.bias"),
    }


def _falcon(file: GGUFFile) -> dict[str, Any]:
    num_kv_heads = whole(file, "attention.head_count_kv", 1)
    has_two_norms = _has(file, "attn_norm_2.weight")
    # Files do not say theta; of the models with one norm and several K/V heads there is the 11B.
    theta = 10_000.0 if has_two_norms or num_kv_heads == 1 else FALCON_11B_THETA
    return {
        "activation": "gelu",
        "layer_norm_epsilon": decimal(file, LAYER_NORM, 1e-5),
        "ffn_hidden_size": whole(file, "feed_forward_length"),
        "new_decoder_architecture": num_kv_heads > 1 or has_two_norms,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "multi_query": num_kv_heads == 1,
        "num_kv_heads": num_kv_heads,
        "parallel_attn": True,
        "bias": _has(file, "attn_qkv.bias"),
        "rope_parameters": rope_of(file, head_dim(file), theta=theta),
    }


DENSE = {
    # Mistral and InternLM 3 among them
    "llama": GGUFFamily("LlamaForCausalLM", "llama", is_permuted=True),
    "mistral3": GGUFFamily(
        "Ministral3ForCausalLM",
        "ministral3",
        _ministral3,
        is_permuted=True,
        understands=frozenset({"attention.temperature_scale"}),
    ),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", "qwen3"),
    "gemma": GGUFFamily("GemmaForCausalLM", "gemma", lambda file: GELU, norm_offset=1.0),
    "gemma2": GGUFFamily(
        "Gemma2ForCausalLM", "gemma2", _sandwiched, names=GEMMA_NAMES, norm_offset=1.0
    ),
    "gemma3": GGUFFamily(
        "Gemma3ForCausalLM", "gemma3_text", _gemma3, names=GEMMA_NAMES, norm_offset=1.0
    ),
    "phi2": GGUFFamily("PhiForCausalLM", "phi", _phi2),
    "phi3": GGUFFamily(
        "Phi3ForCausalLM",
        "phi3",
        lambda file: {"sliding_window": _window(file)},
        names={"ffn_up": GATE_UP},
    ),
    "olmo2": GGUFFamily(
        "Olmo2ForCausalLM",
        "olmo2",
        _olmo2,
        names={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "smollm3": GGUFFamily(
        "SmolLM3ForCausalLM",
        "smollm3",
        lambda file: {"no_rope_layer_interval": SMOLLM3_PATTERN},
        is_permuted=True,
    ),
    "granite": GGUFFamily("GraniteForCausalLM", "granite", granite_factors, is_permuted=True),
    "minicpm": GGUFFamily("MiniCPMForCausalLM", "minicpm", _minicpm, is_permuted=True),
    "internlm2": GGUFFamily(
        "InternLM2ForCausalLM",
        "internlm2",
        lambda file: {"bias": _has(file, "attn_q.bias")},
        is_permuted=True,
    ),
    "baichuan": GGUFFamily("BaichuanForCausalLM", "baichuan", _baichuan, is_permuted=True),
    "chatglm": GGUFFamily("GlmForCausalLM", "glm", _glm, names={"ffn_up": GATE_UP}),
    "glm4": GGUFFamily(
        "Glm4ForCausalLM",
        "glm4",
        _glm,
        names={
            "ffn_up": GATE_UP,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "stablelm": GGUFFamily(
        "StableLmForCausalLM",
        "stablelm",
        _stablelm,
        names={
            "attn_q_norm": "self_attn.q_layernorm.norms.{}",
            "attn_k_norm": "self_attn.k_layernorm.norms.{}",
        },
    ),
    "starcoder2": GGUFFamily("Starcoder2ForCausalLM", "starcoder2", _starcoder2),
    "command-r": GGUFFamily("CohereForCausalLM", "cohere", _cohere),
    "cohere2": GGUFFamily("Cohere2ForCausalLM", "cohere2", _cohere2),
    "gpt2": GGUFFamily("GPT2LMHeadModel", "gpt2", _gpt2),
    "gptneox": GGUFFamily("GPTNeoXForCausalLM", "gpt_neox", _gpt_neox),
    "falcon": GGUFFamily("FalconForCausalLM", "falcon", _falcon),
}
FALCON_WITH_TWO_NORMS = GGUFFamily(
    "FalconForCausalLM",
    "falcon",
    _falcon,
    names={"attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"},
)
