"""Static scales of cached K and V: those of a file, or else of the checkpoint.

Knows the names of the tensors in checkpoints. Scales are read once, by rank 0, and are part of its
plan; each rank takes those of its layers and heads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.configs.facts import ModelFacts
from remora.configs.planning.kv_format import KVScales
from remora.configs.planning.plan import EnginePlan
from remora.configs.schema import ServeConfig
from remora.configs.sections.engine import KV_8_BIT
from remora.engine.models.checkpoint import is_gguf
from remora.engine.models.load import open_stored
from remora.engine.protocols import WeightSource
from remora.engine.weights.kv_scale_files import checked, read_scale_file
from remora.kernels.kv_store import SCALE_DTYPE

_NAME = re.compile(
    r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?:\w+\.)*"
    r"(?:(?P<part>[kv])_scale|(?P<projection>[kv])_proj\.output_scale|kv_scale)"
)


def with_kv_scales(plan: EnginePlan, config: ServeConfig, model: ModelFacts) -> EnginePlan:
    """Return the plan with static scales of K and V, where there are some for its format.

    Raises ConfigError for scales that do not fit the model.
    """
    if plan.kv_dtype not in KV_8_BIT:
        return plan
    shape = {"num_layers": model.num_layers, "num_kv_heads": model.num_kv_heads}
    if config.engine.kv_scales_file is not None:
        file = Path(config.engine.kv_scales_file).expanduser()
        scales = read_scale_file(file, kv_dtype=plan.kv_dtype, **shape)
        return replace(plan, kv_scales=scales, kv_scales_of=file.name)
    if plan.load_format == "dummy" or is_gguf(plan.model_path):
        return plan
    if plan.kv_dtype != (model.kv_dtype or "fp8_e4m3"):  # scales of an undeclared format are e4m3's
        return plan
    scales = read_stored_scales(
        open_stored(plan.model_path, plan.load_format, plan.loading), **shape
    )
    return replace(plan, kv_scales=scales, kv_scales_of="the checkpoint") if scales else plan


def read_stored_scales(source: WeightSource, *, num_layers: int, num_kv_heads: int) -> KVScales:
    """Return a checkpoint's scales of K and V; () = it has none.

    Raises ConfigError if some layers have none, or for scales that do not fit the model.
    """
    names: dict[tuple[int, str], str] = {}
    for name in source.shapes():
        if found := _NAME.fullmatch(name):
            part = found["part"] or found["projection"] or "kv"
            for each in part:
                names[int(found["layer"]), each] = name
    if not names:
        return ()
    tensors = dict(source.read(set(names.values())))
    layers = []
    for layer in range(num_layers):
        parts = []
        for part in "kv":
            if (layer, part) not in names:
                raise ConfigError(
                    f"{source.label} has scales of K and V, and none of {part.upper()} in layer "
                    f"{layer}. Is the checkpoint complete? K and V in the model's format need none."
                )
            name = names[layer, part]
            parts.append(_scales_of(name, tensors[name], num_kv_heads, source.label))
        layers.append((parts[0], parts[1]))
    return tuple(layers)


def _scales_of(name: str, tensor: Tensor, num_kv_heads: int, label: str) -> tuple[float, ...]:
    """Return the scales of each KV head from a tensor with one for all, or one for each."""
    if tensor.numel() not in (1, num_kv_heads):
        raise ConfigError(
            f"{name} in {label} is {list(tensor.shape)}; expected one scale, or one for each of "
            f"{num_kv_heads} KV heads."
        )
    try:
        scales = [checked(scale, "K or V") for scale in tensor.double().flatten().tolist()]
    except ValueError as error:
        raise ConfigError(f"{name} in {label} {error}.") from error
    return tuple(scales * (num_kv_heads // len(scales)))


def held_scales(scales: KVScales, layers: Sequence[int], heads: Sequence[int]) -> Tensor | None:
    """Return what a rank holds of scales: [layers, 2, heads] bfloat16; None = there are none."""
    if not scales:
        return None
    held = [[[part[head] for head in heads] for part in scales[layer]] for layer in layers]
    return torch.tensor(held, dtype=torch.float32).view(len(layers), 2, len(heads)).to(SCALE_DTYPE)
