"""What GGUF calls the parts of each kind of model, and the config.json that its metadata means.

Names and settings that kinds share are in tables; a `GGUFFamily` says where a kind differs. The
values that converters change are said too: rows in another order, norms with 1 added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from remora.configs.errors import ConfigError
from remora.engine.weights.gguf_file import GGUFFile

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# A layer's experts lie in one tensor each; {} stands for the number of one.
EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
MIXTRAL_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EMBEDDING = "token_embd.weight"
GEMMA3_LOCAL_THETA = 10_000.0
GEMMA3_PATTERN = 6

Settings = Callable[[GGUFFile], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """How a kind of model differs from Llama.

    architecture, model_type:  as config.json has them
    names:        of a block's parts, beside or in the place of BLOCK_NAMES
    is_permuted:  whether rows of q and k are in the order of interleaved rotation
    norm_offset:  what norms have had added to their weights
    settings:     further entries of config.json
    """

    architecture: str
    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    is_permuted: bool = False
    norm_offset: float = 0.0
    settings: Settings = lambda file: {}


def family_of(file: GGUFFile) -> GGUFFamily:
    """Return the family of a file's model. Raises ConfigError for one that we do not know."""
    name = file.architecture
    if name == "llama" and file.setting("expert_count"):
        return MIXTRAL
    if name not in FAMILIES:
        raise ConfigError(
            f"{file.path} holds a model of GGUF architecture {name!r}; "
            f"known are {', '.join(FAMILIES)}. Use the model's Hugging Face folder instead."
        )
    return FAMILIES[name]


def shortest(value: float) -> float:
    """Undo what float32 did to a decimal: 9.999999747378752e-06 was 1e-05."""
    return float(str(np.float32(value)))


def _experts(file: GGUFFile) -> dict[str, Any]:
    return {
        "num_experts": file.setting("expert_count"),
        "num_experts_per_tok": file.setting("expert_used_count"),
        "moe_intermediate_size": file.setting("expert_feed_forward_length"),
    }


def _mixtral(file: GGUFFile) -> dict[str, Any]:
    return {
        "num_local_experts": file.setting("expert_count"),
        "num_experts_per_tok": file.setting("expert_used_count"),
        "sliding_window": None,
    }


def _qwen2_moe(file: GGUFFile) -> dict[str, Any]:
    shared = file.setting("expert_shared_feed_forward_length")
    return {
        **_experts(file),
        "norm_topk_prob": bool(file.setting("expert_weights_norm", False)),
        "shared_expert_intermediate_size": shared,
    }


def _gemma(file: GGUFFile) -> dict[str, Any]:
    """Return what both generations share; the largest of each divides by another width."""
    size, num_heads = file.setting("embedding_length"), file.setting("attention.head_count")
    head_dim = file.setting("attention.key_length", 256)
    is_largest = file.setting("block_count") == {"gemma2": 46, "gemma3": 62}[file.architecture]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": head_dim,
        "query_pre_attn_scalar": size // num_heads if is_largest else head_dim,
        "sliding_window": file.setting("attention.sliding_window"),
        "attn_logit_softcapping": file.setting("attn_logit_softcapping"),
        "final_logit_softcapping": file.setting("final_logit_softcapping"),
        "tie_word_embeddings": True,
    }


def _gemma3(file: GGUFFile) -> dict[str, Any]:
    every: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": shortest(file.setting("rope.freq_base", 1_000_000.0)),
    }
    if file.setting("rope.scaling.type", "none") != "none":
        factor = file.setting("rope.scaling.factor")
        every |= {"rope_type": file.setting("rope.scaling.type"), "factor": factor}
    return {
        **_gemma(file),
        "layer_types": [
            "sliding_attention" if (layer + 1) % GEMMA3_PATTERN else "full_attention"
            for layer in range(file.setting("block_count"))
        ],
        "rope_parameters": {
            "full_attention": every,
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": GEMMA3_LOCAL_THETA,
            },
        },
    }


def _phi3(file: GGUFFile) -> dict[str, Any]:
    if any(tensor.name.startswith("rope_factors_") for tensor in file.tensors):
        raise ConfigError(
            f"{file.path} holds a Phi-3 with longrope, whose factors are not read from GGUF. "
            "Use the model's Hugging Face folder instead."
        )
    return {"sliding_window": file.setting("attention.sliding_window")}


def _granite(file: GGUFFile) -> dict[str, Any]:
    return {
        "attention_multiplier": shortest(file.setting("attention.scale", 1.0)),
        "embedding_multiplier": shortest(file.setting("embedding_scale", 1.0)),
        "residual_multiplier": shortest(file.setting("residual_scale", 1.0)),
        "logits_scaling": shortest(file.setting("logit_scale", 1.0)),
    }


def _starcoder2(file: GGUFFile) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": shortest(file.setting("attention.layer_norm_epsilon", 1e-5)),
        "sliding_window": file.setting("attention.sliding_window"),
        "use_bias": any(tensor.name == "blk.0.attn_q.bias" for tensor in file.tensors),
    }


MIXTRAL = GGUFFamily(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    names=MIXTRAL_NAMES,
    is_permuted=True,
    settings=_mixtral,
)
FAMILIES = {
    "llama": GGUFFamily(
        architecture="LlamaForCausalLM", model_type="llama", is_permuted=True
    ),  # Mistral among them
    "qwen2": GGUFFamily(architecture="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen2moe": GGUFFamily(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        names=EXPERT_NAMES,
        settings=_qwen2_moe,
    ),
    "qwen3": GGUFFamily(architecture="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen3moe": GGUFFamily(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        names=EXPERT_NAMES,
        settings=lambda file: {**_experts(file), "norm_topk_prob": True},
    ),
    "gemma2": GGUFFamily(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        names=GEMMA_NAMES,
        norm_offset=1.0,
        settings=_gemma,
    ),
    "gemma3": GGUFFamily(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        names=GEMMA_NAMES,
        norm_offset=1.0,
        settings=_gemma3,
    ),
    "phi3": GGUFFamily(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        names={"ffn_up": "mlp.gate_up_proj"},
        settings=_phi3,
    ),
    "olmo2": GGUFFamily(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        names={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "granite": GGUFFamily(
        architecture="GraniteForCausalLM",
        model_type="granite",
        is_permuted=True,
        settings=_granite,
    ),
    "starcoder2": GGUFFamily(
        architecture="Starcoder2ForCausalLM",
        model_type="starcoder2",
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        settings=_starcoder2,
    ),
}


def hugging_face_name(name: str, family: GGUFFamily) -> str:
    """Translate a GGUF tensor name; one that we do not know stays as it is."""
    stem, _, suffix = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    inner = {**BLOCK_NAMES, **family.names}
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in inner:
        return f"model.layers.{parts[1]}.{inner[parts[2]]}.{suffix}"
    return name
