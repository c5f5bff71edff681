"""Puts quantised weights into a model's linear layers, for kernels that multiply them as they are.

A layer holds a quantised weight if each of its parts is quantised in a kind that has such a kernel;
experts of a layer are quantised all or none. What is left, `loader.py` fills with dequantised
numbers. Knows no checkpoint formats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from remora.engine.layers.experts import Experts
from remora.engine.layers.linear import Linear
from remora.engine.models.decoder import DecoderModel
from remora.engine.observe.progress import progress_bar
from remora.engine.parallel.shard import Axis
from remora.engine.protocols import QuantisedSource
from remora.kernels.moe import multiplies
from remora.kernels.moe_weights import StackableWeight, allocate_stack, write_rows
from remora.kernels.quantised.device_formats import are_alike, joined, to_format, to_stackable
from remora.kernels.quantised.parts import part
from remora.kernels.quantised.quant_formats import (
    Fp4GroupWeight,
    Fp8BlockWeight,
    Fp8Weight,
    Int4Weight,
    Int8GroupWeight,
    Int8Weight,
    QuantisedWeight,
    moved,
)
from remora.kernels.quantised.weight_kinds import WeightKind

NAMES: Mapping[type, str] = {
    Int4Weight: "int4",
    Int8Weight: "int8",
    Int8GroupWeight: "int8 in groups",
    Fp8Weight: "fp8",
    Fp8BlockWeight: "fp8 in blocks",
}
UP, DOWN = 1, 2  # places among an expert's weights
FP4_NAMES = {torch.float8_e8m0fnu: "mxfp4", torch.float8_e4m3fn: "nvfp4"}


@torch.inference_mode()
def hold_quantised(
    model: DecoderModel, source: QuantisedSource, label: str, *, show_progress: bool
) -> None:
    """Read the weights of all layers that can hold them quantised, before others are allocated."""
    quantised = {name for name, tensor in source.quantised().items() if not tensor.is_transposed}
    chosen: list[tuple[Linear, dict[str, Axis]]] = []
    for prefix, linear in model.linears():
        parts = linear.weights(prefix)
        if parts and parts.keys() <= quantised:
            chosen.append((linear, parts))
    routed = [(experts, experts.weights(prefix)) for prefix, experts in model.experts()]
    routed = [each for each in routed if all(names.keys() <= quantised for names in each[1])]
    number = len(chosen) + len(routed)
    with progress_bar(f"Loading quantised {label}", number, show_progress) as advance:
        for linear, parts in chosen:
            linear.quantised = _read(linear, parts, source)
            advance(1)
        for experts, names in routed:
            experts.quantised = _read_experts(experts, names, source)
            advance(1)
    model.dequantised = frozenset(model.tensors().keys() & quantised)


def describe_quantised(model: DecoderModel) -> str:
    """Return how many layers hold which quantised weights; empty = there are none."""
    held = Counter(_name_of(each) for _, linear in model.linears() for each in linear.quantised)
    for _, layer in model.experts():
        if layer.quantised is not None:
            held[f"layers of experts in {_name_of(layer.quantised[0])}"] += 1
    found = [f"{number} {name}" for name, number in held.most_common()]
    if model.dequantised:
        found.append(f"{len(model.dequantised)} dequantised")
    return ", ".join(found)


def _name_of(weight: QuantisedWeight) -> str:
    if isinstance(weight, Fp4GroupWeight):
        return FP4_NAMES[weight.scales.dtype]
    return NAMES[type(weight)]


def _read(
    linear: Linear, parts: Mapping[str, Axis], source: QuantisedSource
) -> tuple[QuantisedWeight, ...]:
    """Return a layer's shard of its parts; () = a part has no format that holds it."""
    found: dict[str, QuantisedWeight] = {}
    for name, kind in source.kinds(parts):
        held = _shard(kind, parts[name], linear.inputs)
        converted = None if held is None else to_format(held)
        if converted is None:
            return ()
        found[name] = converted
    in_order = [found[name] for name in parts]
    return tuple(moved(weight, linear.weight_device) for weight in joined(in_order))


def _read_experts(
    experts: Experts, weights: Sequence[Mapping[str, tuple[Axis, Axis]]], source: QuantisedSource
) -> tuple[StackableWeight, StackableWeight] | None:
    """Return a layer's shards of its experts; None = no format holds all of them."""
    number, device = len(weights), torch.device(experts.device)
    inner, hidden = (len(axis.held) for axis in next(iter(weights[0].values())))
    places = {
        name: (expert, part, axes[name])
        for expert, axes in enumerate(weights)
        for part, name in enumerate(axes)
    }
    stacks: dict[bool, StackableWeight] = {}  # by whether it is `down`
    for name, kind in source.kinds(places):
        expert, place, axes_of = places[name]
        is_down = place == DOWN
        held = to_stackable(_shard(kind, *axes_of))
        if held is None or not multiplies(held, device, inner):
            return None
        if is_down not in stacks:
            outputs = hidden if is_down else 2 * inner
            stacks[is_down] = allocate_stack(held, number, outputs, experts.weight_device)
        if not are_alike(stacks[is_down], held):
            return None
        write_rows(stacks[is_down], expert, inner if place == UP else 0, held)
    if type(stacks[False]) is not type(stacks[True]):
        return None
    return stacks[False], stacks[True]


def _shard(kind: WeightKind, outputs: Axis, inputs: Axis) -> WeightKind | None:
    """Return what a rank holds of a weight; None = it is of a kind that is not cut."""
    return part(kind, outputs.held, inputs.held)
