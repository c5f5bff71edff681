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
from tests.thinned import thinned

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


@pytest.mark.parametrize("order", [backwards, pytest.param(shuffled, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", thinned(((case,) for case in CASES), 3))
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
