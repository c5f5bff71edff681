"""Packed weights and products with them, against the same numbers in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.cpu.library import Activation, Epilogue, Format, Library, Team
from remora.kernels.cpu.packing import PACKED, pack
from remora.kernels.cpu.program import Program
from remora.kernels.memory import Arena, buffer
from tests.kernels.cpu.native.arithmetic import in_groups, quantise_from_least
from tests.kernels.cpu.products import (
    EPS,
    check_product,
    make_batch,
    make_rows,
    multiply,
    pack_alone,
    read_rows,
    unpack,
)

SOURCES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One product."""

    format: Format
    n: int
    k: int
    rows: int
    has_bias: bool
    epilogue: Epilogue
    source: torch.dtype
    seed: int

    @property
    def is_gated(self) -> bool:
        return self.epilogue is Epilogue.GATED

    def draw(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return weight, bias and x. Some groups of x are zero, some values large."""
        generator = torch.Generator().manual_seed(self.seed)
        weight = torch.randn(self.n, self.k, generator=generator).to(self.source)
        bias = torch.randn(self.n, generator=generator).to(self.source) if self.has_bias else None
        x = torch.randn(self.rows, self.k, generator=generator)
        x[:, self.k // 2] *= 30
        x[self.rows // 2, : self.k // 3] = 0
        return weight, bias, x


@st.composite
def cases(draw: st.DrawFn) -> Case:
    epilogue = draw(st.sampled_from(Epilogue))
    n = draw(st.integers(1, 200))
    return Case(
        format=draw(st.sampled_from(PACKED)),
        n=2 * n if epilogue is Epilogue.GATED else n,
        k=draw(st.integers(1, 200)),
        rows=draw(st.integers(1, 40)),
        has_bias=draw(st.booleans()),
        epilogue=epilogue,
        source=draw(st.sampled_from(SOURCES)),
        seed=draw(st.integers(0, 2**31)),
    )


def make_case(format: Format, epilogue: Epilogue = Epilogue.STORE, **sizes: int) -> Case:
    sizes = {"n": 150, "k": 83, "rows": 13, "seed": 0, **sizes}
    return Case(format=format, epilogue=epilogue, has_bias=True, source=torch.float32, **sizes)


def check(team: Team, case: Case, out_dtype: torch.dtype = torch.float32) -> None:
    weight, bias, x = case.draw()
    packed = pack_alone(team, weight, bias, case.format, gated=case.is_gated)
    rows = make_rows(team, case.format, x)
    start = torch.randn(case.rows, case.n) if case.epilogue is Epilogue.ADD else None

    out = multiply(team, rows, packed, epilogue=case.epilogue, start=start, dtype=out_dtype)

    read, unpacked = read_rows(rows, case.k), unpack(team, packed)
    exact_bias = torch.zeros(case.n).double() if bias is None else bias.double()
    # A sum of k products is rounded k times.
    size = read.abs() @ unpacked.size.T + exact_bias.abs()
    bound = (case.k + 8) * EPS[torch.float32] * size
    check_product(out, read @ unpacked.values.T + exact_bias, bound, case.epilogue, start)


@settings(max_examples=150)
@given(case=cases())
def test_products_are_those_of_the_exact_numbers(team: Team, case: Case) -> None:
    check(team, case)


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize(("n", "k", "rows"), [(64, 64, 1), (150, 83, 13), (2, 1, 3), (70, 40, 401)])
def test_every_instruction_set_multiplies(
    each_team: Team, format: Format, epilogue: Epilogue, n: int, k: int, rows: int
) -> None:
    check(each_team, make_case(format, epilogue, n=n, k=k, rows=rows))


@pytest.mark.parametrize("format", PACKED)
def test_gated_products_are_rounded_to_bfloat16_at_the_end(each_team: Team, format: Format) -> None:
    check(each_team, make_case(format, Epilogue.GATED), torch.bfloat16)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.SIGMOID: torch.sigmoid,
    Activation.RELU: F.relu,
    Activation.RELU2: lambda x: F.relu(x).square(),
    Activation.CAP: lambda x: 3 * torch.tanh(x / 3),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", EPS)
def test_products_are_activated_and_rounded(
    each_team: Team, dtype: torch.dtype, activation: Activation
) -> None:
    x = torch.cat((torch.linspace(-12, 12, 999), torch.tensor([-1e18, 1e18, 1e-30, torch.nan])))
    packed = pack_alone(each_team, torch.ones(2, 1), None, Format.F32)

    out = multiply(
        each_team,
        make_rows(each_team, Format.F32, x.unsqueeze(1)),
        packed,
        activation=activation,
        limit=3.0,
        dtype=dtype,
    )

    expected = ACTIVATIONS[activation](x.double())
    rtol = 2e-6 + EPS[dtype]
    for column in out[:, :2].T:
        torch.testing.assert_close(column.double(), expected, atol=1e-6, rtol=rtol, equal_nan=True)
    padding = ACTIVATIONS[activation](torch.tensor(0.0))
    assert (out[:-1, 2:] == padding).all()  # NaN is NaN in padding too


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (150, 83), (2, 1)])
def test_plain_formats_keep_the_weight(
    team: Team, source: torch.dtype, n: int, k: int, gated: bool
) -> None:
    weight = torch.randn(n, k).to(source)

    as_float = unpack(team, pack_alone(team, weight, None, Format.F32, gated=gated))
    as_bf16 = unpack(team, pack_alone(team, weight, None, Format.BF16, gated=gated))
    as_f16 = unpack(team, pack_alone(team, weight, None, Format.F16, gated=gated))

    assert torch.equal(as_float.values, weight.double())
    assert torch.equal(as_bf16.values, weight.bfloat16().double())
    assert torch.equal(as_f16.values, weight.half().double())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (150, 83), (2, 1)])
@pytest.mark.parametrize("format", [Format.Q8, Format.Q8_0])
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-6])  # small scales have few bits in float16
def test_int8_weights_are_off_by_half_a_step_at_most(
    team: Team, n: int, k: int, gated: bool, format: Format, size: float
) -> None:
    weight = torch.randn(n, k) * size

    unpacked = unpack(team, pack_alone(team, weight, None, format, gated=gated))

    error = (unpacked.values - weight.double()).abs()
    assert (error <= unpacked.scale / 2 * (1 + 1e-6)).all()
    least = 2**-24 if format == Format.Q8_0 else 0  # of float16
    assert (unpacked.scale <= weight.abs().max() / 127 * (1 + 2**-8) + least).all()


@pytest.mark.parametrize(
    ("format", "top", "number"),
    [(Format.Q4, 15, torch.bfloat16), (Format.Q5_1, 31, torch.float16)],
)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (150, 83), (2, 1)])
def test_searched_weights_lose_at_most_what_rounding_within_the_full_range_loses(
    team: Team, n: int, k: int, gated: bool, format: Format, top: int, number: torch.dtype
) -> None:
    weight = torch.randn(n, k)

    unpacked = unpack(team, pack_alone(team, weight, None, format, gated=gated))

    levels, scale, least = quantise_from_least(weight, top, number)
    plain = (levels * scale[..., None] + least[..., None]).flatten(1)[:, :k]
    searched, in_full_range = (
        in_groups((each - weight).double().square(), 32).sum(2)
        for each in (unpacked.values.float(), plain)
    )
    assert (searched <= in_full_range * (1 + 1e-4) + 1e-9).all()
    if k >= 32:
        assert searched.sum() < 0.93 * in_full_range.sum()


@pytest.mark.parametrize(("format", "top"), [(Format.Q4, 15), (Format.Q5_1, 31)])
def test_weights_on_a_grid_stay(team: Team, format: Format, top: int) -> None:
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, top + 1, (70, 96), generator=generator)
    levels[:, ::32], levels[:, 1::32] = 0, top
    weight = (levels - 6) * 2.0**-5

    unpacked = unpack(team, pack_alone(team, weight, None, format))

    assert torch.equal(unpacked.values.float(), weight)


@pytest.mark.parametrize("format", [Format.Q8, Format.Q8_0, Format.Q4, Format.Q5_1])
def test_steps_are_taken_per_row_and_group(team: Team, format: Format) -> None:
    weight = torch.randn(70, 192)
    weight[5, :64] *= 1000

    unpacked = unpack(team, pack_alone(team, weight, None, format))

    other = torch.ones(70, 192, dtype=torch.bool)
    other[5, :64] = False
    assert (unpacked.scale[other] < 1).all()
    assert (unpacked.scale[~other] > 1).all()


@pytest.mark.parametrize("format", [Format.Q8, Format.Q8_0, Format.Q4, Format.Q5_1])
def test_zero_weights_stay_zero(team: Team, format: Format) -> None:
    assert not unpack(team, pack_alone(team, torch.zeros(20, 70), None, format)).values.any()


@pytest.mark.parametrize("format", PACKED)
def test_dtype_and_layout_of_the_source_do_not_matter(team: Team, format: Format) -> None:
    # Numbers that bfloat16 and float16 have in common.
    weight = torch.randn(90, 75).bfloat16()
    weight[weight.abs() < 2**-7] = 0

    from_bf16, *others = (
        pack_alone(team, source, None, format).data
        for source in (weight, weight.float(), weight.half(), weight.T.contiguous().T)
    )

    assert all(torch.equal(other, from_bf16) for other in others)


def test_every_number_of_float16_is_read_and_written(each_team: Team) -> None:
    numbers = torch.arange(2**16).to(torch.uint16).view(torch.float16).view(64, 1024)
    is_nan = numbers.isnan()

    as_f16 = unpack(each_team, pack_alone(each_team, numbers, None, Format.F16)).values
    as_floats = unpack(each_team, pack_alone(each_team, numbers, None, Format.F32)).values

    for values in (as_f16, as_floats):
        assert torch.equal(values.isnan(), is_nan)
        assert torch.equal(values[~is_nan], numbers[~is_nan].double())


def test_floats_are_rounded_to_the_nearest_float16(each_team: Team) -> None:
    numbers = torch.arange(2**15 - 2**10).to(torch.uint16).view(torch.float16).float()
    between = (numbers + numbers.roll(-1)) / 2
    between[-1] = 65520.0  # from here on infinite
    above, below = (between.nextafter(torch.tensor(to)) for to in (torch.inf, 0.0))
    weight = torch.stack((between, above, below, -between))

    packed = unpack(each_team, pack_alone(each_team, weight, None, Format.F16))

    assert torch.equal(packed.values, weight.half().double())


def test_activations_beyond_float16_stay_finite_in_products_with_it(each_team: Team) -> None:
    x, weight = torch.full((3, 96), 1e30), torch.randn(64, 96).half()
    packed = pack_alone(each_team, weight, None, Format.F16)

    out = multiply(each_team, make_rows(each_team, Format.F16, x), packed)

    expected = x.double() @ weight.double().T
    assert (out.double() - expected).abs().max() < 1e-5 * 1e30 * 96


def test_other_number_formats_are_refused(team: Team) -> None:
    with pytest.raises(TypeError, match="float64"):
        pack_alone(team, torch.zeros(4, 4, dtype=torch.float64), None, Format.F32)


@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize("format", PACKED)
def test_a_row_does_not_depend_on_its_neighbours(
    library: Library, team: Team, format: Format, epilogue: Epilogue
) -> None:
    case = make_case(format, epilogue, rows=40)
    weight, bias, x = case.draw()
    packed = pack_alone(team, weight, bias, format, gated=case.is_gated)
    rows = make_rows(team, format, x)
    start = torch.randn(40, case.n) if epilogue is Epilogue.ADD else None
    whole = multiply(team, rows, packed, epilogue=epilogue, start=start)
    single = Team(library, 1)

    for count in range(41):
        some = None if start is None else start[:count]
        for crew in (team, single):
            part = multiply(crew, rows, packed, count=count, epilogue=epilogue, start=some)
            assert torch.equal(part, whole[:count])
    for row in range(40):
        own = make_rows(team, format, x[row : row + 1])
        some = None if start is None else start[row : row + 1]
        alone = multiply(team, own, packed, epilogue=epilogue, start=some)
        assert torch.equal(alone[0], whole[row])
    single.close()


def test_a_product_that_would_write_beyond_its_output_is_refused(team: Team) -> None:
    packed = pack_alone(team, torch.randn(65, 8), None, Format.F32)
    program = Program(team, make_batch(1))

    with pytest.raises(ValueError, match="do not fit"):
        program.multiply(make_rows(team, Format.F32, torch.zeros(1, 8)), packed, torch.zeros(1, 65))


@pytest.mark.parametrize("format", PACKED)
def test_weights_in_one_arena_leave_each_other_alone(team: Team, format: Format) -> None:
    arena = Arena()
    sources = [torch.randn(n, k) for n, k in [(70, 33), (1, 1), (64, 64), (130, 95)]]

    packed = [pack(team, source, None, format, arena) for source in sources]

    for source, weight in zip(sources, packed, strict=True):
        assert weight.data.data_ptr() % 64 == 0
        assert torch.equal(weight.data, pack_alone(team, source, None, format).data)


def make_weight_between(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Return memory of ones, and random rows [n, k] in it that neither begin nor end a page."""
    memory = buffer((n + 2, k), torch.bfloat16).fill_(1)
    memory[1:-1].normal_()
    return memory, memory[1:-1]


@pytest.mark.parametrize("gated", [False, True])
def test_the_system_gets_the_memory_of_a_spent_weight_back(team: Team, gated: bool) -> None:
    n, k = 1010, 500
    memory, weight = make_weight_between(n, k)
    expected = pack_alone(team, weight, None, Format.BF16, gated=gated)
    assert (weight == 0).float().mean() < 0.01

    packed = pack(team, weight, None, Format.BF16, Arena(), gated=gated, spent=True)

    assert torch.equal(packed.data, expected.data)
    assert (weight == 0).float().mean() > 0.8  # but for pages that two panels share
    assert (memory[0] == 1).all()
    assert (memory[-1] == 1).all()


def test_a_weight_that_others_read_stays_as_it_is(team: Team) -> None:
    _, weight = make_weight_between(256, 512)
    kept = weight.clone()

    pack(team, weight, None, Format.BF16, Arena())

    assert torch.equal(weight, kept)
