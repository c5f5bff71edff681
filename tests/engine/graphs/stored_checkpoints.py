"""Tiny models in every kind of weights that is multiplied as stored, and their dequantised twins.

GGUF's blocks are dequantised by the gguf library, the others number by number as their formats are
defined (`writers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind

from remora.kernels.cpu.library import Format
from remora.kernels.quantised.block_weight import BLOCK_TYPES, BlockWeight
from tests.engine.weights.formats.checkpoints import quantise
from tests.engine.weights.formats.writers import (
    BLOCKS,
    SAMPLES,
    Sample,
    Written,
    awq,
    bnb_nf4,
    gptq,
    small,
)
from tests.engine.weights.gguf.tiny_gguf import make_gguf
from tests.kernels.quantised.gguf_blocks import FLOAT16, by_the_library, random_blocks

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Of a model whose rows hold whole blocks of every type.
SIZES: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "dtype": torch.bfloat16,
}
EXPONENT = -4  # of the size of weights, so that logits depend on all layers


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of weights.

    format:  the native format that holds it
    make:    writes a quantised copy of a checkpoint and its twin, and returns both paths
    """

    format: Format
    make: Callable[[Path, Path], tuple[Path, Path]]


def _of(format: Format, sample: Sample) -> Case:
    return _as_written(format, small(sample, EXPONENT))


def _as_written(format: Format, sample: Sample) -> Case:
    return Case(format, lambda path, to: quantise(path, to, sample, LINEARS))


def _gptq(size: int, bits: int = 4, **settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": False, **settings}


def _mxfp4(outputs: int, inputs: int) -> Written:
    """Write pairs of e2m1 and the exponents of their scales."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.randint(0, 16, (outputs, inputs))
    exponents = torch.randint(120, 124, (outputs, inputs // 32)).to(torch.uint8)
    values = table[codes % 8] * torch.where(codes > 7, -1.0, 1.0)
    scales = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    octets = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    return {"weight_packed": octets, "weight_scale": exponents}, values * scales


def _nf4(outputs: int, inputs: int) -> Written:
    tensors, plain = bnb_nf4(outputs, inputs, is_nested=False)
    return tensors | {"weight.absmax": tensors["weight.absmax"] / 8}, plain / 8


def _of_blocks(type: str) -> Case:
    return Case(Format[type], partial(_quantise_gguf, type=type))


def _quantise_gguf(path: Path, to: Path, type: str) -> tuple[Path, Path]:
    """Write GGUF files of the same random blocks: one as they are, one of their float32 values."""
    to.mkdir(exist_ok=True)
    made: list[BlockWeight] = []

    def draw(values: npt.NDArray[Any], kind: Kind) -> npt.NDArray[Any]:
        made.append(_usual_blocks(type, *values.shape))
        return made[-1].blocks.numpy()

    quantised = make_gguf(path, to / "quantised.gguf", stored_as=Kind[type], encode=draw)
    same: Iterator[BlockWeight] = iter(made)
    plain = make_gguf(
        path, to / "plain.gguf", encode=lambda values, kind: by_the_library(next(same)).numpy()
    )
    return quantised, plain


def _usual_blocks(type: str, outputs: int, inputs: int) -> BlockWeight:
    """Return random blocks of a model's values: small, and about zero.

    What is taken off where codes have no sign is the mean of codes times their scale.
    """
    drawn, of_type = random_blocks(type, outputs, inputs), BLOCK_TYPES[type]
    blocks = drawn.blocks.view(outputs, -1, of_type.num_bytes)
    numbers = [blocks[..., at : at + 2].contiguous().view(torch.float16) for at in FLOAT16[type]]
    if len(numbers) == 2:
        is_added = not of_type.split(blocks[0]).levels
        middle = ((1 << of_type.bits) - 1) / 2
        numbers[1] = numbers[0] * (-middle if is_added else middle)

    def write(factor: float) -> None:
        for at, number in zip(FLOAT16[type], numbers, strict=True):
            blocks[..., at : at + 2] = (number * factor).half().view(torch.uint8)

    write(1.0)
    write(2.0**EXPONENT / float(by_the_library(drawn).square().mean().sqrt()))
    return drawn


CASES: Mapping[str, Case] = {
    "int4 of 128": _of(
        Format.I4_128, Sample(_gptq(128, sym=True), lambda o, i: gptq(o, i, size=128, zero=8))
    ),
    "int4 of 128 with zeros": _of(
        Format.I4Z_128,
        Sample({"quant_method": "awq", "group_size": 128}, lambda o, i: awq(o, i, size=128)),
    ),
    "int4 of 64 with zeros": _of(Format.I4Z_64, SAMPLES["awq-g64-short"]),
    "int4 of 32": _of(Format.Q4_0, SAMPLES["ct-packed"]),
    "int4 of 32 with zeros": _of(Format.I4Z_32, SAMPLES["ct-packed-asymmetric"]),
    "int8 per output": _of(Format.I8_128, SAMPLES["ct-int8"]),
    "int8 of 32": _of(Format.Q8_0, SAMPLES["ct-packed-8-bits"]),
    "int8 of 32 with zeros": _of(Format.I8Z_32, SAMPLES["gptq-8-bits"]),
    "int8 of 64": _of(
        Format.I8Z_64, Sample(_gptq(64, 8), lambda o, i: gptq(o, i, size=64, bits=8))
    ),
    "float8 per tensor": _of(Format.F8, SAMPLES["fp8-tensor"]),
    "float8 per output": _of(Format.F8, SAMPLES["ct-float8"]),
    "float8 in blocks": _of(Format.F8, BLOCKS),
    "mxfp4": _as_written(Format.MXFP4, Sample({"quant_method": "compressed-tensors"}, _mxfp4)),
    "nf4": _as_written(Format.T4, Sample({"quant_method": "bitsandbytes"}, _nf4)),
    **{type: _of_blocks(type) for type in BLOCK_TYPES},
}
