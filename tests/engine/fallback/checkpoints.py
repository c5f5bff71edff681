"""Tiny checkpoints of families that only transformers knows, and of some that we know too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.tiny_models import make_tiny_tokenizer

COMMON: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 48, "num_key_value_heads": 4},
    "persimmon": {"num_key_value_heads": 4},
    "helium": {"head_dim": 16},
    "apertus": {},
    "olmo": {"clip_qkv": 2.0},
    "nanochat": {"head_dim": 16, "final_logit_softcapping": 5.0},
    "exaone4": {
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},  # joined as they load
    "vaultgemma": {  # soft caps
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 5.0,
    },
    "granite_swa": {  # sinks
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "minicpm3": {
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
}


def make_checkpoint(folder: Path, family: str, **settings: Any) -> Path:
    """Write a model of a type that transformers knows, with a tokenizer."""
    config = CONFIG_MAPPING[family](**{**COMMON, **FAMILIES.get(family, {}), **settings})
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            is_scale = "norm" in name and name.endswith("weight")
            parameter.normal_(1.0 if is_scale else 0.0, 0.2, generator=generator)
    model.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder
