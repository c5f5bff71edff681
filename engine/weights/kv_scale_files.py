"""Reads static scales of cached K and V from JSON files.

Two schemas are known. vLLM and SGLang: `kv_cache` with `dtype` and `scaling_factor`, one scale for
K and V of each tensor-parallel rank and layer. LightLLM: `scales` of each layer, of K and V, for
all heads or for each of them. Scales of ranks become those of their heads, so a file does not
depend on the ranks that read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remora.configs.errors import ConfigError
from remora.configs.planning.kv_format import KVScales
from remora.kernels.kv_store import GREATEST, KV_DTYPES

# Formats by the names of dtypes in files.
DTYPES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "int8": "int8"}
# Beyond these, quotients of bfloat16 numbers are not finite, or zeros.
LEAST, MOST = 1e-30, 1e30


def read_scale_file(path: Path, *, kv_dtype: str, num_layers: int, num_kv_heads: int) -> KVScales:
    """Return the scales of a file for K and V of a model.

    kv_dtype:  the format that they must be for, by its name in configurations
    Raises ConfigError for a file that is missing, or does not fit the format or the model.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"engine.kv_scales_file: {path} cannot be read: {error.strerror}."
        ) from error
    except ValueError as error:
        raise ConfigError(f"engine.kv_scales_file: {path} is not valid JSON: {error}.") from error
    file = _File(path, num_layers, num_kv_heads)
    if isinstance(content, Mapping) and isinstance(content.get("kv_cache"), Mapping):
        dtype, scales = file.by_rank(content["kv_cache"])
    elif isinstance(content, Mapping) and "scales" in content:
        dtype, scales = file.by_layer(content)
    else:
        raise file.fault(
            "holds neither kv_cache with scaling_factor (vLLM, SGLang) nor scales (LightLLM)"
        )
    if dtype != kv_dtype:
        raise file.fault(f"is for {dtype}, and engine.kv_dtype is {kv_dtype}; set that to {dtype}")
    return scales


def checked(scale: Any, place: str) -> float:
    """Return a scale. Raises ValueError if it is none that can divide."""
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not is_number or not LEAST <= scale <= MOST:
        raise ValueError(f"has the scale {scale} for {place}; expected {LEAST:g} to {MOST:g}")
    return float(scale)


class _File:
    """A file of a model with so many layers and KV heads."""

    def __init__(self, path: Path, num_layers: int, num_kv_heads: int) -> None:
        self._path, self._num_layers, self._num_kv_heads = path, num_layers, num_kv_heads

    def fault(self, what: str) -> ConfigError:
        return ConfigError(f"engine.kv_scales_file: {self._path} {what}.")

    def by_rank(self, content: Mapping[str, Any]) -> tuple[str, KVScales]:
        """Read the schema of vLLM and SGLang; return the format and the scales."""
        dtype, ranks = content.get("dtype"), content.get("scaling_factor")
        if dtype not in DTYPES:
            raise self.fault(f"has the dtype {dtype}; known are {', '.join(DTYPES)}")
        if not isinstance(ranks, Mapping) or set(ranks) != {
            str(rank) for rank in range(len(ranks))
        }:
            raise self.fault("has no scaling_factor of ranks 0, 1 and so on")
        if not ranks or self._num_kv_heads % len(ranks):
            raise self.fault(
                f"has scales of {len(ranks)} ranks, and they must divide the {self._num_kv_heads} "
                "KV heads"
            )
        each = self._num_kv_heads // len(ranks)
        layers = []
        for layer in range(self._num_layers):
            heads: list[float] = []
            for rank in range(len(ranks)):
                factors = self._layers_of(ranks[str(rank)], rank)
                place = f"layer {layer} of rank {rank}"
                heads += [self._checked(factors[str(layer)], place)] * each
            layers.append((tuple(heads), tuple(heads)))
        return DTYPES[str(dtype)], tuple(layers)

    def by_layer(self, content: Mapping[str, Any]) -> tuple[str, KVScales]:
        """Read LightLLM's schema; return the format and the scales."""
        numbers = {GREATEST[dtype]: name for name, dtype in KV_DTYPES.items()}
        greatest, rows = content.get("qmax"), content["scales"]
        if greatest not in numbers:
            raise self.fault(f"has the qmax {greatest}; known are {[*numbers]}")
        if not isinstance(rows, Sequence) or len(rows) != self._num_layers:
            found = len(rows) if isinstance(rows, Sequence) else "no"
            raise self.fault(f"has scales of {found} layers, and the model has {self._num_layers}")
        layers = []
        for layer, row in enumerate(rows):
            if not isinstance(row, Sequence) or len(row) not in (2, 2 * self._num_kv_heads):
                raise self.fault(
                    f"has for layer {layer} neither 2 scales nor {2 * self._num_kv_heads}, of K "
                    f"and V of {self._num_kv_heads} KV heads"
                )
            numbers_of = [self._checked(scale, f"layer {layer}") for scale in row]
            half, times = len(row) // 2, self._num_kv_heads * 2 // len(row)
            layers.append((tuple(numbers_of[:half] * times), tuple(numbers_of[half:] * times)))
        return numbers[greatest], tuple(layers)

    def _layers_of(self, factors: Any, rank: int) -> Mapping[str, Any]:
        wanted = {str(layer) for layer in range(self._num_layers)}
        found = set(factors) if isinstance(factors, Mapping) else set()
        if found != wanted:
            missing = sorted(wanted - found, key=int)
            what = f"lacks layer {missing[0]}" if missing else f"has {len(found)} layers"
            raise self.fault(f"{what} of rank {rank}, and the model has {self._num_layers} layers")
        assert isinstance(factors, Mapping)
        return factors

    def _checked(self, scale: Any, place: str) -> float:
        try:
            return checked(scale, place)
        except ValueError as error:
            raise self.fault(str(error)) from error
