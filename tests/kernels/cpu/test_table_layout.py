"""Products with weights of 4 bits that are places in a table, as bitsandbytes stores them."""

from __future__ import annotations

import pytest
import torch

from remora.kernels.cpu.build import InstructionSet
from remora.kernels.cpu.library import Epilogue, Format, Team
from remora.kernels.cpu.stored_layout import native_format, pack_stored
from remora.kernels.memory import Arena
from remora.kernels.quantised.weight_kinds import TableWeight
from tests.kernels.cpu.conftest import load
from tests.kernels.cpu.products import check_product, make_rows, multiply, read_rows

EPS = 2.0**-24
# The quantiles of a normal distribution that nf4 consists of, to 4 digits, and fp4's numbers.
NF4 = (
    *(-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0),
    *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0),
)
HALF = (0.0, 0.0052, 0.6667, 1.0, 0.3333, 0.5, 0.1667, 0.25)
TABLES = {"nf4": NF4, "fp4": (*HALF, *(-number for number in HALF))}


def random_table(n: int, k: int, *, table: str = "nf4", run: int = 64) -> TableWeight:
    """Draw codes and scales; some scales are 0."""
    runs = n * k // run
    scales = torch.rand(runs) * (torch.rand(runs) > 0.1)
    return TableWeight(
        values=torch.randint(256, (n * k // 2,), dtype=torch.uint8),
        table=torch.tensor(TABLES[table]),
        scales=scales,
        run=run,
        size=(n, k),
    )


@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.GATED])
@pytest.mark.parametrize(("n", "k", "run"), [(64, 64, 64), (150, 256, 128), (130, 576, 64)])
@pytest.mark.parametrize("table", TABLES)
def test_products_are_those_of_the_table_in_bfloat16(
    each_team: Team, table: str, n: int, k: int, run: int, epilogue: Epilogue
) -> None:
    kind, bias = random_table(n, k, table=table, run=run), torch.randn(n)
    rounded = TableWeight(
        values=kind.values,
        table=kind.table.bfloat16().float(),
        scales=kind.scales,
        run=run,
        size=kind.size,
    )
    weight, near = (each.dequantised().double() for each in (kind, rounded))

    packed = pack_stored(
        each_team, kind, bias, Arena(segment_bytes=0), gated=epilogue is Epilogue.GATED
    )

    assert packed.format is native_format(kind) is Format.T4
    x = torch.randn(33, k)
    together = multiply(each_team, make_rows(each_team, Format.T4, x), packed, epilogue=epilogue)
    for count in (1, 3, 16, 33):
        rows = make_rows(each_team, Format.T4, x[:count])
        read = read_rows(rows, k)
        size = read.abs() @ near.abs().T
        bound = size * EPS * (k // 16 + 8) + EPS * bias.abs()
        out = multiply(each_team, rows, packed, epilogue=epilogue)
        check_product(out, read @ near.T + bias.double(), bound, epilogue)
        assert torch.equal(out, together[:count])
    assert ((near - weight).abs() <= weight.abs() * (2.0**-8 + 2.0**-22)).all()


@pytest.mark.parametrize("count", [1, 5, 16, 17, 64])
def test_hardware_tiles_equal_the_emulation(count: int) -> None:
    kind, x = random_table(150, 1088), torch.randn(count, 1088)
    outs = []
    for instruction_set in (InstructionSet.AMX, InstructionSet.EMULATED):
        team = Team(load(instruction_set), 2)
        weight = pack_stored(team, kind, None, Arena(segment_bytes=0))
        outs.append(multiply(team, make_rows(team, weight.format, x), weight))
        team.close()

    assert torch.equal(*outs)


def test_a_row_has_the_same_bits_in_every_company(each_team: Team) -> None:
    weight = pack_stored(each_team, random_table(192, 320), None, Arena(segment_bytes=0))
    x = torch.randn(70, 320)

    together = multiply(each_team, make_rows(each_team, weight.format, x), weight)

    for row in (0, 17, 69):
        alone = multiply(each_team, make_rows(each_team, weight.format, x[row : row + 1]), weight)
        assert torch.equal(together[row], alone[0])


def test_every_place_of_a_table_is_read(each_team: Team) -> None:
    k = 64
    places = (torch.arange(k) * 7 + torch.arange(16)[:, None]) % 16
    table = torch.arange(-8.0, 8.0)
    kind = TableWeight(
        values=(places[:, 0::2] << 4 | places[:, 1::2]).to(torch.uint8).flatten(),
        table=table,
        scales=torch.arange(1.0, 17.0),
        run=64,
        size=(16, k),
    )
    weight = pack_stored(each_team, kind, None, Arena(segment_bytes=0))

    out = multiply(each_team, make_rows(each_team, weight.format, torch.eye(k)), weight)

    assert torch.equal(out[:, :16], (table[places] * torch.arange(1.0, 17.0)[:, None]).T)


def test_runs_that_cross_rows_or_are_short_have_no_native_format() -> None:
    assert native_format(random_table(4, 96)) is None
    assert native_format(random_table(4, 64, run=32)) is None
    assert native_format(random_table(4, 64, run=128)) is None
    assert native_format(random_table(4, 128, run=128)) is Format.T4
