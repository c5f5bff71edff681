"""What is not finite stays so, to the logits: the engine then ends that request, and says why."""

from __future__ import annotations

import pytest
import torch

from remora.kernels.cpu.buffers import Rows
from remora.kernels.cpu.library import Format, Team
from remora.kernels.cpu.norms import NormWeights
from remora.kernels.cpu.program import Program
from tests.kernels.cpu.products import make_batch, pack_alone

K = 128


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("format", list(Format))
def test_a_bad_activation_spoils_its_own_row_alone(
    each_team: Team, format: Format, bad: float
) -> None:
    x = torch.ones(3, K)
    x[1, 70] = bad
    rows, out = Rows.allocate(each_team, format, 3, K), torch.zeros(3, 64)
    program = Program(each_team, make_batch(3))
    program.norm(x, NormWeights(weight=torch.ones(K), epsilon=1e-5), rows)
    program.multiply(rows, pack_alone(each_team, torch.ones(64, K), None, format), out)

    program.run(3, 0, 0)

    assert out[[0, 2]].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("format", list(Format))
def test_a_bad_weight_spoils_its_column(each_team: Team, format: Format, bad: float) -> None:
    weight = torch.ones(64, K)
    weight[5, 9] = bad
    rows, out = Rows.allocate(each_team, format, 1, K), torch.zeros(1, 64)
    program = Program(each_team, make_batch(1))
    program.norm(torch.ones(1, K), NormWeights(weight=torch.ones(K), epsilon=1e-5), rows)
    program.multiply(rows, pack_alone(each_team, weight, None, format), out)

    program.run(1, 0, 0)

    is_fine = out[0].isfinite()
    assert not is_fine[5]
    assert is_fine.sum() == 63


def test_more_operations_than_one_job_holds_run_in_order(team: Team) -> None:
    x = torch.zeros(1, 64)
    rows = Rows.allocate(team, Format.F32, 1, 64)
    program = Program(team, make_batch(1))
    program.embed(torch.arange(1.0, 65.0).repeat(2, 1), x)
    for _ in range(5000):
        program.norm(x, NormWeights(weight=torch.ones(64), epsilon=1e-5), rows)
    program.norm(
        rows.values,
        NormWeights(weight=torch.ones(64), epsilon=1e-5),
        Rows.allocate(team, Format.F32, 1, 64),
    )

    program.run(1, 0, 0)

    assert len(program) == 5002
    expected = torch.nn.functional.rms_norm(torch.arange(1.0, 65.0), (64,), eps=1e-5)
    torch.testing.assert_close(rows.values[0], expected)
