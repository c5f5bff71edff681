"""Gemma 1, 2 and 3 (text): norms with offset 1, scaled embeddings, GELU.

Gemma 2 adds norms after each part, soft caps and windows; Gemma 3 adds QK norms and a separate RoPE
for layers with windows.
"""

from __future__ import annotations

from collections.abc import Sequence

from remora.engine.models.config import (
    BlockConfig,
    DecoderConfig,
    EmbeddingConfig,
    HeadConfig,
    HeadNorm,
    LayerConfig,
    MLPConfig,
)
from remora.engine.models.families.config_values import (
    FULL,
    WINDOWED,
    RawConfig,
    activation,
    biases,
    every,
    flag,
    heads,
    kinds_of_layers,
    number,
    optional_number,
    positive,
    refuse,
    rms,
    rope,
    without_nulls,
)
from remora.engine.models.families.llama import like_llama
from remora.engine.models.rope_config import RopeConfig

LOCAL_THETA, GLOBAL_THETA = 10_000.0, 1_000_000.0
BOTH_WAYS = "use_bidirectional_attention"
HEAD_DIM = 256  # where config.json does not say


def parse_gemma(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Gemma 1. Its checkpoints say gelu and mean the tanh approximation."""
    refuse(raw, BOTH_WAYS, False, "and Gemma 3 alone is known to do so")
    act = raw.get("hidden_activation") or raw.get("hidden_act")
    raw = {
        "head_dim": HEAD_DIM,
        **without_nulls(raw),
        "hidden_act": "gelu_pytorch_tanh" if act in (None, "gelu") else act,
        "tie_word_embeddings": flag(raw, "tie_word_embeddings", True),
    }
    return like_llama(
        architecture,
        raw,
        attention=biases(raw),
        block=BlockConfig(norm=rms(raw, offset=1.0)),
        embedding=EmbeddingConfig(scale=positive(raw, "hidden_size") ** 0.5),
    )


def parse_gemma2(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Gemma 2."""
    refuse(raw, BOTH_WAYS, False, "and Gemma 3 alone is known to do so")
    raw = {"head_dim": HEAD_DIM, **raw}
    turn, max_position = rope(raw, heads(without_nulls(raw)).head_dim)
    kinds = kinds_of_layers(raw, every(raw, 2))
    return _sandwiched(
        architecture,
        raw,
        kinds,
        dict.fromkeys(kinds, turn),
        max_position,
        soft_caps=(50.0, 30.0),
        head_norm=None,
    )


def parse_gemma3(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Gemma 3, text."""
    raw = {"head_dim": HEAD_DIM, **raw}
    kinds = kinds_of_layers(raw, every(raw, int(number(raw, "sliding_window_pattern", 6))))
    head_dim = heads(without_nulls(raw)).head_dim
    settings = raw.get("rope_parameters")
    if not settings or not {WINDOWED, FULL} & set(settings):
        theta = number(raw, "rope_theta", GLOBAL_THETA)
        settings = {
            FULL: {"rope_theta": theta, **(raw.get("rope_scaling") or settings or {})},
            WINDOWED: {"rope_theta": number(raw, "rope_local_base_freq", LOCAL_THETA)},
        }
    plain = {key: value for key, value in raw.items() if not key.startswith("rope_")}
    turns, most = {}, 0
    for kind, theta in ((FULL, GLOBAL_THETA), (WINDOWED, LOCAL_THETA)):
        own = {"rope_theta": theta, **without_nulls(settings.get(kind) or {})}
        turns[kind], reach = rope({**plain, "rope_parameters": own}, head_dim)
        most = max(most, reach)
    return _sandwiched(
        architecture,
        raw,
        kinds,
        turns,
        most,
        soft_caps=(None, None),
        head_norm=HeadNorm(norm=rms(raw, offset=1.0)),
    )


def _sandwiched(
    architecture: str,
    raw: RawConfig,
    kinds: Sequence[str],
    turns: dict[str, RopeConfig],
    max_position: int,
    *,
    soft_caps: tuple[float | None, float | None],
    head_norm: HeadNorm | None,
) -> DecoderConfig:
    """Read what Gemma 2 and 3 share; soft_caps are the defaults for scores and for logits."""
    window = raw.get("sliding_window", 4096)
    both_ways = flag(raw, BOTH_WAYS)
    if both_ways and window is not None:
        window = window // 2 + 1  # it is the size of both sides together
    mlp = MLPConfig(
        size=positive(raw, "intermediate_size"),
        activation=activation(raw, "hidden_activation", "gelu_pytorch_tanh"),
    )
    return like_llama(
        architecture,
        {**without_nulls(raw), "hidden_act": "silu", "rope_scaling": None, "rope_parameters": None},
        attention={
            **biases(raw),
            "scale": number(raw, "query_pre_attn_scalar", 256) ** -0.5,
            "soft_cap": optional_number(raw, "attn_logit_softcapping", soft_caps[0]),
            "head_norm": head_norm,
            "both_ways": both_ways,
        },
        max_position=max_position,
        layers=tuple(
            LayerConfig(rope=turns[kind], mlp=mlp, window=window if kind == WINDOWED else None)
            for kind in kinds
        ),
        block=BlockConfig(
            norm=rms(raw, offset=1.0),
            attention_out_norm="post_attention_layernorm",
            mlp_norm="pre_feedforward_layernorm",
            mlp_out_norm="post_feedforward_layernorm",
        ),
        embedding=EmbeddingConfig(scale=positive(raw, "hidden_size") ** 0.5),
        head=HeadConfig(
            tied=flag(raw, "tie_word_embeddings", True),
            soft_cap=optional_number(raw, "final_logit_softcapping", soft_caps[1]),
        ),
    )
