"""AWQ (arXiv:2306.00978): 4-bit integers with a scale and a zero for each group of inputs.

Version gemm holds eight outputs of an input in a word, in a permuted order; gemv holds eight inputs
of an output in order. Both are read to the same kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.weights.formats.bits import unpack_bits
from remora.engine.weights.formats.stored import (
    Format,
    Inventory,
    Parts,
    Settings,
    StoredWeight,
    whole,
)
from remora.kernels.quantised.int4 import AWQ_ORDER
from remora.kernels.quantised.weight_kinds import IntWeight

NIBBLES = 8  # in a word
KNOWN_VERSIONS = ("gemm", "gemv")
FOLDED = ".act.scales"


def version_of(settings: Settings) -> str:
    """Return the layout's name."""
    return str(settings.get("version", "gemm")).lower()


def check(settings: Settings) -> None:
    """Raise ConfigError for other layouts and numbers of bits."""
    version, bits = version_of(settings), settings.get("bits", 4)
    if version not in KNOWN_VERSIONS:
        raise ConfigError(
            f"config.json: awq version {version} is not read; versions read are gemm and gemv. "
            "Convert the checkpoint to gemm, or use the original one."
        )
    if bits != 4:
        raise ConfigError(f"config.json: awq with bits {bits} is not read; only 4 is.")


def find(settings: Settings, inventory: Inventory) -> Iterator[StoredWeight]:
    """Yield a weight for each module with qweight."""
    divided = inventory.having(FOLDED)
    if divided:
        raise ConfigError(
            f"{divided[0]}{FOLDED} in {inventory.label} divides an activation, which is not "
            "computed. Use the original checkpoint."
        )
    is_gemv = version_of(settings) == "gemv"
    for module in inventory.having(".qweight"):
        parts = {
            key: inventory.part(module, f".{key}", of="qweight")
            for key in ("qweight", "qzeros", "scales")
        }
        rows, columns = inventory.matrix(parts["qweight"])
        outputs, inputs = (rows, columns * NIBBLES) if is_gemv else (columns * NIBBLES, rows)
        size = group_size(settings, inputs)
        groups = -(-inputs // size)
        why = f"for groups of {size} of {inputs} inputs and {outputs} outputs"
        if is_gemv:  # rows are padded
            width = inventory.matrix(parts["qzeros"])[1]
            if width * NIBBLES < groups:
                raise inventory.unfit(parts["qzeros"], f"{groups} zeros a row", why)
            inventory.expect(parts["qzeros"], (outputs, width), why=why)
            inventory.expect(parts["scales"], (outputs, width * NIBBLES), why=why)
        else:
            inventory.expect(parts["qzeros"], (groups, columns), why=why)
            inventory.expect(parts["scales"], (groups, outputs), why=why)
        yield StoredWeight(
            name=f"{module}.weight",
            shape=(outputs, inputs),
            parts=parts,
            decode=partial(_gemv if is_gemv else _gemm, size=size),
            label=f"awq 4 bits, groups of {size}",
        )


def group_size(settings: Settings, inputs: int) -> int:
    """Return the inputs of a group; -1 in settings = all."""
    size = whole(settings, "group_size", inputs if "group_size" in settings else 128, least=-1)
    return inputs if size == -1 else size


def _gemm(parts: Parts, *, size: int) -> IntWeight:
    codes, zeros = _outputs_in_order(parts["qweight"]), _outputs_in_order(parts["qzeros"])
    return IntWeight(
        codes=codes.T.contiguous(),
        scales=parts["scales"].T,
        zeros=zeros.T,
        groups=torch.arange(len(codes)) // size,
        bits=4,
    )


def _outputs_in_order(words: Tensor) -> Tensor:
    """Unpack [I, O / 8] to [I, O]."""
    nibbles = unpack_bits(words, 4, words.shape[1] * NIBBLES).view(*words.shape, NIBBLES)
    return nibbles[..., torch.tensor(AWQ_ORDER).argsort()].flatten(1)


def _gemv(parts: Parts, *, size: int) -> IntWeight:
    inputs = parts["qweight"].shape[1] * NIBBLES
    groups = -(-inputs // size)
    return IntWeight(
        codes=unpack_bits(parts["qweight"], 4, inputs),
        scales=parts["scales"][:, :groups],
        zeros=unpack_bits(parts["qzeros"], 4, groups),
        groups=torch.arange(inputs) // size,
        bits=4,
    )


def kept(settings: Settings) -> Iterable[str]:
    """Return the modules that are listed as unquantised."""
    return settings.get("modules_to_not_convert") or ()


def _from_file(content: Settings) -> Settings:
    return {
        "quant_method": "awq",
        "bits": content.get("w_bit", 4),
        "group_size": content.get("q_group_size", 128),
        "version": content.get("version", "gemm"),
    }


FORMAT = Format(
    methods=("awq", "awq-marlin"),
    find=find,
    check=check,
    kept=kept,
    unused=re.compile(r".*\.rotary_emb\..*"),
    file="quant_config.json",
    from_file=_from_file,
)
