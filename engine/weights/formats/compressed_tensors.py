"""compressed-tensors: packed integers, integers of a byte, 8-bit floats and 4-bit floats.

Which of them a module has follows from its tensors. The number of bits of packed integers follows
from the settings of its group; `weight_shape` has the weight's size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from remora.configs.errors import ConfigError
from remora.engine.weights.formats.bits import WORD_BITS, unpack_bits, unpack_spread
from remora.engine.weights.formats.fp8 import scaled
from remora.engine.weights.formats.mxfp4 import powers_of_two
from remora.engine.weights.formats.stored import (
    ACTIVATION_SCALES,
    Format,
    Inventory,
    Parts,
    Settings,
    StoredWeight,
    matches,
    whole,
)
from remora.kernels.quantised.weight_kinds import Float4Weight, IntWeight

NAME = "compressed-tensors"
NO_SPARSITY = ("dense", "", None)
PACKED, WEIGHT, SCALE, ZERO, SHAPE = (
    ".weight_packed",
    ".weight",
    ".weight_scale",
    ".weight_zero_point",
    ".weight_shape",
)


def check(settings: Settings) -> None:
    """Raise ConfigError for what changes products in other ways."""
    sparsity = (settings.get("sparsity_config") or {}).get("format")
    refused = (
        (settings.get("transform_config"), "transform_config, which rotates inputs"),
        (sparsity not in NO_SPARSITY, f"sparsity_config of {sparsity}"),
        (settings.get("format") == "marlin-24", "format marlin-24"),
    )
    for is_given, what in refused:
        if is_given:
            raise ConfigError(f"config.json: {NAME} with {what} is not read. Use the original one.")
    for group in _groups(settings):
        if group.get("output_activations") and not _is_kv(group):
            raise ConfigError(f"config.json: {NAME} with output_activations is not read.")


def find(settings: Settings, inventory: Inventory) -> Iterator[StoredWeight]:
    """Yield a weight for each module with weight_packed, or with weight and weight_scale."""
    sizes = inventory.read([f"{name}{SHAPE}" for name in inventory.having(SHAPE)])
    for module in inventory.having(PACKED):
        inventory.part(module, SCALE, of=PACKED)
        if f"{module}{SHAPE}" not in inventory.shapes:
            yield _float4(module, _weights_of(settings, module), inventory)
            continue
        inventory.expect(f"{module}{SHAPE}", (2,), why="for outputs and inputs")
        outputs, inputs = (int(number) for number in sizes[f"{module}{SHAPE}"])
        yield _packed(module, (outputs, inputs), _weights_of(settings, module), inventory)
    for module in inventory.having(SCALE):
        if module + WEIGHT in inventory.shapes:
            yield _plain(module, _weights_of(settings, module), inventory)


def _groups(settings: Settings) -> list[Mapping[str, Any]]:
    return list((settings.get("config_groups") or {}).values())


def _is_kv(group: Mapping[str, Any]) -> bool:
    targets = group.get("targets") or ()
    return all(any(word in str(name) for word in ("k_proj", "v_proj")) for name in targets)


def _weights_of(settings: Settings, module: str) -> Mapping[str, Any]:
    """Return the settings of a module's weights: of a group that names it, or else a class."""
    groups = _groups(settings)
    for group in groups:
        if any(matches(str(target), module) for target in group.get("targets") or ()):
            return group.get("weights") or {}
    classes = [group for group in groups if "Linear" in (group.get("targets") or ())]
    return (classes or groups or [{}])[0].get("weights") or {}


