"""torchao's Int8Tensor and Float8Tensor: a weight's data and scales under names of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch

from remora.engine.weights.formats.fp8 import scaled
from remora.engine.weights.formats.stored import Format, Inventory, Parts, Settings, StoredWeight
from remora.kernels.quantised.weight_kinds import FP8_DTYPES, IntWeight, WeightKind

DATA, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"


def find(settings: Settings, inventory: Inventory) -> Iterator[StoredWeight]:
    """Yield a weight for each module with data; integers or floats, as the data are."""
    for prefix in inventory.having(DATA):
        scale = inventory.part(prefix, SCALE, of=DATA)
        outputs, inputs = inventory.matrix(prefix + DATA)
        groups = max(inventory.matrix(scale)[1], 1) if len(inventory.shapes[scale]) == 2 else 1
        parts = {"values": prefix + DATA, "scales": scale}
        if groups > 1:
            inventory.expect(scale, (outputs, groups), why="for groups of inputs")
        floats = scaled(inventory, prefix + DATA, scale, (1, -(-inputs // groups)))
        if prefix + ZERO in inventory.shapes:
            parts["zeros"] = prefix + ZERO
            inventory.expect(prefix + ZERO, inventory.shapes[scale], why="as its scales are")
        yield StoredWeight(
            name=f"{prefix}weight",
            shape=(outputs, inputs),
            parts=parts,
            decode=partial(_decode, floats=floats),
            label="torchao 8 bits",
        )


def _decode(parts: Parts, *, floats: StoredWeight) -> WeightKind:
    values, scales = parts["values"], parts["scales"]
    if values.dtype in FP8_DTYPES:
        return floats.decode(parts)
    groups = scales.shape[-1] if scales.ndim == 2 else 1
    outputs, inputs = values.shape
    zeros = parts.get("zeros")
    return IntWeight(
        codes=values,
        scales=scales.reshape(-1, groups).expand(outputs, groups),
        zeros=None if zeros is None else zeros.reshape(-1, groups).expand(outputs, groups),
        groups=torch.arange(inputs) // -(-inputs // groups),
        bits=8,
    )


def kept(settings: Settings) -> Iterable[str]:
    """Return the modules that are listed as unquantised."""
    return settings.get("modules_to_not_convert") or ()


FORMAT = Format(methods=("torchao",), find=find, kept=kept)
