"""Writes quantised modules of each format, number by number from the formats' definitions.

Integers of Python, not tensors, make the words: nothing here is shared with the readers. Each
writer returns the tensors of module `P` without its name, and the exact weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each output of a word
CT = "compressed-tensors"


def signed(word: int) -> int:
    """Return the int32 with the bits of an unsigned word."""
    return word - 2**32 if word >= 2**31 else word


def stream(numbers: Iterable[int], bits: int) -> list[int]:
    """Pack numbers as one stream of bits into words."""
    listed = list(numbers)
    whole = sum(number << bits * place for place, number in enumerate(listed))
    return [signed(whole >> 32 * word & 0xFFFFFFFF) for word in range(-(-len(listed) * bits // 32))]


def streams(rows: Tensor, bits: int) -> Tensor:
    return torch.tensor([stream(row, bits) for row in rows.tolist()], dtype=torch.int32)


def awq_words(rows: Tensor) -> Tensor:
    ordered = [
        [sum(row[at + o] << 4 * AWQ_PLACES[o] for o in range(8)) for at in range(0, len(row), 8)]
        for row in rows.tolist()
    ]
    return torch.tensor([[signed(word) for word in row] for row in ordered], dtype=torch.int32)


@dataclass(frozen=True)
class Numbers:
    """Random codes and scales of a weight; the zeros of group 0 are 0 and the largest."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor

    @property
    def plain(self) -> Tensor:
        shifted = self.codes.double() - self.zeros.double()[:, self.groups]
        return (shifted * self.scales.double()[:, self.groups]).float()


