"""Which layers' weights are in host memory, and the bytes that they take there and on the GPU.

Pure arithmetic over a rank's layers; `engine/offload/` does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remora.configs.errors import ConfigError
from remora.configs.facts import ModelFacts
from remora.configs.planning.kv_budget import human_bytes
from remora.configs.planning.shares import rank_layers, share
from remora.configs.schema import ServeConfig
from remora.configs.sections.offload import OffloadSection


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """Weights in host memory.

    layers:        that are there, counted in the whole model
    prefetch:      copies begin this many of these layers ahead; 0 = when a layer is reached
    host_bytes:    in host memory, of the rank with the most
    buffer_bytes:  of buffers on the device, of the rank with the most
    saved_bytes:   on the device, of a rank of each pipeline stage
    """

    layers: tuple[int, ...]
    prefetch: int
    host_bytes: int
    buffer_bytes: int
    saved_bytes: tuple[int, ...]


def plan_offload(
    config: ServeConfig, model: ModelFacts, device: str, parameter_bytes: float
) -> OffloadPlan | None:
    """Return what the configuration offloads; None = nothing.

    parameter_bytes:  of a layer's parameter, on average
    Raises ConfigError, with settings that would work.
    """
    section, parallel = config.offload, config.parallel
    if section.key is None:
        return None
    if device == "cpu":
        raise ConfigError(
            f"{section.key}: the model runs on a CPU, whose weights are in host memory already; "
            "leave it out, or set engine.device to cuda"
        )
    in_layers = [
        round(number * parameter_bytes) for number in rank_layers(model, tp_size=parallel.tp_size)
    ]
    layers: list[int] = []
    moved, buffers = [], []
    for stage in range(parallel.pp_size):
        held = share(model.num_layers, stage, parallel.pp_size)
        chosen = _chosen(section, held, in_layers)
        if len(chosen) <= section.num_buffers:
            raise ConfigError(_saves_nothing(section, held, in_layers, len(chosen)))
        sizes = [in_layers[layer] for layer in chosen]
        moved.append(sum(sizes))
        number = section.num_buffers
        buffers.append(sum(max(sizes[first::number]) for first in range(number)))
        layers += chosen
    return OffloadPlan(
        layers=tuple(layers),
        prefetch=section.prefetch_layers,
        host_bytes=max(moved),
        buffer_bytes=max(buffers),
        saved_bytes=tuple(all_of - some for all_of, some in zip(moved, buffers, strict=True)),
    )


def describe_offload(plan: OffloadPlan) -> str:
    """Return which weights are in host memory, and the size of their buffers."""
    return (
        f"weights of {len(plan.layers)} layers in host memory ({human_bytes(plan.host_bytes)} of "
        f"a rank), through buffers of {human_bytes(plan.buffer_bytes)}"
    )


def _chosen(section: OffloadSection, held: range, in_layers: Sequence[int]) -> list[int]:
    """Return the offloaded layers of those that a stage holds."""
    if section.group_size is not None:
        stay = section.group_size - section.num_in_group
        return [layer for layer in held if (layer - held.start) % section.group_size >= stay]
    assert section.host_memory is not None
    for number in range(len(held), 0, -1):
        spread = [held[(place + 1) * len(held) // number - 1] for place in range(number)]
        if sum(in_layers[layer] for layer in spread) <= section.host_memory:
            return spread
    return []


def _saves_nothing(
    section: OffloadSection, held: range, in_layers: Sequence[int], number: int
) -> str:
    buffers = section.num_buffers
    largest = max(in_layers[layer] for layer in held)
    if section.group_size is not None:
        found = f"offload.group_size = {section.group_size}"
        advice = "a smaller group_size, a larger num_in_group"
    else:
        assert section.host_memory is not None
        found = f"offload.host_memory = {human_bytes(section.host_memory)}"
        needed = -(-(buffers + 1) * largest // 2**20)
        advice = f"host_memory of {needed}MiB or more"
    if len(held) <= buffers == 1:
        advice = "leave it out"
    elif buffers > 1:
        advice += ", or a smaller prefetch_layers"
    return (
        f"{found} keeps {number} of a rank's {len(held)} layers in host memory (up to "
        f"{human_bytes(largest)} each), and offload.prefetch_layers = {section.prefetch_layers} "
        f"keeps buffers for {buffers} on the GPU, so no memory is saved. Options: {advice}"
    )
