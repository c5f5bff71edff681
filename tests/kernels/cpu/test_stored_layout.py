"""Products with weights whose codes and scales are those of a checkpoint.

Every kind that a native format stores is tried: add it to KINDS.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from remora.kernels.cpu.build import InstructionSet
from remora.kernels.cpu.library import Epilogue, Format, Library, Team
from remora.kernels.cpu.stored_layout import native_format, pack_stored
from remora.kernels.memory import Arena
from remora.kernels.quantised.weight_kinds import (
    Float4Weight,
    Float8Weight,
    IntWeight,
    WeightKind,
)
from tests.kernels.cpu.conftest import load
from tests.kernels.cpu.products import check_product, make_rows, multiply, read_rows

EPS = 2.0**-24


def symmetric_bytes(n: int, k: int, *, unsigned: bool = False) -> WeightKind:
    codes = torch.randint(-128, 128, (n, k))
    groups = torch.arange(k) // 64
    scales = torch.randn(n, -(-k // 64)).bfloat16()
    if unsigned:
        return IntWeight(
            codes=(codes + 128).to(torch.uint8),
            scales=scales,
            zeros=torch.full_like(scales, 128).int(),
            groups=groups,
            bits=8,
        )
    return IntWeight(codes=codes.to(torch.int8), scales=scales, groups=groups, bits=8)


def float8(
    n: int, k: int, *, block: tuple[int, int] | None = None, dtype: torch.dtype = torch.float32
) -> Float8Weight:
    """Draw codes of all numbers and subnormal ones; some scales are 0."""
    codes = torch.randint(0, 0x7F, (n, k)) | torch.randint(0, 2, (n, k)) << 7
    codes = torch.where(torch.rand(n, k) < 0.3, codes & 0x87, codes).to(torch.uint8)
    high, wide = block or (n, k)
    scales = torch.randn(-(-n // high), -(-k // wide)) * 0.01
    scales[1::2, ::2] = 0
    return Float8Weight(
        values=codes.view(torch.float8_e4m3fn), scales=scales.to(dtype), block=(high, wide)
    )


def integers(
    bits: int,
    group: int,
    scales: torch.dtype = torch.float16,
    *,
    zeros: bool = False,
    signed: bool = False,
) -> Callable[[int, int], WeightKind]:
    """Return a maker of weights; groups of 0 are all inputs, and some have the scale 0."""

    def make(n: int, k: int) -> WeightKind:
        size, middle = group or k, 1 << (bits - 1)
        shape = (n, -(-k // size))
        factors = torch.randn(shape)
        # Smaller ones are not exact in float16, which native formats have.
        factors = torch.where(factors.abs() < 0.01, 0.01, factors).to(scales)
        factors.view(torch.int32 if factors.itemsize == 4 else torch.int16).bitwise_or_(1)
        factors[1:][torch.rand(shape)[1:] < 0.1] = 0
        anywhere = torch.randint(0, 2 * middle, shape) // (2 * middle - 1) * (2 * middle - 1)
        of_groups = torch.where(
            torch.rand(shape) < 0.3, anywhere, torch.randint(0, 2 * middle, shape)
        )
        of_groups[0] = 0
        codes = torch.randint(0, 2 * middle, (n, k))
        return IntWeight(
            codes=(codes - middle).to(torch.int8) if signed else codes.to(torch.uint8),
            scales=factors,
            zeros=None
            if signed
            else (of_groups if zeros else torch.full(shape, middle)).to(torch.int32),
            groups=torch.arange(k) // size,
            bits=bits,
        )

    return make


def mxfp4(n: int, k: int) -> Float4Weight:
    """Draw codes and powers of two; zeros have a scale that is too small for the native format."""
    values = torch.randint(0, 256, (n, k // 2)).to(torch.uint8)
    scales = torch.exp2(torch.randint(-8, 8, (n, k // 32)).float())
    values[0, :16], scales[0, 0] = 0x80, 2.0**-127
    scales[1, 0] = 0
    return Float4Weight(values=values, scales=scales)


KINDS: dict[str, tuple[Format, Callable[[int, int], WeightKind]]] = {
    "int8": (Format.Q8, symmetric_bytes),
    "uint8": (Format.Q8, lambda n, k: symmetric_bytes(n, k, unsigned=True)),
    "float8": (Format.F8, float8),
    "float8 rows": (Format.F8, lambda n, k: float8(n, k, block=(1, k), dtype=torch.bfloat16)),
    "float8 blocks": (Format.F8, lambda n, k: float8(n, k, block=(128, 128))),
    "float8 wide": (Format.F8, lambda n, k: float8(n, k, block=(3, 256))),
    "int8 per output, bfloat16": (Format.Q8, integers(8, 0, torch.bfloat16, signed=True)),
    "int8 per output, float32": (Format.I8_128, integers(8, 0, torch.float32, signed=True)),
    "uint8 of 128, float16": (Format.I8_128, integers(8, 128)),
    "uint8 of 64, zeros": (Format.I8Z_64, integers(8, 64, zeros=True)),
    "uint8 of 128, zeros": (Format.I8Z_64, integers(8, 128, zeros=True)),
    "uint8 of 32, zeros": (Format.I8Z_32, integers(8, 32, zeros=True)),
    "int8 of 32": (Format.Q8_0, integers(8, 32, signed=True)),
    "int4 of 32": (Format.Q4_0, integers(4, 32, signed=True)),
    "uint4 of 128": (Format.I4_128, integers(4, 128)),
    "int4 of 128, bfloat16": (Format.I4_128, integers(4, 128, torch.bfloat16, signed=True)),
    "int4 per output": (Format.I4_128, integers(4, 0, signed=True)),
    "uint4 of 32, zeros": (Format.I4Z_32, integers(4, 32, zeros=True)),
    "uint4 of 64, zeros": (Format.I4Z_64, integers(4, 64, zeros=True)),
    "uint4 of 128, zeros": (Format.I4Z_128, integers(4, 128, zeros=True)),
    "uint3 of 128": (Format.I4_128, integers(3, 128)),
    "uint2 of 64, zeros": (Format.I4Z_64, integers(2, 64, zeros=True)),
}


def product_of(rows: Tensor, kind: WeightKind) -> tuple[Tensor, Tensor]:
    """Return the exact product with the rows as read, and the largest error of float32 sums."""
    weight = kind.dequantised().double()
    exact = rows @ weight.T
    # Codes may be far from zero compared with what they stand for.
    bound = (rows.abs() @ weight.abs().T + rows.abs().sum(1, keepdim=True) * weight.abs().max()) * (
        EPS * (rows.shape[1] // 32 + 8)
    )
    return exact, bound


@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.GATED])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (150, 200), (2, 70), (130, 576)])
@pytest.mark.parametrize("name", KINDS)
def test_products_are_those_of_the_dequantised_weight(
    each_team: Team, name: str, n: int, k: int, epilogue: Epilogue
) -> None:
    format, make = KINDS[name]
    kind = make(n, k)
    bias = torch.randn(n)
    is_gated = epilogue is Epilogue.GATED

    weight = pack_stored(each_team, kind, bias, Arena(segment_bytes=0), gated=is_gated)

    assert weight.format is format
    for count in (1, 3, 33):
        rows = make_rows(each_team, format, torch.randn(count, k))
        exact, bound = product_of(read_rows(rows, k), kind)
        out = multiply(each_team, rows, weight, epilogue=epilogue)
        check_product(out, exact + bias.double(), bound + EPS * bias.abs(), epilogue)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("count", [1, 5, 16, 17, 50])
def test_hardware_tiles_equal_the_emulation(name: str, count: int) -> None:
    format, make = KINDS[name]
    kind, x = make(150, 1100), torch.randn(count, 1100)
    outs = []
    for instruction_set in (InstructionSet.AMX, InstructionSet.EMULATED):
        team = Team(load(instruction_set), 2)
        weight = pack_stored(team, kind, None, Arena(segment_bytes=0))
        outs.append(multiply(team, make_rows(team, format, x), weight))
        team.close()

    assert torch.equal(*outs)


@pytest.mark.parametrize("name", KINDS)
def test_a_row_has_the_same_bits_in_every_company(each_team: Team, name: str) -> None:
    format, make = KINDS[name]
    weight = pack_stored(each_team, make(192, 320), None, Arena(segment_bytes=0))
    x = torch.randn(70, 320)

    together = multiply(each_team, make_rows(each_team, format, x), weight)

    for row in (0, 17, 69):
        alone = multiply(each_team, make_rows(each_team, format, x[row : row + 1]), weight)
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.GATED])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (150, 288), (130, 576)])
def test_mxfp4_products_are_those_of_the_dequantised_weight(
    each_team: Team, n: int, k: int, epilogue: Epilogue
) -> None:
    kind, is_gated = mxfp4(n, k), epilogue is Epilogue.GATED
    weight = pack_stored(each_team, kind, None, Arena(segment_bytes=0), gated=is_gated)

    assert weight.format is Format.MXFP4
    x = torch.randn(33, k)
    together = multiply(
        each_team, make_rows(each_team, weight.format, x), weight, epilogue=epilogue
    )
    for count in (1, 3, 33):
        rows = make_rows(each_team, weight.format, x[:count])
        exact, bound = product_of(read_rows(rows, k), kind)
        out = multiply(each_team, rows, weight, epilogue=epilogue)
        check_product(out, exact, bound, epilogue)
        assert torch.equal(out, together[:count])


def test_other_4_bit_floats_have_no_native_format() -> None:
    kind = mxfp4(4, 64)
    odd = Float4Weight(values=kind.values, scales=kind.scales * 1.5)
    tiny = Float4Weight(values=kind.values | 1, scales=kind.scales)
    narrow = Float4Weight(values=kind.values, scales=torch.ones(4, 4))

    assert native_format(kind) is Format.MXFP4
    assert [native_format(other) for other in (odd, tiny, narrow)] == [None] * 3


def test_every_8_bit_float_is_read_exactly(each_team: Team) -> None:
    k = 200
    numbers = torch.arange(k) % 127
    codes = torch.stack((numbers, numbers | 128))
    kind = Float8Weight(
        values=codes.to(torch.uint8).view(torch.float8_e4m3fn),
        scales=torch.randn(2, 2),
        block=(1, 128),
    )
    weight = pack_stored(each_team, kind, None, Arena(segment_bytes=0))

    out = multiply(each_team, make_rows(each_team, weight.format, torch.eye(k)), weight)

    assert torch.equal(out[:, :2], kind.dequantised().T)


def test_kinds_without_a_native_format_have_none() -> None:
    kind = symmetric_bytes(8, 64)
    assert isinstance(kind, IntWeight)
    pairs = torch.arange(64) // 2 % 2
    in_no_order = IntWeight(
        codes=kind.codes, scales=kind.scales.repeat(1, 2), groups=pairs, bits=kind.bits
    )
    fine_scales = IntWeight(
        codes=kind.codes % 8, scales=kind.scales.float() * 1.0001, groups=kind.groups, bits=4
    )

    assert native_format(in_no_order) is None
    assert native_format(fine_scales) is None


@pytest.mark.parametrize("format", [format for format in Format if format.is_grouped])
def test_rows_of_another_format_have_the_groups_and_blocks_of_the_weight(
    library: Library, format: Format
) -> None:
    rows = format.of_rows

    assert rows.is_grouped
    assert library.group_size(rows) == library.group_size(format)
    if not format.name.endswith(("_K", "_XS")):  # of which k is a multiple of their block
        assert library.padded_k(rows, 1) == library.padded_k(format, 1)
