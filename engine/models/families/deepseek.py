"""DeepSeek-V2, V3 and R1, and GLM-4-MoE, whose experts are chosen as V3's are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from remora.configs.errors import ConfigError
from remora.engine.models.config import (
    AttentionConfig,
    DecoderConfig,
    ExpertsConfig,
    HeadNorm,
    LatentConfig,
    TensorRule,
)
from remora.engine.models.families.config_values import (
    RawConfig,
    flag,
    number,
    positive,
    rms,
    without_nulls,
)
from remora.engine.models.families.experts import read_experts, with_experts
from remora.engine.models.families.llama import like_llama
from remora.engine.models.rope_config import parse_rope


def parse_deepseek_v2(architecture: str, raw: RawConfig) -> DecoderConfig:
    """DeepSeek-V2: softmax scores; groups are chosen by their best expert."""
    raw = without_nulls(raw)
    method = raw.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"topk_method in config.json is {method!r}; known are greedy and group_limited_greedy."
        )
    if raw.get("scoring_func", "softmax") != "softmax":
        raise ConfigError(f"scoring_func in config.json is {raw['scoring_func']!r}, not 'softmax'.")
    routing: dict[str, Any] = {"scaling": number(raw, "routed_scaling_factor", 1.0)}
    if method == "group_limited_greedy":
        routing |= groups(raw)
    # No published checkpoint of this architecture normalises, and the models' own code and
    # transformers differ in its meaning.
    if flag(raw, "norm_topk_prob"):
        raise ConfigError("norm_topk_prob in config.json is true; DeepSeek-V2 allows only false.")
    experts = read_experts(
        raw,
        number="n_routed_experts",
        shared=shared_size(raw),
        normalised=False,
        routing=routing,
    )
    first = raw.get("first_k_dense_replace", 0)
    config = _with_latents(architecture, raw)
    return with_experts(config, experts, sparse_layers(raw, first))


def parse_deepseek_v3(architecture: str, raw: RawConfig) -> DecoderConfig:
    """DeepSeek-V3 and R1."""
    raw = without_nulls({"q_lora_rank": 1536, "n_shared_experts": 1, **raw})
    config = _with_latents(architecture, raw)
    first = raw.get("first_k_dense_replace", 3)
    experts = read_sigmoid_experts({"n_group": 8, "topk_group": 4, **raw}, scaling=2.5)
    return with_experts(config, experts, sparse_layers(raw, first))


def parse_glm4_moe_lite(architecture: str, raw: RawConfig) -> DecoderConfig:
    """GLM-4.7-Flash: DeepSeek-V3's architecture in another size."""
    usual = {"q_lora_rank": 768, "n_shared_experts": 1, "rms_norm_eps": 1e-5}
    raw = without_nulls({**usual, **raw})
    num_layers = positive(raw, "num_hidden_layers")
    kinds = raw.get("mlp_layer_types") or ["dense"] + ["sparse"] * (num_layers - 1)
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise ConfigError(
            f"mlp_layer_types in config.json must hold {num_layers} entries, dense or sparse."
        )
    config = _with_latents(architecture, raw)
    experts = read_sigmoid_experts(raw, scaling=1.8)
    return with_experts(config, experts, [n for n, kind in enumerate(kinds) if kind == "sparse"])


def parse_glm4_moe(architecture: str, raw: RawConfig) -> DecoderConfig:
    """GLM-4.5 and later: grouped-query attention with partial RoPE."""
    raw = without_nulls(raw)
    settings = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    norm = HeadNorm(norm=rms(raw, default=1e-5)) if flag(raw, "use_qk_norm") else None
    config = like_llama(
        architecture,
        {"rms_norm_eps": 1e-5, **raw, "rope_parameters": settings, "rope_scaling": None},
        attention={"qkv_bias": flag(raw, "attention_bias"), "head_norm": norm},
        partial=settings.get("partial_rotary_factor", raw.get("partial_rotary_factor", 0.5)),
        rules=(_predictors(raw),),
    )
    experts = read_sigmoid_experts(raw, scaling=1.0)
    first = raw.get("first_k_dense_replace", 1)
    return with_experts(config, experts, sparse_layers(raw, first))


