"""Rows of quantised weights, and weights joined by rows, are those of the dequantised ones."""

from __future__ import annotations

import pytest
import torch

from remora.kernels.quantised.weight_kinds import (
    Float4Weight,
    Float8Weight,
    IntWeight,
    TableWeight,
    WeightKind,
    join,
)


def make(name: str, outputs: int, inputs: int) -> WeightKind:
    if name.startswith("int"):
        groups = torch.arange(inputs) // 16
        shape = (outputs, int(groups.max()) + 1)
        return IntWeight(
            codes=torch.randint(0, 16, (outputs, inputs)).to(torch.uint8),
            scales=torch.randn(shape),
            groups=groups,
            zeros=torch.randint(0, 16, shape).to(torch.uint8) if name == "int, zeros" else None,
            bits=4,
        )
    if name.startswith("float8"):
        high = 4 if name == "float8 blocks" else outputs
        return Float8Weight(
            values=torch.randn(outputs, inputs).to(torch.float8_e4m3fn),
            scales=torch.rand(-(-outputs // high), -(-inputs // 16)),
            block=(high, 16),
        )
    if name == "float4":
        return Float4Weight(
            values=torch.randint(0, 256, (outputs, inputs // 2)).to(torch.uint8),
            scales=torch.rand(outputs, 3),
        )
    number = outputs * inputs
    return TableWeight(
        values=torch.randint(0, 256, (-(-number // 2),)).to(torch.uint8),
        table=torch.linspace(-1.0, 1.0, 16),
        scales=torch.rand(-(-number // 16)),
        run=16,
        size=(outputs, inputs),
    )


NAMES = ("int", "int, zeros", "float8 blocks", "float8 tensor", "float4", "table")


@pytest.mark.parametrize(
    ("name", "inputs"), [*((name, 48) for name in NAMES), ("table", 40), ("table", 41)]
)
def test_selected_rows_are_those_of_the_dequantised_weight(name: str, inputs: int) -> None:
    kind, rows = make(name, 10, inputs), torch.tensor([7, 0, 1, 9, 3])

    assert torch.equal(kind.select(rows).dequantised(), kind.dequantised()[rows])


@pytest.mark.parametrize("name", NAMES)
def test_joined_weights_are_the_dequantised_ones_one_below_the_other(name: str) -> None:
    kinds = [make(name, outputs, 48) for outputs in (6, 10, 3)]

    joined = join(kinds)

    assert joined is not None
    assert torch.equal(joined.dequantised(), torch.cat([kind.dequantised() for kind in kinds]))


@pytest.mark.parametrize("pair", [("int", "float4"), ("int", "int, zeros")])
def test_weights_that_store_other_numbers_are_not_joined(pair: tuple[str, str]) -> None:
    assert join([make(name, 4, 48) for name in pair]) is None


def test_rows_of_experts_are_counted_through_all_of_them() -> None:
    kind = Float4Weight(
        values=torch.randint(0, 256, (3, 4, 24)).to(torch.uint8), scales=torch.rand(3, 4, 3)
    )
    rows = torch.tensor([11, 0, 5])

    assert torch.equal(kind.select(rows).dequantised(), kind.dequantised().flatten(0, 1)[rows])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("inputs", "place"), [(8, 0), (8, 7), (17, 16), (35, 20)])
@pytest.mark.parametrize("start", [0, 3])
def test_numbers_of_8_bits_that_are_not_finite_are_refused(
    dtype: torch.dtype, inputs: int, place: int, start: int
) -> None:
    for code in range(256):
        stored = torch.zeros(start + inputs, dtype=torch.uint8)
        stored[start + place] = code
        values = stored[start:].view(dtype)[None]
        scales = torch.ones(1, 1)
        if values.float().isfinite().all():
            Float8Weight(values=values, scales=scales, block=(1, inputs))
        else:
            with pytest.raises(ValueError, match="infinite or not a number"):
                Float8Weight(values=values, scales=scales, block=(1, inputs))


@pytest.mark.parametrize(
    ("codes", "bits", "least", "most"),
    [
        (torch.uint8, 8, 0, 255),
        (torch.uint8, 4, 0, 15),
        (torch.int8, 8, -128, 127),
        (torch.int8, 4, -8, 7),
    ],
)
def test_zero_points_lie_in_the_range_of_codes(
    codes: torch.dtype, bits: int, least: int, most: int
) -> None:
    def weigh(zero: int) -> IntWeight:
        return IntWeight(
            codes=torch.zeros(2, 4, dtype=codes),
            scales=torch.ones(2, 1),
            groups=torch.zeros(4, dtype=torch.int64),
            zeros=torch.tensor([[zero], [0]]),
            bits=bits,
        )

    for zero in (least, most):
        assert weigh(zero).dequantised()[0].tolist() == [-zero] * 4
    for zero in (least - 1, most + 1):
        with pytest.raises(ValueError, match=rf"zeros lie in .* of {bits} bits .*{least}, {most}"):
            weigh(zero)
