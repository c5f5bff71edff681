"""What a decoder is made of: a checkpoint's config.json, understood.

Pure: takes the parsed JSON, opens no file. Strict: what would change the numbers and is not known
here is refused, never ignored. One function per family turns its own words into `DecoderConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from remora.configs.errors import ConfigError
from remora.engine.models.rope_config import RopeConfig, parse_rope

RawConfig = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A dense decoder-only transformer.

    max_position:        longest sequence it was made for, in tokens, rope scaling included
    windows:             [num_layers] sliding window of each layer in tokens; None = all positions
    qkv_bias, attention_out_bias, mlp_bias:  which linears have a bias
    qk_norm:             whether each head of q and k is normalised before rotation
    tied_embeddings:     whether the head uses the embedding's weight
    eos_token_ids:       ids that end a sequence, as config.json has them
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()


def parse_config(raw: RawConfig) -> DecoderConfig:
    """Understand a config.json. Raises ConfigError naming the key."""
    architecture = _architecture(raw)
    if raw.get("quantization_config"):
        raise ConfigError(
            "config.json has a quantization_config; only unquantised checkpoints and GGUF files "
            "can be loaded. Use the original checkpoint."
        )
    return ARCHITECTURES[architecture](architecture, raw)


def _architecture(raw: RawConfig) -> str:
    named = raw.get("architectures") or []
    for name in named:
        if name in ARCHITECTURES:
            return str(name)
    found = ", ".join(map(str, named)) or "none at all"
    raise ConfigError(
        f"config.json names the architecture {found}; known are {', '.join(ARCHITECTURES)}."
    )


def _llama(architecture: str, raw: RawConfig) -> DecoderConfig:
    bias = bool(raw.get("attention_bias", False))
    return _decoder(
        architecture,
        {"num_key_value_heads": raw.get("num_attention_heads"), **_without_nulls(raw)},
        windows=None,
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


def _mistral(architecture: str, raw: RawConfig) -> DecoderConfig:
    # Absent means 4096, null means none: so it is in transformers.
    return _decoder(architecture, raw, windows=raw.get("sliding_window", 4096))


def _qwen2(architecture: str, raw: RawConfig) -> DecoderConfig:
    return _decoder(architecture, raw, windows=_qwen_windows(raw), qkv_bias=True)


def _qwen3(architecture: str, raw: RawConfig) -> DecoderConfig:
    bias = bool(raw.get("attention_bias", False))
    return _decoder(
        architecture,
        {"head_dim": 128, **_without_nulls(raw)},
        windows=_qwen_windows(raw),
        qkv_bias=bias,
        attention_out_bias=bias,
        qk_norm=True,
    )


ARCHITECTURES: dict[str, Callable[[str, RawConfig], DecoderConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


def _qwen_windows(raw: RawConfig) -> list[int | None] | None:
    window = raw.get("sliding_window", 4096)
    if not raw.get("use_sliding_window", False) or window is None:
        return None
    num_layers = _positive(raw, "num_hidden_layers")
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", 28)
        return [window if layer >= first else None for layer in range(num_layers)]
    known = {"sliding_attention": window, "full_attention": None}
    unknown = sorted(set(kinds) - set(known))
    if unknown or len(kinds) != num_layers:
        raise ConfigError(
            f"layer_types in config.json must hold {num_layers} entries out of {', '.join(known)}; "
            f"it has {len(kinds)}{', with ' + ', '.join(unknown) if unknown else ''}."
        )
    return [known[kind] for kind in kinds]


def _decoder(
    architecture: str,
    raw: RawConfig,
    *,
    windows: int | list[int | None] | None,
    qkv_bias: bool = False,
    attention_out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderConfig:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act in config.json is {activation!r}; only 'silu' is known.")
    num_layers = _positive(raw, "num_hidden_layers")
    num_heads = _positive(raw, "num_attention_heads")
    num_kv_heads = _positive(raw, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_attention_heads ({num_heads}) in config.json is not a multiple of "
            f"num_key_value_heads ({num_kv_heads})."
        )
    hidden_size = _positive(raw, "hidden_size")
    head_dim = raw.get("head_dim") or hidden_size // num_heads
    rope, max_position = parse_rope(raw, _positive(raw, "max_position_embeddings"), head_dim)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        windows=tuple(windows) if isinstance(windows, list) else (windows,) * num_layers,
        qkv_bias=qkv_bias,
        attention_out_bias=attention_out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(raw),
    )


def _positive(raw: RawConfig, key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        found = "is missing" if value is None else f"is {value!r}"
        raise ConfigError(f"{key} in config.json {found}; it must be a whole number above 0.")
    return value


def _without_nulls(raw: RawConfig) -> dict[str, Any]:
    """Drop null entries, which mean the family's default."""
    return {key: value for key, value in raw.items() if value is not None}


def _eos_token_ids(raw: RawConfig) -> tuple[int, ...]:
    found = raw.get("eos_token_id")
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)
