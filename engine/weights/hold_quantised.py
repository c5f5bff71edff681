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
from remora.kernels.moe import multiplies_fp8
from remora.kernels.quantised.device_formats import joined, to_format, to_fp8_blocks
from remora.kernels.quantised.parts import part
from remora.kernels.quantised.quant_formats import (
    BLOCK,
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
    held = Counter(NAMES[type(each)] for _, linear in model.linears() for each in linear.quantised)
    if experts := sum(layer.quantised is not None for _, layer in model.experts()):
        held[f"layers of experts in {NAMES[Fp8BlockWeight]}"] = experts
    found = [f"{number} {name}" for name, number in held.most_common()]
    if model.dequantised:
        found.append(f"{len(model.dequantised)} dequantised")
    return ", ".join(found)


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
    return tuple(moved(weight, linear.device) for weight in joined(in_order))


def _read_experts(
    experts: Experts, weights: Sequence[Mapping[str, tuple[Axis, Axis]]], source: QuantisedSource
) -> tuple[Fp8BlockWeight, Fp8BlockWeight] | None:
    """Return a layer's shards of its experts; None = they are not float8 in blocks that fit."""
    number, device = len(weights), experts.device
    inner, hidden = (len(axis.held) for axis in next(iter(weights[0].values())))
    if not multiplies_fp8(torch.device(device), inner):
        return None
    gate_up = _allocate_blocks(number, 2 * inner, hidden, device)
    down = _allocate_blocks(number, hidden, inner, device)
    places: dict[str, tuple[Fp8BlockWeight, tuple[Axis, Axis]]] = {}
    for expert, axes in enumerate(weights):
        gate, up = (_rows_of(gate_up, expert, first, inner) for first in (0, inner))
        memory = (gate, up, _rows_of(down, expert, 0, hidden))
        places |= {name: (of, axes[name]) for name, of in zip(axes, memory, strict=True)}
    for name, kind in source.kinds(places):
        to, axes_of = places[name]
        blocks = to_fp8_blocks(_shard(kind, *axes_of))
        if blocks is None:
            return None
        to.values.copy_(blocks.values)
        to.scales.copy_(blocks.scales)
    return gate_up, down


def _allocate_blocks(number: int, outputs: int, inputs: int, device: str) -> Fp8BlockWeight:
    blocks = number, -(-outputs // BLOCK), -(-inputs // BLOCK)
    return Fp8BlockWeight(
        values=torch.empty(number, outputs, inputs, dtype=torch.float8_e4m3fn, device=device),
        scales=torch.empty(blocks, device=device),
    )


def _rows_of(stack: Fp8BlockWeight, expert: int, first: int, count: int) -> Fp8BlockWeight:
    """Return a view of some outputs of an expert, which begin with a block."""
    blocks = slice(first // BLOCK, -(-(first + count) // BLOCK))
    return Fp8BlockWeight(
        values=stack.values[expert, first : first + count], scales=stack.scales[expert, blocks]
    )


def _shard(kind: WeightKind, outputs: Axis, inputs: Axis) -> WeightKind | None:
    """Return what a rank holds of a weight; None = it is of a kind that is not cut."""
    return part(kind, outputs.held, inputs.held)
