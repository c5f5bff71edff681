"""Results do not depend on the order of programs, and no program meets another's memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu.devices import interpreted_only, poisoned_memory
from tests.kernels.gpu.orders.cases import CASES, few_programs
from tests.kernels.gpu.orders.watching import Order, backwards, forwards, shuffled, watched

# Rows that only fill blocks up hold no numbers, and are quantised like others.
pytestmark = [
    interpreted_only,
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered"),
]


def results(case: str, order: Order) -> list[Tensor]:
    torch.manual_seed(len(case))
    with poisoned_memory(), watched(order) as kernels:
        made = CASES[case]()
    assert kernels
    return [each.contiguous().view(torch.uint8) for each in made]


# Forms whose programs touch memory as those of another case do.
ALIKE = {
    "attention int8",
    f"heads {torch.float8_e4m3fn}",
    *(
        f"{name}, {rows} rows"
        for name in ("fp8", "fp8 per tensor", "int4 32", "mxfp4")
        for rows in (3, 40)
    ),
    "int8, 40 rows",
}


@pytest.mark.parametrize("order", [backwards, pytest.param(shuffled, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in ALIKE else []) for case in CASES],
)
def test_results_are_those_of_programs_in_order(
    case: str, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_programs(monkeypatch)

    assert all(map(torch.equal, results(case, order), results(case, forwards)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_tests_of_kernels_pass_with_shuffled_programs() -> None:
    folder = Path(__file__).parents[1]
    left_out = ("ahead", "orders", "test_compiled.py", "test_benchmark.py")
    plugin = ("-p", "tests.kernels.gpu.orders.plugin", "-p", "no:cacheprovider")
    root = str(folder.parents[2])

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *plugin, str(folder)]
        + [f"--ignore={folder / name}" for name in left_out],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-4000:]
