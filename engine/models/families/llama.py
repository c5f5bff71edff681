"""Llama and those that differ from it in a setting: Mistral."""

from __future__ import annotations

from typing import Any

from remora.engine.models.config import (
    BlockConfig,
    DecoderConfig,
    HeadConfig,
    MLPConfig,
)
from remora.engine.models.families.reading import (
    RawConfig,
    activation,
    alike,
    eos_token_ids,
    flag,
    heads,
    positive,
    rms,
    rope,
    without_nulls,
)


def parse_llama(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Llama 2 and 3."""
    bias = flag(raw, "attention_bias")
    raw = {"num_key_value_heads": raw.get("num_attention_heads"), **without_nulls(raw)}
    return like_llama(
        architecture,
        raw,
        attention={"qkv_bias": bias, "out_bias": bias},
        mlp_bias=flag(raw, "mlp_bias"),
    )


def parse_mistral(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Mistral: a window of 4096 if there is no word of it, none if it is null."""
    return like_llama(architecture, raw, windows=raw.get("sliding_window", 4096))


def like_llama(
    architecture: str,
    raw: RawConfig,
    *,
    attention: dict[str, Any] | None = None,
    windows: int | list[int | None] | None = None,
    rotates: list[bool] | None = None,
    mlp_bias: bool = False,
    **options: Any,
) -> DecoderConfig:
    """Read a config in Llama's words: pre-norms, rotation, a gated feed-forward layer.

    attention:  further fields of AttentionConfig
    options:    further fields of DecoderConfig, in the place of those that are read here
    """
    shape = heads(raw, **(attention or {}))
    turn, max_position = rope(raw, shape.head_dim)
    size = positive(raw, "intermediate_size")
    mlp = MLPConfig(size=size, activation=activation(raw), bias=mlp_bias)
    return DecoderConfig(
        **{
            "architecture": architecture,
            "vocab_size": positive(raw, "vocab_size"),
            "hidden_size": positive(raw, "hidden_size"),
            "max_position": max_position,
            "attention": shape,
            "layers": alike(raw, turn, mlp, windows, rotates),
            "block": BlockConfig(norm=rms(raw)),
            "head": HeadConfig(tied=flag(raw, "tie_word_embeddings")),
            "eos_token_ids": eos_token_ids(raw),
            **options,
        }
    )
