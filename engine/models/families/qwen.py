"""Qwen2, Qwen2.5, MiMo and Qwen3."""

from __future__ import annotations

from dataclasses import replace

from remora.engine.models.config import DecoderConfig, HeadNorm, TensorRule
from remora.engine.models.families.config_values import (
    FULL,
    WINDOWED,
    RawConfig,
    biases,
    positive,
    rms,
    windows_of_layers,
    without_nulls,
)
from remora.engine.models.families.llama import like_llama


def parse_qwen2(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Qwen2 and 2.5: biases of q, k and v."""
    return like_llama(architecture, raw, windows=qwen_windows(raw), attention={"qkv_bias": True})


def parse_mimo(architecture: str, raw: RawConfig) -> DecoderConfig:
    """MiMo: Qwen2, followed by layers that predict further tokens, which are not loaded."""
    parsed = parse_qwen2(architecture, raw)
    return replace(parsed, rules=(TensorRule(r"model\.mtp_layers\..*", ()), *parsed.rules))


def parse_qwen3(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Qwen3: QK norms."""
    raw = {"head_dim": 128, **without_nulls(raw)}
    return like_llama(
        architecture,
        raw,
        windows=qwen_windows(raw),
        attention={**biases(raw), "head_norm": HeadNorm(norm=rms(raw))},
    )


def qwen_windows(raw: RawConfig) -> list[int | None] | None:
    """Return each layer's window: layers from `max_window_layers` on have one."""
    window = raw.get("sliding_window", 4096)
    if not raw.get("use_sliding_window", False) or window is None:
        return None
    first = raw.get("max_window_layers", 28)
    num_layers = positive(raw, "num_hidden_layers")
    default = [WINDOWED if at >= first else FULL for at in range(num_layers)]
    return windows_of_layers(raw, window, default)
