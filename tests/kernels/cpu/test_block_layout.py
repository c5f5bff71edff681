"""Products with blocks of GGUF as stored, against the values of the gguf library."""

from __future__ import annotations

import pytest
import torch

from remora.kernels.cpu.library import Epilogue, Format, Team
from remora.kernels.cpu.stored_layout import native_format, pack_stored
from remora.kernels.memory import Arena
from tests.kernels.cpu.products import check_product, make_rows, multiply, read_rows
from tests.kernels.quantised.gguf_blocks import ALL, by_the_library, random_blocks

EPS = 2.0**-24


@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.GATED])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (150, 512), (2, 768)])
@pytest.mark.parametrize("type", ALL)
def test_products_are_those_of_the_library_s_values(
    each_team: Team, type: str, n: int, k: int, epilogue: Epilogue
) -> None:
    kind = random_blocks(type, n, k)
    weight = by_the_library(kind).double()
    is_gated = epilogue is Epilogue.GATED

    packed = pack_stored(each_team, kind, None, Arena(segment_bytes=0), gated=is_gated)

    assert packed.format is native_format(kind) is Format[type]
    for count in (1, 3, 33):
        rows = make_rows(each_team, packed.format, torch.randn(count, k))
        x = read_rows(rows, k)
        # Codes and what is taken off them can both be larger than what they stand for.
        size = x.abs() @ weight.abs().T + x.abs().sum(1, keepdim=True) * weight.abs().max()
        bound = size * EPS * (k // 16 + 8)
        out = multiply(each_team, rows, packed, epilogue=epilogue)
        check_product(out, x @ weight.T, bound, epilogue)


@pytest.mark.parametrize("type", ALL)
def test_a_row_has_the_same_bits_in_every_company(each_team: Team, type: str) -> None:
    packed = pack_stored(each_team, random_blocks(type, 192, 512), None, Arena(segment_bytes=0))
    x = torch.randn(70, 512)

    together = multiply(each_team, make_rows(each_team, packed.format, x), packed)

    for row in (0, 17, 69):
        alone = multiply(each_team, make_rows(each_team, packed.format, x[row : row + 1]), packed)
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("type", ALL)
def test_instruction_sets_give_the_same_bits(each_team: Team, team: Team, type: str) -> None:
    torch.manual_seed(7)
    kind, x = random_blocks(type, 128, 512), torch.randn(20, 512)

    def product(team: Team) -> torch.Tensor:
        packed = pack_stored(team, kind, None, Arena(segment_bytes=0))
        return multiply(team, make_rows(team, packed.format, x), packed)

    expected = product(team)
    if each_team.library.instructions == "portable":  # products are rounded before they are added
        torch.testing.assert_close(product(each_team), expected, rtol=1e-4, atol=1e-1)
    else:
        assert torch.equal(product(each_team), expected)
