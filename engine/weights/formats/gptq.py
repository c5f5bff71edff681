"""GPTQ (arXiv:2210.17323): integers of 2, 3, 4 or 8 bits with a scale and a zero for each group.

Inputs lie along a column of words as a stream of bits, zeros along a row of words. Version 1 stores
zeros less one, by a subtraction from whole words, so reading adds to whole words.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.weights.formats.awq import group_size
from remora.engine.weights.formats.bits import WORD_BITS, add_to_each, unpack_bits
from remora.engine.weights.formats.stored import Format, Inventory, Parts, Settings, StoredWeight
from remora.kernels.quantised.weight_kinds import IntWeight

KNOWN_BITS = (2, 3, 4, 8)
LAYOUTS = {"gptq": True, "gptq_v2": False}  # whether zeros are stored less one
OWN_GROUPS = ("dynamic", "extra_config")  # settings of single modules


def check(settings: Settings) -> None:
    """Raise ConfigError for other layouts and numbers of bits."""
    layout, bits = settings.get("checkpoint_format") or "gptq", settings.get("bits", 4)
    if layout not in LAYOUTS or settings.get("is_marlin_format"):
        found = "marlin" if layout in LAYOUTS else layout
        raise ConfigError(
            f"config.json: gptq with checkpoint_format {found} is not read; formats read are "
            f"{' and '.join(LAYOUTS)}. Use the checkpoint in one of these, or the original one."
        )
    if bits not in KNOWN_BITS:
        known = ", ".join(map(str, KNOWN_BITS))
        raise ConfigError(f"config.json: gptq with bits {bits} is not read; known are {known}.")
    if settings.get("pack_dtype", "int32") != "int32":
        raise ConfigError(
            f"config.json: gptq with pack_dtype {settings['pack_dtype']} is not read; int32 is."
        )


def find(settings: Settings, inventory: Inventory) -> Iterator[StoredWeight]:
    """Yield a weight for each module with qweight; the number of bits is that of its tensors."""
    is_less_one = LAYOUTS[str(settings.get("checkpoint_format") or "gptq")]
    is_symmetric = bool(settings.get("sym", True))
    for module in inventory.having(".qweight"):
        parts = {
            key: inventory.part(module, f".{key}", of="qweight")
            for key in ("qweight", "qzeros", "scales")
        }
        if f"{module}.g_idx" in inventory.shapes:
            parts["g_idx"] = f"{module}.g_idx"
        words, outputs = inventory.matrix(parts["qweight"])
        bits = inventory.matrix(parts["qzeros"])[1] * WORD_BITS // max(outputs, 1)
        if bits not in KNOWN_BITS:
            known = ", ".join(map(str, KNOWN_BITS))
            raise inventory.unfit(parts["qzeros"], f"zeros of {known} bits", "for each output")
        inputs = words * WORD_BITS // bits
        size = _group_size(settings, inputs, inventory.matrix(parts["scales"])[0])
        shape = (-(-inputs // size), outputs)
        why = f"for groups of {size} of {inputs} inputs and {outputs} outputs"
        inventory.expect(parts["scales"], shape, why=why)
        inventory.expect(parts["qzeros"], (shape[0], outputs * bits // WORD_BITS), why=why)
        if "g_idx" in parts:
            inventory.expect(parts["g_idx"], (inputs,), why="for each input")
        if bits == 3 and is_less_one and not is_symmetric:
            raise ConfigError(
                f"{module} in {inventory.label} is gptq with 3 bits and asymmetric zeros in "
                "checkpoint_format gptq, which packages encode differently. Use gptq_v2."
            )
        yield StoredWeight(
            name=f"{module}.weight",
            shape=(outputs, inputs),
            parts=parts,
            decode=partial(
                _decode, bits=bits, size=size, is_less_one=is_less_one, is_symmetric=is_symmetric
            ),
            label=f"gptq {bits} bits, groups of {size}",
        )


def _group_size(settings: Settings, inputs: int, groups: int) -> int:
    """Return the inputs of a group: the settings', or a module's own where settings allow that."""
    size = group_size(settings, inputs)
    has_own = any(settings.get(key) for key in OWN_GROUPS)
    if has_own and -(-inputs // size) != groups and groups and inputs % groups == 0:
        return inputs // groups
    return size


def _decode(
    parts: Parts, *, bits: int, size: int, is_less_one: bool, is_symmetric: bool
) -> IntWeight:
    words, scales = parts["qweight"], parts["scales"]
    inputs = words.shape[0] * WORD_BITS // bits
    return IntWeight(
        codes=unpack_bits(words.T, bits, inputs),
        scales=scales.T,
        zeros=_zeros(parts["qzeros"], bits, is_less_one, is_symmetric).T,
        groups=parts["g_idx"].long() if "g_idx" in parts else torch.arange(inputs) // size,
        bits=bits,
    )


def _zeros(words: Tensor, bits: int, is_less_one: bool, is_symmetric: bool) -> Tensor:
    """Return zeros [G, O].

    Symmetric ones are the middle of the range; files exist that store them as such although they
    say that zeros are stored less one.
    """
    outputs, middle = words.shape[1] * WORD_BITS // bits, 1 << bits - 1
    stored = unpack_bits(words, bits, outputs)
    if is_symmetric and (bits == 3 or (stored == middle).all() or (stored == middle - 1).all()):
        return torch.full_like(stored, middle)
    return unpack_bits(add_to_each(words, bits), bits, outputs) if is_less_one else stored


def _from_file(content: Settings) -> Settings:
    return {"quant_method": "gptq", **content}


FORMAT = Format(
    methods=("gptq", "gptq-marlin"),
    find=find,
    check=check,
    file="quantize_config.json",
    from_file=_from_file,
)