def read_sigmoid_experts(raw: RawConfig, *, scaling: float) -> ExpertsConfig:
    """Read experts with sigmoid scores and a correction bias, chosen from the best groups."""
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if raw.get(key, only) != only:
            raise ConfigError(f"{key} in config.json is {raw[key]!r}; only {only!r} is known.")
    routing = {
        "is_sigmoid": True,
        "scaling": number(raw, "routed_scaling_factor", scaling),
        "group_best": 2,
        **groups(raw),
    }
    experts = read_experts(
        raw,
        number="n_routed_experts",
        shared=shared_size(raw),
        normalised=flag(raw, "norm_topk_prob", True),
        routing=routing,
    )
    return replace(experts, correction=True)


def groups(raw: RawConfig) -> dict[str, int]:
    """Read the grouping of experts."""
    num_groups, top = raw.get("n_group", 1), raw.get("topk_group", 1)
    experts, chosen = positive(raw, "n_routed_experts"), positive(raw, "num_experts_per_tok")
    if experts % num_groups or not 1 <= top <= num_groups or top * experts < chosen * num_groups:
        raise ConfigError(
            f"config.json has {num_groups} groups (n_group) of {experts} experts, of which "
            f"{top} (topk_group) are chosen for {chosen} experts: these numbers are inconsistent."
        )
    return {"num_groups": num_groups, "top_groups": top}


def shared_size(raw: RawConfig) -> int:
    """Return the inner size of the shared experts, which are computed as one."""
    return int(raw.get("n_shared_experts", 0)) * positive(raw, "moe_intermediate_size")


def sparse_layers(raw: RawConfig, first: int) -> list[int]:
    """Return the layers with experts: from `first` on, each `moe_layer_freq`-th."""
    step = raw.get("moe_layer_freq", 1)
    layers = range(first, positive(raw, "num_hidden_layers"))
    return [layer for layer in layers if layer % step == 0]


def _with_latents(architecture: str, raw: RawConfig) -> DecoderConfig:
    latent = LatentConfig(
        size=positive(raw, "kv_lora_rank"),
        rotary_size=positive(raw, "qk_rope_head_dim"),
        key_size=positive(raw, "qk_nope_head_dim"),
        value_size=positive(raw, "v_head_dim"),
        query_rank=positive(raw, "q_lora_rank") if "q_lora_rank" in raw else None,
    )
    bias = flag(raw, "attention_bias")
    if bias and latent.query_rank is None:
        raise ConfigError(
            "attention_bias in config.json is true, which goes with a q_lora_rank alone."
        )
    row = latent.size + latent.rotary_size
    turn, max_position = parse_rope(
        raw,
        positive(raw, "max_position_embeddings"),
        latent.rotary_size,
        interleaved=flag(raw, "rope_interleave", True),
    )
    attention = AttentionConfig(
        num_heads=positive(raw, "num_attention_heads"),
        num_kv_heads=1,
        head_dim=row,
        scale=(latent.key_size + latent.rotary_size) ** -0.5 * _magnitude(raw) ** 2,
        qkv_bias=bias,
        out_bias=bias,
        latent=latent,
    )
    turn = replace(turn, rotary_dim=latent.rotary_size)
    words = {"num_key_value_heads": attention.num_heads, "head_dim": latent.rotary_size}
    config = like_llama(architecture, {**raw, **words}, attention=None, rules=(_predictors(raw),))
    layers = tuple(replace(layer, rope=turn) for layer in config.layers)
    return replace(config, attention=attention, layers=layers, max_position=max_position)


def _magnitude(raw: RawConfig) -> float:
    """Return YaRN's factor on queries and on keys."""
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    weight, factor = settings.get("mscale_all_dim", 0), settings.get("factor", 1)
    if not weight or factor <= 1:
        return 1.0
    return float(0.1 * weight * math.log(factor) + 1.0)


def _predictors(raw: RawConfig) -> TensorRule:
    """Return the rule for the multi-token prediction layers, which are not used."""
    past = positive(raw, "num_hidden_layers")
    number_of = raw.get("num_nextn_predict_layers", 1)
    numbers = "|".join(str(past + at) for at in range(max(number_of, 1)))
    return TensorRule(rf"model\.layers\.({numbers})\..*", ())
