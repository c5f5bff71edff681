"""Llama and families with its keys and tensor names: Mistral, Ministral, SmolLM3, Granite,
MiniCPM, OLMo 2, Seed-OSS.
"""

from __future__ import annotations

from typing import Any

from remora.configs.errors import ConfigError
from remora.engine.models.config import (
    BlockConfig,
    DecoderConfig,
    EmbeddingConfig,
    HeadConfig,
    HeadNorm,
    MLPConfig,
    QueryGrowth,
)
from remora.engine.models.families.config_values import (
    FULL,
    WINDOWED,
    RawConfig,
    alike,
    biases,
    eos_token_ids,
    flag,
    gated,
    heads,
    number,
    positive,
    refuse,
    rms,
    rope,
    windows_of_layers,
    without_nulls,
)


def parse_llama(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Llama 2 and 3."""
    raw = {"num_key_value_heads": raw.get("num_attention_heads"), **without_nulls(raw)}
    return like_llama(
        architecture, raw, attention=biases(raw), mlp=gated(raw, bias=flag(raw, "mlp_bias"))
    )


def parse_seed_oss(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Seed-OSS: biases of q, k and v."""
    raw = {
        "head_dim": 128,
        "num_key_value_heads": raw.get("num_attention_heads"),
        **without_nulls(raw),
    }
    attention = {
        "qkv_bias": flag(raw, "attention_bias", True),
        "out_bias": flag(raw, "attention_out_bias"),
    }
    return like_llama(
        architecture, raw, attention=attention, mlp=gated(raw, bias=flag(raw, "mlp_bias"))
    )


def parse_mistral(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Mistral: a window of 4096 by default, none if it is null."""
    return like_llama(architecture, raw, windows=raw.get("sliding_window", 4096))


def like_llama(
    architecture: str,
    raw: RawConfig,
    *,
    attention: dict[str, Any] | None = None,
    windows: int | list[int | None] | None = None,
    rotates: list[bool] | None = None,
    mlp: MLPConfig | None = None,
    partial: float | None = None,
    interleaved: bool = False,
    **options: Any,
) -> DecoderConfig:
    """Parse a config with Llama's keys: pre-norms, RoPE, a gated feed-forward layer.

    attention:  further fields of AttentionConfig
    mlp:        None = gated, without biases
    partial, interleaved:  of RoPE, as in `parse_rope`
    options:    further fields of DecoderConfig, replacing the parsed ones
    """
    shape = heads(raw, **(attention or {}))
    turn, max_position = rope(raw, shape.head_dim, partial=partial, interleaved=interleaved)
    return DecoderConfig(
        **{
            "architecture": architecture,
            "vocab_size": positive(raw, "vocab_size"),
            "hidden_size": positive(raw, "hidden_size"),
            "max_position": max_position,
            "attention": shape,
            "layers": alike(raw, turn, mlp or gated(raw), windows, rotates),
            "block": BlockConfig(norm=rms(raw)),
            "head": HeadConfig(tied=flag(raw, "tie_word_embeddings")),
            "eos_token_ids": eos_token_ids(raw),
            **options,
        }
    )


def parse_ministral(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Ministral: each layer says whether it has the window."""
    window = raw.get("sliding_window", 4096)
    default = [FULL if window is None else WINDOWED] * positive(raw, "num_hidden_layers")
    windows = windows_of_layers(raw, window, default)
    return like_llama(architecture, without_nulls(raw), windows=windows)


def parse_ministral3(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Ministral 3: queries grow with the logarithm of their position, beyond the first length."""
    settings = dict(raw.get("rope_parameters") or {})
    if not settings:
        raise ConfigError("config.json of Ministral 3 has no rope_parameters.")
    growth = settings.pop("llama_4_scaling_beta", None)
    settings.pop("max_position_embeddings", None)
    queries = None
    if growth:
        period = positive(settings, "original_max_position_embeddings")
        queries = QueryGrowth(rate=growth, period=period)
    return like_llama(
        architecture,
        {"rms_norm_eps": 1e-5, **raw, "rope_parameters": settings},
        windows=raw.get("sliding_window"),
        attention={"growth": queries},
    )


def parse_smollm3(architecture: str, raw: RawConfig) -> DecoderConfig:
    """SmolLM3: every fourth layer rotates nothing."""
    num_layers = positive(raw, "num_hidden_layers")
    rotates = raw.get("no_rope_layers")
    if rotates is None:
        period = raw.get("no_rope_layer_interval") or 4
        rotates = [(layer + 1) % period for layer in range(num_layers)]
    window = raw.get("sliding_window") if flag(raw, "use_sliding_window") else None
    default = [FULL if turns or window is None else WINDOWED for turns in rotates]
    windows = windows_of_layers(raw, window, default)
    raw = {"rope_theta": 2e6, "tie_word_embeddings": True, **without_nulls(raw)}
    return like_llama(
        architecture,
        raw,
        windows=windows,
        rotates=[bool(turns) for turns in rotates],
        attention=biases(raw),
        mlp=gated(raw, bias=flag(raw, "mlp_bias")),
    )


def parse_granite(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Granite: factors on embeddings, scores, what blocks add, and logits."""
    raw = {"num_key_value_heads": raw.get("num_attention_heads"), **without_nulls(raw)}
    return like_llama(
        architecture,
        raw,
        attention={**biases(raw), "scale": number(raw, "attention_multiplier", 1.0)},
        mlp=gated(raw, bias=flag(raw, "mlp_bias")),
        block=BlockConfig(norm=rms(raw), residual_scale=number(raw, "residual_multiplier", 1.0)),
        embedding=EmbeddingConfig(scale=number(raw, "embedding_multiplier", 1.0)),
        head=HeadConfig(
            tied=flag(raw, "tie_word_embeddings"), scale=1 / number(raw, "logits_scaling", 1.0)
        ),
    )


def parse_minicpm(architecture: str, raw: RawConfig) -> DecoderConfig:
    """MiniCPM 1 and 2: Granite's factors, from width, depth and those of a smaller model."""
    refuse(raw, "num_experts", 0, "only models without experts are known")
    hidden_size = positive(raw, "hidden_size")
    raw = {"num_key_value_heads": raw.get("num_attention_heads"), **without_nulls(raw)}
    depth = number(raw, "scale_depth", 1.0) / positive(raw, "num_hidden_layers") ** 0.5
    return like_llama(
        architecture,
        raw,
        attention=biases(raw),
        block=BlockConfig(norm=rms(raw), residual_scale=depth),
        embedding=EmbeddingConfig(scale=number(raw, "scale_emb", 1.0)),
        head=HeadConfig(
            tied=flag(raw, "tie_word_embeddings", True),
            scale=number(raw, "dim_model_base", hidden_size) / hidden_size,
        ),
    )


def parse_olmo2(architecture: str, raw: RawConfig) -> DecoderConfig:
    """OLMo 2: norms after each part instead of before, and of all heads together."""
    raw = {"num_key_value_heads": raw.get("num_attention_heads"), **without_nulls(raw)}
    norm = rms(raw, default=1e-5)
    return like_llama(
        architecture,
        raw,
        attention={**biases(raw), "head_norm": HeadNorm(norm=norm, span="all")},
        block=BlockConfig(
            norm=norm,
            attention_norm=None,
            attention_out_norm="post_attention_layernorm",
            mlp_norm=None,
            mlp_out_norm="post_feedforward_layernorm",
        ),
    )
