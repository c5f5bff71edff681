"""Reads and checks values of a config.json under Llama's keys.

Families with other keys translate them first (`renamed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remora.configs.errors import ConfigError
from remora.engine.models.config import (
    Activation,
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    NormConfig,
)
from remora.engine.models.rope_config import NO_ROPE, RopeConfig, parse_rope

RawConfig = Mapping[str, Any]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
WINDOWED, FULL = "sliding_attention", "full_attention"


def positive(raw: RawConfig, key: str) -> int:
    """Return a whole number above 0."""
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        found = "is missing" if value is None else f"is {value!r}"
        raise ConfigError(f"{key} in config.json {found}; it must be a whole number above 0.")
    return value


def flag(raw: RawConfig, key: str, default: bool = False) -> bool:
    """Return a yes or no; null means the default."""
    value = raw.get(key)
    return default if value is None else bool(value)


def number(raw: RawConfig, key: str, default: float) -> float:
    """Return a number; null means the default."""
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} in config.json is {value!r}; it must be a number.")
    return float(value)


def optional_number(raw: RawConfig, key: str, default: float | None) -> float | None:
    """Return a number, or None for null; absent means the default."""
    if key in raw and raw[key] is None:
        return None
    return default if key not in raw else number(raw, key, 0.0)


def refuse(raw: RawConfig, key: str, allowed: object, reason: str) -> None:
    """Raise ConfigError for a setting other than the one supported value."""
    value = raw.get(key, allowed)
    if value != allowed and value is not None:
        raise ConfigError(f"{key} in config.json is {value!r}, {reason}.")


def without_nulls(raw: RawConfig) -> dict[str, Any]:
    """Drop null entries, which mean the family's default."""
    return {key: value for key, value in raw.items() if value is not None}


def renamed(raw: RawConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the config with a family's keys, those of `names`, translated."""
    return {names.get(key, key): value for key, value in raw.items()}


def biases(raw: RawConfig, key: str = "attention_bias", default: bool = False) -> dict[str, Any]:
    """Return fields of AttentionConfig, where one key is about all biases of attention."""
    has_biases = flag(raw, key, default)
    return {"qkv_bias": has_biases, "out_bias": has_biases}


def eos_token_ids(raw: RawConfig) -> tuple[int, ...]:
    """Return the ids that end a sequence."""
    found = raw.get("eos_token_id")
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def activation(raw: RawConfig, key: str = "hidden_act", default: str = "silu") -> Activation:
    """Return the activation of feed-forward layers."""
    found = raw.get(key) or default
    if found not in ACTIVATIONS:
        raise ConfigError(f"{key} in config.json is {found!r}; known are {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[found]


def heads(raw: RawConfig, **options: Any) -> AttentionConfig:
    """Read number and size of heads; `options` are further fields of AttentionConfig.

    The scale is 1 / sqrt(head_dim) unless it is among them.
    """
    num_heads = positive(raw, "num_attention_heads")
    num_kv_heads = positive(raw, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_attention_heads ({num_heads}) in config.json is not a multiple of "
            f"num_key_value_heads ({num_kv_heads})."
        )
    head_dim = raw.get("head_dim") or positive(raw, "hidden_size") // num_heads
    return AttentionConfig(
        **{
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "scale": head_dim**-0.5,
            **options,
        }
    )


def rope(raw: RawConfig, head_dim: int, **options: Any) -> tuple[RopeConfig, int]:
    """Read the RoPE settings; return them and the longest sequence in tokens.

    options:  of `parse_rope`
    """
    return parse_rope(raw, positive(raw, "max_position_embeddings"), head_dim, **options)


def partial_rotary(raw: RawConfig, default: float, key: str = "partial_rotary_factor") -> float:
    """Return the fraction of each head that is rotated."""
    settings = raw.get("rope_parameters") or {}
    return number(settings, "partial_rotary_factor", number(raw, key, default))


def rms(raw: RawConfig, *, default: float = 1e-6, offset: float = 0.0) -> NormConfig:
    """Read the settings of a root-mean-square norm."""
    return NormConfig(eps=number(raw, "rms_norm_eps", default), offset=offset)


def layer_norm(raw: RawConfig, key: str, *, bias: bool = True) -> NormConfig:
    """Read the settings of a layer norm; `key` is that of its epsilon."""
    return NormConfig(kind="layer", eps=number(raw, key, 1e-5), bias=bias)


def gated(raw: RawConfig, *, bias: bool = False) -> MLPConfig:
    """Read a gated feed-forward layer."""
    size = positive(raw, "intermediate_size")
    return MLPConfig(size=size, activation=activation(raw), bias=bias)


def ungated(
    raw: RawConfig, default: str, *, key: str = "hidden_act", bias: bool = True
) -> MLPConfig:
    """Read a feed-forward layer without a gate.

    default, key:  of its activation
    """
    act = activation(raw, key, default)
    return MLPConfig(
        size=positive(raw, "intermediate_size"), activation=act, gated=False, bias=bias
    )


def alike(
    raw: RawConfig,
    turn: RopeConfig,
    mlp: MLPConfig,
    windows: int | Sequence[int | None] | None = None,
    rotates: Sequence[bool] | None = None,
) -> tuple[LayerConfig, ...]:
    """Return layers that differ at most in their windows and in whether they have RoPE.

    windows:  one for all, or each layer's
    """
    num_layers = positive(raw, "num_hidden_layers")
    if windows is None or isinstance(windows, int):
        windows = [windows] * num_layers
    if rotates is None:
        rotates = [True] * num_layers
    return tuple(
        LayerConfig(rope=turn if is_rotated else NO_ROPE, mlp=mlp, window=window)
        for window, is_rotated in zip(windows, rotates, strict=True)
    )


def kinds_of_layers(raw: RawConfig, default: Sequence[str], windowed: str = WINDOWED) -> list[str]:
    """Return each layer's kind of attention: a window or full.

    default:   the kinds if config.json has no layer_types
    windowed:  the family's name of layers with a window
    """
    num_layers = positive(raw, "num_hidden_layers")
    kinds = raw.get("layer_types")
    if kinds is None:
        return list(default)
    unknown = sorted(set(kinds) - {windowed, FULL})
    if unknown or len(kinds) != num_layers:
        raise ConfigError(
            f"layer_types in config.json must hold {num_layers} entries out of {windowed}, {FULL}; "
            f"it has {len(kinds)}{', with ' + ', '.join(unknown) if unknown else ''}."
        )
    return list(kinds)


def windows_of_layers(
    raw: RawConfig, window: int | None, default: Sequence[str]
) -> list[int | None]:
    """Return each layer's window: `window` or none; `default` as for `kinds_of_layers`."""
    return [window if kind == WINDOWED else None for kind in kinds_of_layers(raw, default)]


def every(raw: RawConfig, period: int) -> list[str]:
    """Return kinds of layers of which each `period`-th has full attention."""
    num_layers = positive(raw, "num_hidden_layers")
    return [WINDOWED if (layer + 1) % period else FULL for layer in range(num_layers)]
