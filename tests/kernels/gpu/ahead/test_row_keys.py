"""Kernels are not compiled again as the number of rows changes, those without an engine either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "row_keys.py"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("max_rows", "stride"), [(300, 17), pytest.param(4100, 1, marks=pytest.mark.slow)]
)
def test_every_number_of_rows_finds_its_kernel_compiled(max_rows: int, stride: int) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(max_rows), str(stride)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(each["warm"] for each in found) > 100
    assert {each["case"]: each["missing"] for each in found if each["missing"]} == {}
