"""Tiny random checkpoints of every dense family, written by transformers.

A family for which transformers has no class of its own is written as one that computes the same,
and its tensors and settings are then spelt the way that family does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_models import VOCAB_SIZE

Tensors = dict[str, Tensor]
LAYER_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ONE_KV_HEAD_EACH = {"num_key_value_heads": 4}


def no_change(tensors: Tensors, raw: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Leave the checkpoint as transformers has written it."""
    return tensors, raw


@dataclass(frozen=True)
class Case:
    """A model class of transformers with settings, and what its checkpoint is turned into."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    respell: Callable[[Tensors, dict[str, Any]], tuple[Tensors, dict[str, Any]]] = no_change


def fuse(tensors: Tensors, fused: str, parts: tuple[str, ...]) -> Tensors:
    """Join tensors of each layer, one after the other."""
    made = dict(tensors)
    for name in tensors:
        if f".{parts[0]}." in name:
            names = [name.replace(parts[0], part) for part in parts]
            made[name.replace(parts[0], fused)] = torch.cat([made.pop(each) for each in names])
    return made


def fuse_groups(tensors: Tensors, fused: str, kv_heads: int) -> Tensors:
    """Join q, k and v of each layer: for each K/V head its heads of q, its k, its v."""
    made = dict(tensors)
    for name in tensors:
        if ".q_proj." in name:
            q, k, v = (made.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv")
            groups = [part.reshape(kv_heads, -1, *part.shape[1:]) for part in (q, k, v)]
            made[name.replace("q_proj", fused)] = torch.cat(groups, dim=1).flatten(0, 1)
    return made


def rename(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    """Replace patterns in names."""
    made = {}
    for name, tensor in tensors.items():
        for pattern, by in pairs:
            name = re.sub(pattern, by, name)
        made[name] = tensor
    return made


def as_internlm2(tensors: Tensors, raw: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Llama with biases of q, k, v and o."""
    tensors = rename(
        fuse_groups(tensors, "wqkv", raw["num_key_value_heads"]),
        (r"self_attn\.wqkv", "attention.wqkv"),
        (r"self_attn\.o_proj", "attention.wo"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        (r"mlp\.gate_proj", "feed_forward.w1"),
        (r"mlp\.up_proj", "feed_forward.w3"),
        (r"mlp\.down_proj", "feed_forward.w2"),
        ("embed_tokens", "tok_embeddings"),
        ("lm_head", "output"),
    )
    raw = {**raw, "bias": raw.pop("attention_bias")}
    return tensors, {**raw, "architectures": ["InternLM2ForCausalLM"]}


def as_internlm3(tensors: Tensors, raw: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Llama with all biases."""
    raw = {**raw, "bias": raw.pop("mlp_bias"), "qkv_bias": raw.pop("attention_bias")}
    return tensors, {**raw, "architectures": ["InternLM3ForCausalLM"]}


def as_baichuan(tensors: Tensors, raw: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Llama with q, k and v in one."""
    del raw["num_key_value_heads"]
    tensors = fuse(tensors, "W_pack", ("q_proj", "k_proj", "v_proj"))
    return tensors, {**raw, "architectures": ["BaichuanForCausalLM"]}


def as_minicpm(tensors: Tensors, raw: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Granite, whose factors are MiniCPM's worked out."""
    raw = {
        **raw,
        "architectures": ["MiniCPMForCausalLM"],
        "scale_emb": raw.pop("embedding_multiplier"),
        "scale_depth": raw.pop("residual_multiplier") * raw["num_hidden_layers"] ** 0.5,
        "dim_model_base": raw["hidden_size"] / raw.pop("logits_scaling"),
    }
    del raw["attention_multiplier"]
    return tensors, raw


def as_chatglm(tensors: Tensors, raw: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """GLM, which is ChatGLM in transformers' words."""
    tensors = fuse(tensors, "query_key_value", ("q_proj", "k_proj", "v_proj"))
    tensors = rename(
        tensors,
        (r"^model\.layers", "transformer.encoder.layers"),
        (r"self_attn\.o_proj", "self_attention.dense"),
        ("self_attn", "self_attention"),
        ("gate_up_proj", "dense_h_to_4h"),
        ("down_proj", "dense_4h_to_h"),
        (r"^model\.embed_tokens", "transformer.embedding.word_embeddings"),
        (r"^model\.norm", "transformer.encoder.final_layernorm"),
        ("^lm_head", "transformer.output_layer"),
    )
    return tensors, {
        "architectures": ["ChatGLMModel"],
        "num_layers": raw["num_hidden_layers"],
        "num_attention_heads": raw["num_attention_heads"],
        "ffn_hidden_size": raw["intermediate_size"],
        "hidden_size": raw["hidden_size"],
        "kv_channels": raw["head_dim"],
        "layernorm_epsilon": raw["rms_norm_eps"],
        "padded_vocab_size": raw["vocab_size"],
        "vocab_size": raw["vocab_size"],
        "seq_length": raw["max_position_embeddings"],
        "multi_query_attention": True,
        "multi_query_group_num": raw["num_key_value_heads"],
        "add_qkv_bias": True,
        "rope_ratio": 5.0,
        "rmsnorm": True,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def without_prefix(tensors: Tensors, raw: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """GPT-2 as its authors have stored it: bare names, and the masks with them."""
    tensors = rename(tensors, (r"^transformer\.", ""))
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    return tensors, raw


GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
CASES: Mapping[str, Case] = {
    "ministral": Case(
        "Ministral", {"head_dim": 16, "sliding_window": 24, "layer_types": LAYER_KINDS}
    ),
    "ministral3": Case(
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
                "max_position_embeddings": 256,
            },
        },
    ),
    "smollm3": Case("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "granite": Case(
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "minicpm": Case(
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.3,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
        as_minicpm,
    ),
    "olmo2": Case("Olmo2"),
    "seed-oss": Case("SeedOss", {"head_dim": 24}),
    "ernie4.5": Case("Ernie4_5", {"head_dim": 24}),
    "gemma": Case("Gemma", {"head_dim": 16}),
    "gemma2": Case(
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Case(
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": LAYER_KINDS,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
            },
        },
    ),
    "phi3": Case("Phi3", {"sliding_window": 24}),
    "phi4-partial": Case("Phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "glm": Case("Glm", {"head_dim": 16}),
    "glm4": Case("Glm4", {"head_dim": 16}),
    "chatglm": Case(
        "Glm",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e4,
                "partial_rotary_factor": 0.5,
            },
            "rms_norm_eps": 1e-5,
        },
        as_chatglm,
    ),
    "internlm2": Case("Llama", {"attention_bias": True}, as_internlm2),
    "internlm3": Case("Llama", {"attention_bias": True, "mlp_bias": True}, as_internlm3),
    "baichuan-7b": Case("Llama", ONE_KV_HEAD_EACH, as_baichuan),
    "stablelm": Case("StableLm", {"use_qkv_bias": True}),
    "stablelm-parallel": Case("StableLm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder2": Case("Starcoder2", {"sliding_window": 24}),
    "phi": Case("Phi"),
    "phi-head-norms": Case("Phi", {"qk_layernorm": True}),
    "cohere": Case("Cohere"),
    "cohere-head-norms": Case("Cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": Case("Cohere2", {"sliding_window": 24, "layer_types": LAYER_KINDS}),
    "gpt2": Case("GPT2", GPT2),
    "gpt2-bare": Case("GPT2", GPT2, without_prefix),
    "gpt-neox": Case("GPTNeoX"),
    "gpt-neox-sequential": Case("GPTNeoX", {"use_parallel_residual": False}),
    "falcon-7b": Case("Falcon", {"ffn_hidden_size": 96}),
    "falcon-40b": Case(
        "Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
    ),
    "falcon-11b": Case(
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-1b-alibi": Case(
        "Falcon",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
}


def classes(case: Case) -> tuple[type, type]:
    """Return transformers' classes of config and model."""
    config = {"Gemma3": "Gemma3TextConfig"}.get(case.name, f"{case.name}Config")
    model = {"GPT2": "GPT2LMHeadModel"}.get(case.name, f"{case.name}ForCausalLM")
    return getattr(transformers, config), getattr(transformers, model)


def make_family(folder: Path, family: str, **overrides: Any) -> tuple[Path, Any]:
    """Write the checkpoint of a key of CASES; returns its folder and transformers' model."""
    case = CASES[family]
    config_class, model_class = classes(case)
    config = config_class(**{**COMMON, **case.settings, **overrides})
    # The others do not cap scores; of Falcon's, eager adds ALiBi twice.
    config._attn_implementation = "sdpa" if case.name == "Falcon" else "eager"
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            mean = 1.0 if re.search(r"norm|ln_", name) and name.endswith("weight") else 0.0
            parameter.normal_(mean, 0.2, generator=generator)
    model.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    tensors, raw = case.respell(load_file(folder / "model.safetensors"), raw)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder, model
