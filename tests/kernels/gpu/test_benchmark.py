"""The script that measures the kernels goes through all of them where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.gpu.devices import interpreted_only

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@interpreted_only
def test_every_kernel_is_called_and_written_down(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    program = ROOT / "tests" / "benchmarks" / "gpu" / "run.py"

    subprocess.run(
        [sys.executable, program, "--only", "kernels", "--interpret", "--json", path],
        check=True,
        capture_output=True,
        cwd=tmp_path,
    )

    found = json.loads(path.read_text())
    assert {each["kernel"].split()[0] for each in found["kernels"]} == {
        "add_rms_norm",
        "attend_decode_paged",
        "attend_extend",
        "choose_on_device",
        "linear_invariant",
        "linear_quant",
        "lora",
        "moe",
        "rotate_and_store",
        "route",
        "silu_and_mul",
        "torch",
    }
    assert all(each["num_bytes"] > 0 for each in found["kernels"])
    assert found["machine"]["triton"] != "none"
