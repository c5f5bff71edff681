"""Parses the RoPE settings of a checkpoint, in both forms that config.json files have.

transformers 5 writes `rope_parameters` with all of them; older files have `rope_theta` and an
optional `rope_scaling`. Pure; `engine/layers/rotary.py` turns the result into angles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remora.configs.errors import ConfigError

DEFAULT_THETA = 10_000.0
DEFAULT_BETA_FAST, DEFAULT_BETA_SLOW = 32.0, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions become angles.

    kind:                   default, linear, dynamic, llama3, yarn, longrope, divided (a divisor per
                            frequency, GGUF's form of llama3), or none: no rotation
    rotary_dim:             rotated elements at the beginning of each head; None = all
    interleaved:            whether pairs are neighbours; else an element of the first half and the
                            one at the same position in the second half
    original_max_position:  tokens that the unscaled model was trained on
    attention_factor:       factor on cosines and sines
    divisors:               [rotary_dim / 2], for divided; for longrope up to the original length
    long_divisors:          [rotary_dim / 2], for longrope, beyond it
    """

    kind: str = "default"
    theta: float = DEFAULT_THETA
    rotary_dim: int | None = None
    interleaved: bool = False
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = DEFAULT_BETA_FAST
    beta_slow: float = DEFAULT_BETA_SLOW
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()


NO_ROPE = RopeConfig(kind="none")

ALLOWED_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
    "longrope": frozenset(
        {
            "short_factor",
            "long_factor",
            "factor",
            "attention_factor",
            "original_max_position_embeddings",
        }
    ),
    "divided": frozenset({"divisors"}),
}
SAME_KINDS = {"su": "longrope"}
COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta"})


def parse_rope(
    raw: Mapping[str, Any],
    max_position_embeddings: int,
    head_dim: int,
    *,
    partial: float | None = None,
    interleaved: bool = False,
) -> tuple[RopeConfig, int]:
    """Parse RoPE settings; return them and the longest sequence in tokens.

    partial:  fraction of each head that is rotated; None = all of it, other settings are refused
    `linear` leaves `max_position_embeddings` unchanged (files may have scaled it already);
    `dynamic` multiplies it, `yarn` multiplies its original length if that is larger.
    Raises ConfigError naming the key.
    """
    rotary_dim = head_dim if partial is None else int(head_dim * partial)
    if rotary_dim % 2:
        raise ConfigError(f"head_dim is {rotary_dim}; rotary embedding needs an even number.")
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = settings.get("rope_type", settings.get("type", "default"))
    kind = SAME_KINDS.get(kind, kind)
    _check(raw, settings, kind, may_be_partial=partial is not None)
    theta = settings.get("rope_theta") or raw.get("rope_theta") or DEFAULT_THETA
    original = max_position_embeddings
    if kind in ("llama3", "yarn", "longrope"):
        original = (
            raw.get("original_max_position_embeddings")
            or settings.get("original_max_position_embeddings")
            or original
        )
    factor = settings.get("factor")
    if factor is None:
        factor = max_position_embeddings / original
    common = {
        "kind": kind,
        "theta": float(theta),
        "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
        "interleaved": interleaved,
        "factor": float(factor),
        "original_max_position": original,
    }
    further: dict[str, Any] = {}
    longest = max_position_embeddings
    match kind:
        case "dynamic":
            longest = int(factor * max_position_embeddings)
        case "llama3":
            further = {key: settings[key] for key in ("low_freq_factor", "high_freq_factor")}
        case "yarn":
            further = _yarn(settings, factor)
            longest = max(max_position_embeddings, int(factor * original))
        case "longrope":
            further = _longrope(settings, factor, original, rotary_dim // 2)
        case "divided":
            further = {"divisors": tuple(settings["divisors"])}
    return RopeConfig(**common, **further), longest


def _check(
    raw: Mapping[str, Any], settings: Mapping[str, Any], kind: str, *, may_be_partial: bool
) -> None:
    if kind not in ALLOWED_KEYS:
        raise ConfigError(
            f"rope type in config.json is {kind!r}; known are {', '.join(ALLOWED_KEYS)}."
        )
    partial = raw.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0) and not may_be_partial:
        raise ConfigError(
            f"partial_rotary_factor in config.json is {partial}; only whole heads can be rotated."
        )
    allowed = ALLOWED_KEYS[kind] | COMMON_KEYS | {"partial_rotary_factor"}
    unknown = sorted(set(settings) - allowed)
    if unknown:
        raise ConfigError(
            f"rope settings in config.json hold {', '.join(unknown)}, which rope type {kind!r} "
            f"does not have; it has {', '.join(sorted(ALLOWED_KEYS[kind])) or 'none'}."
        )
    needed = {
        "linear": {"factor"},
        "dynamic": {"factor"},
        "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
        "longrope": {"short_factor", "long_factor"},
    }.get(kind, set())
    missing = sorted(key for key in needed if settings.get(key) is None)
    if missing:
        raise ConfigError(f"rope settings of type {kind!r} in config.json lack {missing[0]}.")


def _yarn(settings: Mapping[str, Any], factor: float) -> dict[str, Any]:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = settings.get("attention_factor")
    if attention_factor is None:
        scale, scale_all = settings.get("mscale"), settings.get("mscale_all_dim")
        attention_factor = magnitude(1.0)
        if scale and scale_all:
            attention_factor = magnitude(scale) / magnitude(scale_all)
    return {
        "attention_factor": attention_factor,
        "beta_fast": settings.get("beta_fast") or DEFAULT_BETA_FAST,
        "beta_slow": settings.get("beta_slow") or DEFAULT_BETA_SLOW,
        "truncate": settings.get("truncate", True),
    }


def _longrope(
    settings: Mapping[str, Any], factor: float, original: int, num_pairs: int
) -> dict[str, Any]:
    """Frequencies divided by numbers that were searched for (LongRoPE, arXiv:2402.13753)."""
    short, long = tuple(settings["short_factor"]), tuple(settings["long_factor"])
    if len(short) != num_pairs or len(long) != num_pairs:
        raise ConfigError(
            f"short_factor and long_factor in config.json hold {len(short)} and {len(long)} "
            f"numbers; {num_pairs} pairs of each head are turned."
        )
    attention_factor = settings.get("attention_factor")
    if attention_factor is None:
        stretch = math.log(factor) / math.log(original) if factor > 1 else 0.0
        attention_factor = math.sqrt(1 + stretch)
    return {"attention_factor": attention_factor, "divisors": short, "long_divisors": long}
