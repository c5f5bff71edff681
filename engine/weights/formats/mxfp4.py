"""MXFP4 of GPT-OSS: `X_blocks` with `X_scales`, 4-bit floats with an exponent for each 32.

The weights of a layer's experts are stored as [E, O, I] and belong to tensors [E, I, O].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from remora.engine.weights.formats.stored import Format, Inventory, Parts, Settings, StoredWeight
from remora.kernels.quantised.weight_kinds import Float4Weight

BLOCKS, SCALES = "_blocks", "_scales"


def find(settings: Settings, inventory: Inventory) -> Iterator[StoredWeight]:
    """Yield a weight for each tensor of blocks."""
    for name in inventory.having(BLOCKS):
        scales = inventory.part(name, SCALES, of=BLOCKS)
        if len(inventory.shapes[name + BLOCKS]) < 3:
            raise inventory.unfit(name + BLOCKS, "[..., O, groups, bytes]", "for blocks")
        *leading, groups, half = inventory.shapes[name + BLOCKS]
        inventory.expect(scales, (*leading, groups), why="an exponent for each block")
        *experts, outputs = leading
        yield StoredWeight(
            name=name,
            shape=(*experts, groups * half * 2, outputs),
            parts={"values": name + BLOCKS, "scales": scales},
            decode=_decode,
            label=f"mxfp4, groups of {2 * half}",
            is_transposed=True,
        )


def _decode(parts: Parts) -> Float4Weight:
    return Float4Weight(values=parts["values"].flatten(-2), scales=powers_of_two(parts["scales"]))


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return biased exponents, uint8, as float8_e8m0fnu. Raises ValueError for other types."""
    if exponents.dtype != torch.uint8:
        raise ValueError(f"exponents are stored as {str(exponents.dtype).removeprefix('torch.')}")
    return exponents.view(torch.float8_e8m0fnu)


def kept(settings: Settings) -> Iterable[str]:
    """Return the modules that are listed as unquantised."""
    return settings.get("modules_to_not_convert") or ()


FORMAT = Format(methods=("mxfp4",), find=find, kept=kept)