def numbers(
    outputs: int,
    inputs: int,
    size: int,
    bits: int = 4,
    *,
    zero: int | None = None,
    dtype: torch.dtype = torch.float16,
) -> Numbers:
    num_groups, high = -(-inputs // size), 1 << bits
    if zero is None:
        zeros = torch.randint(0, high, (outputs, num_groups))
        zeros[0::2, 0], zeros[1::2, 0] = 0, high - 1
    else:
        zeros = torch.full((outputs, num_groups), zero)
    sizes = 0.005 + 0.02 * torch.rand(outputs, num_groups)  # exact in float16, also as bfloat16
    scales = (sizes * torch.randn(outputs, num_groups).sign()).to(dtype)
    scales[-1, -1] = 0.0
    return Numbers(
        torch.randint(0, high, (outputs, inputs)), zeros, scales, torch.arange(inputs) // size
    )


def awq(outputs: int, inputs: int, *, size: int = 32) -> Written:
    made = numbers(outputs, inputs, size)
    words = {"qweight": awq_words(made.codes.T), "qzeros": awq_words(made.zeros.T)}
    return {**words, "scales": made.scales.T.contiguous()}, made.plain


def awq_gemv(outputs: int, inputs: int, *, size: int = 32) -> Written:
    made = numbers(outputs, inputs, size)
    width = -(-made.zeros.shape[1] // 32) * 32
    padding = (0, width - made.zeros.shape[1])
    tensors = {
        "qweight": streams(made.codes, 4),
        "qzeros": streams(torch.nn.functional.pad(made.zeros, padding), 4),
        "scales": torch.nn.functional.pad(made.scales, padding),
    }
    return tensors, made.plain


def gptq(
    outputs: int,
    inputs: int,
    *,
    size: int = 32,
    bits: int = 4,
    version: int = 1,
    zero: int | None = None,
    is_ordered: bool = True,
) -> Written:
    made = numbers(outputs, inputs, size, bits, zero=zero)
    if not is_ordered:
        order = made.groups[torch.randperm(inputs)]
        made = Numbers(made.codes, made.zeros, made.scales, order)
    zeros = streams(made.zeros.T, bits)
    if version == 1:
        ones = sum(1 << place for place in range(0, 32, bits))
        less = [[signed((word - ones) % 2**32) for word in row] for row in zeros.tolist()]
        zeros = torch.tensor(less, dtype=torch.int32)
    tensors = {
        "qweight": streams(made.codes, bits).T.contiguous(),
        "qzeros": zeros,
        "scales": made.scales.T.contiguous(),
        "g_idx": made.groups.int(),
    }
    return tensors, made.plain


def ct_packed(
    outputs: int, inputs: int, *, size: int = 32, bits: int = 4, is_symmetric: bool = True
) -> Written:
    middle = 1 << bits - 1
    zero = middle if is_symmetric else None
    made = numbers(outputs, inputs, size, bits, zero=zero, dtype=torch.bfloat16)
    tensors = {
        "weight_packed": streams(made.codes, bits),
        "weight_scale": made.scales,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = streams(made.zeros.T, bits).T.contiguous()
    return tensors, made.plain


def ct_bytes(outputs: int, inputs: int, *, size: int) -> Written:
    made = numbers(outputs, inputs, size, 8, dtype=torch.bfloat16)
    tensors = {
        "weight": (made.codes - 128).to(torch.int8),
        "weight_scale": made.scales,
        "weight_zero_point": (made.zeros - 128).to(torch.int8),
    }
    return tensors, made.plain


def ct_int8(outputs: int, inputs: int) -> Written:
    codes = torch.randint(-128, 128, (outputs, inputs)).to(torch.int8)
    scales = torch.rand(outputs, 1) * 0.01
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def float8(
    outputs: int,
    inputs: int,
    *,
    high: int,
    wide: int,
    ending: str = "_scale",
    dtype: torch.dtype = torch.float32,
    is_flat: bool = False,
) -> Written:
    """Write 8-bit floats with scales of blocks; 0 = all outputs or inputs."""
    values = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    high, wide = high or outputs, wide or inputs
    shape = (-(-outputs // high), -(-inputs // wide))
    scales = torch.exp2(torch.randint(-6, 2, shape).float()) * (
        1.0 if dtype == torch.float8_e8m0fnu else 1.25
    )
    index = torch.arange(outputs)[:, None] // high, torch.arange(inputs) // wide
    plain = values.float() * scales[index]
    stored = scales.to(dtype)
    return {"weight": values, f"weight{ending}": stored.flatten() if is_flat else stored}, plain


def fp4(outputs: int, inputs: int) -> Written:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.randint(0, 16, (outputs, inputs))
    values = table[codes % 8] * torch.where(codes > 7, -1.0, 1.0)
    return {"weight_packed": (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)}, values


def mxfp4(outputs: int, inputs: int) -> Written:
    tensors, values = fp4(outputs, inputs)
    exponents = torch.randint(115, 121, (outputs, inputs // 32))
    scales = torch.exp2(exponents.double() - 127).float()
    tensors["weight_scale"] = exponents.to(torch.uint8)
    return tensors, values * scales.repeat_interleave(32, 1)


def nvfp4(outputs: int, inputs: int, *, is_divisor: bool) -> Written:
    tensors, values = fp4(outputs, inputs)
    octets = tensors["weight_packed"]
    scales = torch.rand(outputs, inputs // 16).to(torch.float8_e4m3fn)
    factor = torch.tensor([128.0]) if is_divisor else torch.tensor(1 / 128)
    plain = values * scales.float().repeat_interleave(16, 1) / 128
    if is_divisor:
        names = ("weight_packed", "weight_scale", "weight_global_scale")
    else:
        names = ("weight", "weight_scale", "weight_scale_2")
    return dict(zip(names, (octets, scales, factor), strict=True)), plain


def bnb_nf4(outputs: int, inputs: int, *, is_nested: bool) -> Written:
    codes = torch.randint(0, 16, (outputs * inputs,))
    table = torch.linspace(-1.0, 1.0, 16)
    runs = -(-len(codes) // 64)
    state: dict[str, Any] = {"blocksize": 64, "shape": [outputs, inputs], "dtype": "float32"}
    extra: dict[str, Tensor] = {}
    if is_nested:
        bytes_, nested = torch.randint(0, 256, (runs,)).to(torch.uint8), torch.rand(-(-runs // 256))
        map_ = torch.linspace(-1.0, 1.0, 256)
        scales = map_[bytes_.long()] * nested[torch.arange(runs) // 256] + 0.5
        extra = {"weight.nested_absmax": nested, "weight.nested_quant_map": map_}
        state |= {"nested_blocksize": 256, "nested_offset": 0.5}
        stored = bytes_
    else:
        stored = scales = torch.rand(runs)
    octets = [int(a) * 16 + int(b) for a, b in codes.view(-1, 2)]
    tensors = {
        "weight": torch.tensor(octets, dtype=torch.uint8)[:, None],
        "weight.absmax": stored,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
        **extra,
    }
    plain = table[codes] * scales[torch.arange(len(codes)) // 64]
    return tensors, plain.view(outputs, inputs)


def bnb_int8(outputs: int, inputs: int) -> Written:
    codes, scales = torch.randint(-127, 128, (outputs, inputs)).to(torch.int8), torch.rand(outputs)
    tensors = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * (scales / 127.0)[:, None]


def torchao(written: Written) -> Written:
    kind, plain = written
    tensors = {f"_{name}": tensor for name, tensor in kind.items()}
    tensors["_weight_qdata"] = tensors.pop("_weight")
    return tensors, plain


def _ct(bits: int, size: int, **others: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "group_size": size, "strategy": "group", **others}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": CT, "config_groups": groups, "ignore": ["lm_head"]}


@dataclass(frozen=True)
class Sample:
    """A format with its settings, and what writes one module; `extra` tensors are not read."""

    settings: Mapping[str, Any]
    write: Callable[[int, int], Written]
    extra: tuple[str, ...] = field(default=())


def _gptq(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, **settings}


FP8 = {"quant_method": "fp8"}
SAMPLES: Mapping[str, Sample] = {
    "awq": Sample({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "awq-g64-short": Sample(
        {"quant_method": "awq", "group_size": 64}, lambda o, i: awq(o, i, size=64)
    ),
    "awq-gemv": Sample(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, awq_gemv
    ),
    "gptq-v1": Sample(_gptq(), gptq),
    "gptq-v2": Sample(_gptq(checkpoint_format="gptq_v2"), lambda o, i: gptq(o, i, version=2)),
    "gptq-sym": Sample(_gptq(sym=True), lambda o, i: gptq(o, i, zero=8)),
    "gptq-sym-with-zeros-of-v2": Sample(
        _gptq(sym=True), lambda o, i: gptq(o, i, zero=8, version=2)
    ),
    "gptq-act-order": Sample(_gptq(desc_act=True), lambda o, i: gptq(o, i, is_ordered=False)),
    "gptq-2-bits": Sample(_gptq(bits=2), lambda o, i: gptq(o, i, bits=2)),
    "gptq-3-bits": Sample(
        _gptq(bits=3, checkpoint_format="gptq_v2"), lambda o, i: gptq(o, i, bits=3, version=2)
    ),
    "gptq-8-bits": Sample(_gptq(bits=8), lambda o, i: gptq(o, i, bits=8)),
    "gptq-dynamic": Sample(
        _gptq(dynamic={r"+:.*down.*": {"group_size": 16}}), lambda o, i: gptq(o, i, size=16)
    ),
    "auto-round-gptq": Sample(
        {**_gptq(sym=True), "quant_method": "auto-round"}, lambda o, i: gptq(o, i, zero=8)
    ),
    "auto-round-awq": Sample(
        {**_gptq(), "quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, awq
    ),
    "ct-packed": Sample(_ct(4, 32), ct_packed),
    "ct-packed-asymmetric": Sample(_ct(4, 32), lambda o, i: ct_packed(o, i, is_symmetric=False)),
    "ct-packed-g64-short": Sample(_ct(4, 64), lambda o, i: ct_packed(o, i, size=64)),
    "ct-packed-asymmetric-g64-short": Sample(
        _ct(4, 64), lambda o, i: ct_packed(o, i, size=64, is_symmetric=False)
    ),
    "ct-bytes-g64-short": Sample(_ct(8, 64), lambda o, i: ct_bytes(o, i, size=64)),
    "ct-packed-3-bits": Sample(
        _ct(3, 32), lambda o, i: ct_packed(o, i, bits=3, is_symmetric=False)
    ),
    "ct-packed-8-bits": Sample(_ct(8, 32), lambda o, i: ct_packed(o, i, bits=8)),
    "ct-int8": Sample(_ct(8, -1, strategy="channel"), ct_int8, ("input_scale",)),
    "ct-float8": Sample(
        _ct(8, -1, type="float", strategy="channel"), lambda o, i: float8(o, i, high=1, wide=0)
    ),
    "ct-mxfp4": Sample(_ct(4, 32, type="float"), mxfp4),
    "ct-nvfp4": Sample(_ct(4, 16, type="float"), lambda o, i: nvfp4(o, i, is_divisor=True)),
    "fp8-tensor": Sample(
        FP8, lambda o, i: float8(o, i, high=0, wide=0, is_flat=True), ("input_scale", "k_scale")
    ),
    "fp8-blocks": Sample(
        {**FP8, "weight_block_size": [32, 64]},
        lambda o, i: float8(o, i, high=32, wide=64, ending="_scale_inv"),
    ),
    "fp8-blocks-of-powers": Sample(
        {**FP8, "weight_block_size": [32, 64], "scale_fmt": "ue8m0"},
        lambda o, i: float8(
            o, i, high=32, wide=64, ending="_scale_inv", dtype=torch.float8_e8m0fnu
        ),
    ),
    "fbgemm": Sample(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        lambda o, i: float8(o, i, high=1, wide=0),
    ),
    "modelopt-fp8": Sample(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        lambda o, i: float8(o, i, high=0, wide=0, is_flat=True),
        ("input_scale",),
    ),
    "modelopt-nvfp4": Sample(
        {"quant_algo": "NVFP4"}, lambda o, i: nvfp4(o, i, is_divisor=False), ("input_scale",)
    ),
    "bnb-nf4": Sample(
        {"quant_method": "bitsandbytes"}, lambda o, i: bnb_nf4(o, i, is_nested=False)
    ),
    "bnb-nf4-nested": Sample(
        {"quant_method": "bitsandbytes"}, lambda o, i: bnb_nf4(o, i, is_nested=True)
    ),
    "bnb-int8": Sample({"quant_method": "bitsandbytes"}, bnb_int8),
    "torchao-int8": Sample({"quant_method": "torchao"}, lambda o, i: torchao(ct_int8(o, i))),
    "torchao-int8-zeros": Sample(
        {"quant_method": "torchao"}, lambda o, i: torchao(ct_bytes(o, i, size=32))
    ),
    "torchao-float8": Sample(
        {"quant_method": "torchao"}, lambda o, i: torchao(float8(o, i, high=1, wide=0))
    ),
}

BLOCKS = Sample(
    {**FP8, "weight_block_size": [128, 128]},
    lambda o, i: float8(o, i, high=128, wide=128, ending="_scale_inv"),
)


def small(sample: Sample, exponent: int = -6) -> Sample:
    """Return a format whose weights are as small as a model's, so that logits are not extreme.

    Weights that are already smaller stay as they are.

    exponent:  of two, the most that their root mean square is
    """

    def write(outputs: int, inputs: int) -> Written:
        parts, plain = sample.write(outputs, inputs)
        if plain.square().mean().sqrt() <= 2.0**exponent:
            return parts, plain
        factor = 2.0 ** (exponent - plain.square().mean().sqrt().log2().ceil().int().item())
        scales = {name: parts[name] * factor for name in parts if "scale" in name}
        return parts | scales, plain * factor

    return replace(sample, write=write)
