"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from remora.engine.models.config import DecoderConfig, TensorRule
from remora.engine.models.families.config_values import (
    RawConfig,
    biases,
    flag,
    gated,
    positive,
    refuse,
    renamed,
    without_nulls,
)
from remora.engine.models.families.experts import LAYER, read_experts, with_experts
from remora.engine.models.families.llama import like_llama

_NAMES = {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}
_RULES = (
    TensorRule(r"model\.mtp_.*", ()),  # predict further tokens
    TensorRule(
        LAYER + r"mlp\.moe_statics\.e_score_correction_bias",
        (r"\1mlp.gate.e_score_correction_bias",),
        lambda values: (values.flatten(),),  # [1, E]
    ),
)


def parse_ernie4_5(architecture: str, raw: RawConfig) -> DecoderConfig:
    """ERNIE 4.5 0.3B: Llama with interleaved RoPE."""
    return _like_llama(architecture, {"head_dim": 128, **without_nulls(raw)})


def parse_ernie4_5_moe(architecture: str, raw: RawConfig) -> DecoderConfig:
    """ERNIE 4.5 with experts: softmax scores, to which a bias is added for the selection only."""
    raw = renamed(without_nulls(raw), _NAMES)
    refuse(raw, "use_bias", False, "and experts have no biases here")
    shared = int(raw.get("moe_num_shared_experts", 2)) * positive(raw, "moe_intermediate_size")
    experts = replace(read_experts(raw, shared=shared), correction=True)
    first, last = raw.get("moe_layer_start_index", 1), raw.get("moe_layer_end_index", -1)
    num_layers = positive(raw, "num_hidden_layers")
    past = num_layers if last == -1 else min(last + 1, num_layers)
    every = raw.get("moe_layer_interval", 1)
    sparse = [layer for layer in range(first, past) if (layer + 1) % every == 0]
    config = replace(_like_llama(architecture, raw), rules=_RULES)
    return with_experts(config, experts, sparse)


def _like_llama(architecture: str, raw: RawConfig) -> DecoderConfig:
    raw = {
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "num_key_value_heads": raw.get("num_attention_heads"),
        **raw,
    }
    return like_llama(
        architecture,
        raw,
        attention=biases(raw, "use_bias"),
        mlp=gated(raw, bias=flag(raw, "use_bias")),
        interleaved=True,
    )
