"""NaN and infinities stay in the results: the engine ends the request that has them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from remora.kernels.cpu.buffers import Rows
from remora.kernels.cpu.library import Format, Team
from remora.kernels.cpu.norms import NormWeights
from remora.kernels.cpu.packing import PACKED
from tests.kernels.cpu.products import one_step, pack_alone

K = 128
FORMATS = pytest.mark.parametrize("format", PACKED)


def norm_and_multiply(team: Team, format: Format, x: Tensor, weight: Tensor) -> Tensor:
    rows, out = Rows.allocate(team, format, len(x), K), torch.zeros(len(x), 64)
    with one_step(team, len(x)) as program:
        program.norm(x, NormWeights(weight=torch.ones(K), epsilon=1e-5), rows)
        program.multiply(rows, pack_alone(team, weight, None, format), out)
    return out


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@FORMATS
def test_a_bad_activation_spoils_only_its_own_row(
    each_team: Team, format: Format, bad: float
) -> None:
    x = torch.ones(3, K)
    x[1, 70] = bad

    out = norm_and_multiply(each_team, format, x, torch.ones(64, K))

    assert out[[0, 2]].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@FORMATS
def test_a_bad_weight_spoils_only_its_column(each_team: Team, format: Format, bad: float) -> None:
    weight = torch.ones(64, K)
    weight[5, 9] = bad

    out = norm_and_multiply(each_team, format, torch.ones(1, K), weight)

    is_fine = out[0].isfinite()
    assert not is_fine[5]
    assert is_fine.sum() == 63
