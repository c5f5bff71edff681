"""Each part of `make gpu-here` runs to its end with a CPU in the place of the GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.gpu.parts import CPU_PART_S, PARTS
from tests.kernels.gpu.devices import interpreted_only

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu" / "here.py"


@pytest.mark.slow
@interpreted_only
@pytest.mark.timeout(2 * CPU_PART_S)
@pytest.mark.parametrize("part", list(PARTS))
def test_a_part_runs_to_its_end_on_a_cpu(part: str, tmp_path: Path) -> None:
    options = ["--part", part, "--device", "cpu", "--out", str(tmp_path)]
    options += ["--work", str(tmp_path / "work")]

    done = subprocess.run(
        [sys.executable, PROGRAM, *options], capture_output=True, text=True, check=False
    )

    found = json.loads((tmp_path / f"gpu-{part}.json").read_text())
    failures = [row for rows in found["stages"].values() for row in rows if row["failure"]]
    assert failures == []
    assert list(found["stages"]) == [stage.name for stage in PARTS[part]]
    assert f"part {part}: all as asked (NO GPU" in done.stdout
    assert done.returncode == 0
