"""Every kernel and launch, compiled for GPUs that are not here: they fit, and spill nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remora.kernels.gpu.arch import Arch
from tests.kernels.gpu.ahead.rules import faults_of

HERE = Path(__file__).parent
TIMEOUT_S = 600
# Of products of float32, which tensor cores do not make: ptxas puts a counter or two aside although
# registers are left.
FEW_BYTES = 32


def compile_for(arch: Arch) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(HERE / "compile.py"), arch.value],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def allowed(found: dict[str, Any]) -> int:
    return FEW_BYTES if "float32" in found["case"] else 0


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("arch", Arch, ids=lambda arch: arch.value)
def test_kernels_fit_and_spill_nothing(arch: Arch, record_property: Any) -> None:
    made = compile_for(arch)
    record_property("kernels", json.dumps(made))

    families = {path.stem for path in (HERE / "launches").glob("*.py")}
    assert {found["family"] for found in made} == families
    assert [found for found in made if found["spilled"] > allowed(found)] == []
    assert [found for found in made if found["shared"] > arch.shared_bytes] == []
    if arch is Arch.HOPPER:
        assert [(found, faults_of(found)) for found in made if faults_of(found)] == []
