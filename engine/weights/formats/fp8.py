"""8-bit floats with a scale for the tensor, each output, or each block of outputs and inputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from remora.configs.errors import ConfigError
from remora.engine.weights.formats.stored import (
    ACTIVATION_SCALES,
    Format,
    Inventory,
    Parts,
    Settings,
    StoredWeight,
)
from remora.kernels.quantised.weight_kinds import Float8Weight

INVERSE, SCALE = "_scale_inv", "_scale"
Block = tuple[int, int]


def check(settings: Settings) -> None:
    """Raise ConfigError for blocks that are not two sizes."""
    size = settings.get("weight_block_size")
    if size is not None and not (
        isinstance(size, Sequence)
        and len(size) == 2
        and all(type(n) is int and n > 0 for n in size)
    ):
        raise ConfigError(
            f"config.json: fp8 with weight_block_size {size}; expected two sizes, as [128, 128]."
        )


def find(settings: Settings, inventory: Inventory) -> Iterator[StoredWeight]:
    """Yield a weight for each tensor with a scale of its own name."""
    size = settings.get("weight_block_size")
    block = (size[0], size[1]) if size else None
    for ending in (INVERSE, SCALE):
        for name in inventory.having(ending):
            if name in inventory.shapes and len(inventory.shapes[name]) > 1:
                yield scaled(inventory, name, name + ending, block)


def scaled(inventory: Inventory, name: str, scale: str, block: Block | None) -> StoredWeight:
    """Return the weight of a tensor of 8-bit floats and its scales.

    block:  outputs and inputs that share a scale; used if there are several scales in a row
    Raises ConfigError if the scales' shape fits no such division.
    """
    shape, found = inventory.shapes[name], inventory.shapes[scale]
    if len(shape) < 2:
        raise inventory.unfit(name, "two dimensions", f"for a weight that has {scale}")
    *leading, outputs, inputs = shape
    whole, rows = (*leading, 1, 1), (*leading, outputs, 1)
    columns = (*leading, 1, inputs)
    known: dict[tuple[int, ...], tuple[Block, str]] = {}
    if block is not None:
        high, wide = block
        blocks = (*leading, -(-outputs // high), -(-inputs // wide))
        known[blocks] = (block, f"blocks of {high} x {wide}")
    known |= {columns: ((outputs, 1), "a scale for each column")} if leading else {}
    known |= {rows: ((1, inputs), "a scale for each output")}
    known |= {whole: ((outputs, inputs), "a scale for each tensor")}
    flat = {(): whole, (1,): whole, (outputs,): rows} if not leading else {tuple(leading): whole}
    shaped = flat.get(found, found)
    if shaped not in known:
        expected = " or ".join(str(list(each)) for each in known)
        raise inventory.unfit(scale, expected, f"for {name}, {list(shape)}")
    size, label = known[shaped]
    return StoredWeight(
        name=name,
        shape=shape,
        parts={"values": name, "scales": scale},
        decode=partial(_decode, shape=shaped, block=size),
        label=f"fp8, {label}",
    )


def _decode(parts: Parts, *, shape: tuple[int, ...], block: Block) -> Float8Weight:
    return Float8Weight(
        values=parts["values"], scales=parts["scales"].float().reshape(shape), block=block
    )


def kept(settings: Settings) -> Iterable[str]:
    """Return the modules that are listed as unquantised."""
    for key in ("ignored_layers", "modules_to_not_convert"):
        yield from settings.get(key) or ()


FORMAT = Format(
    methods=("fp8", "w8a8-fp8"), find=find, check=check, kept=kept, unused=ACTIVATION_SCALES
)
FBGEMM = Format(
    methods=("fbgemm-fp8",),
    find=find,
    kept=kept,
    unused=re.compile(rf"{ACTIVATION_SCALES.pattern}|.*\.activation_scale_ub"),
)