def _packed(
    module: str, shape: tuple[int, int], weights: Mapping[str, Any], inventory: Inventory
) -> StoredWeight:
    outputs, inputs = shape
    bits = whole(weights, "num_bits", 4)
    if not 1 <= bits <= 8:
        raise ConfigError(
            f"config.json: {NAME} with num_bits {bits} for {module}; known are 1 to 8."
        )
    words = inventory.matrix(module + PACKED)[1]
    dense, spread = -(-inputs * bits // WORD_BITS), -(-inputs // (WORD_BITS // bits))
    why = f"for {outputs} x {inputs} weights of {bits} bits"
    inventory.expect(module + PACKED, (outputs, dense), (outputs, spread), why=why)
    size = _group_size(module, shape, weights, inventory)
    parts = {"codes": module + PACKED, "scales": module + SCALE}
    if module + ZERO in inventory.shapes:
        parts["zeros"] = module + ZERO
        rows = {-(-outputs * bits // WORD_BITS), -(-outputs // (WORD_BITS // bits))}
        groups = -(-inputs // size)
        inventory.expect(module + ZERO, *((number, groups) for number in sorted(rows)), why=why)
    if f"{module}.weight_g_idx" in inventory.shapes:
        parts["g_idx"] = f"{module}.weight_g_idx"
        inventory.expect(parts["g_idx"], (inputs,), why="for each input")
    return StoredWeight(
        name=module + WEIGHT,
        shape=shape,
        parts=parts,
        decode=partial(_decode_packed, shape=shape, bits=bits, size=size, is_dense=words == dense),
        label=f"{NAME} {bits} bits, groups of {size}",
    )


def _decode_packed(
    parts: Parts, *, shape: tuple[int, int], bits: int, size: int, is_dense: bool
) -> IntWeight:
    outputs, inputs = shape
    unpack = unpack_bits if is_dense else unpack_spread
    middle = 1 << bits - 1
    scales = parts["scales"].reshape(outputs, -1)
    if "zeros" in parts:
        zeros = unpack(parts["zeros"].T, bits, outputs).T
    else:
        zeros = torch.full(scales.shape, middle, dtype=torch.uint8)
    order = torch.arange(inputs) // size
    return IntWeight(
        codes=unpack(parts["codes"], bits, inputs),
        scales=scales,
        zeros=zeros,
        groups=parts["g_idx"].long() if "g_idx" in parts else order,
        bits=bits,
    )


def _group_size(
    module: str, shape: tuple[int, ...], weights: Mapping[str, Any], inventory: Inventory
) -> int:
    """Return the inputs of a group, by the settings. Raises ConfigError if scales do not fit."""
    outputs, inputs = shape
    size = whole(weights, "group_size", -1, least=-1)
    groups = 1 if size == -1 else -(-inputs // size)
    allowed = [(outputs, groups), *([(outputs,), (outputs, 1)] if groups == 1 else [])]
    why = f"for groups of {size} of {inputs} inputs" if size != -1 else "for each output"
    inventory.expect(module + SCALE, *allowed, why=why)
    return inputs if groups == 1 else size


def _plain(module: str, weights: Mapping[str, Any], inventory: Inventory) -> StoredWeight:
    """Return a weight of a byte for each number: an integer or an 8-bit float, by the settings."""
    name, scale = module + WEIGHT, module + SCALE
    shape = inventory.shapes[name]
    size = whole(weights, "group_size", -1, least=-1)
    if weights.get("type") == "float":
        block = weights.get("block_structure")
        if weights.get("strategy") == "group":
            block = (1, size)
        return scaled(inventory, name, scale, tuple(block) if block else None)
    shape = inventory.matrix(name)
    if weights.get("strategy") == "tensor":
        inventory.expect(scale, (), (1,), (1, 1), why="for the tensor")
        size = shape[1]
    else:
        size = _group_size(module, shape, weights, inventory)
    bits = whole(weights, "num_bits", 8)
    parts = {"codes": name, "scales": scale}
    if module + ZERO in inventory.shapes:
        parts["zeros"] = module + ZERO
        inventory.expect(parts["zeros"], inventory.shapes[scale], why="as its scales are")
    return StoredWeight(
        name=name,
        shape=shape,
        parts=parts,
        decode=partial(_decode_bytes, bits=bits, size=size),
        label=f"{NAME} int{bits}, groups of {size}",
    )


def _decode_bytes(parts: Parts, *, bits: int, size: int) -> IntWeight:
    outputs, inputs = parts["codes"].shape
    shape = outputs, -(-inputs // size)
    zeros = parts.get("zeros")
    return IntWeight(
        codes=parts["codes"],
        scales=parts["scales"].reshape(-1, shape[1]).expand(shape),
        zeros=None if zeros is None else zeros.reshape(-1, shape[1]).expand(shape),
        groups=torch.arange(inputs) // size,
        bits=bits,
    )


def _float4(module: str, weights: Mapping[str, Any], inventory: Inventory) -> StoredWeight:
    outputs, half = inventory.matrix(module + PACKED)
    divisor = f"{module}.weight_global_scale"
    size = whole(weights, "group_size", 16 if divisor in inventory.shapes else 32)
    parts = {"values": module + PACKED, "scales": module + SCALE}
    why = f"for groups of {size} of {2 * half} inputs"
    inventory.expect(module + SCALE, (outputs, -(-2 * half // size)), why=why)
    if divisor in inventory.shapes:
        inventory.expect(divisor, (), (1,), why="for the tensor")
        parts["divisor"] = divisor
    return StoredWeight(
        name=module + WEIGHT,
        shape=(outputs, 2 * half),
        parts=parts,
        decode=_decode_float4,
        label=f"{NAME} {'nvfp4' if 'divisor' in parts else 'mxfp4'}",
    )


def _decode_float4(parts: Parts) -> Float4Weight:
    if "divisor" not in parts:
        return Float4Weight(values=parts["values"], scales=powers_of_two(parts["scales"]))
    factor = 1 / parts["divisor"].float()
    factors = factor.flatten().expand(len(parts["values"]))
    return Float4Weight(values=parts["values"], scales=parts["scales"], factors=factors)


def kept(settings: Settings) -> Iterable[str]:
    """Return the modules that are listed as unquantised."""
    return settings.get("ignore") or ()


FORMAT = Format(
    methods=(NAME, "w8a8-int8"),
    find=find,
    check=check,
    kept=kept,
    unused=re.compile(
        rf"{ACTIVATION_SCALES.pattern}|.*\.(?:weight_shape|input_global_scale|weight_g_idx)"
    ),
    key="config_groups",
)
