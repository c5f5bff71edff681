"""Every kernel and launch, compiled for GPUs that are not here: they fit, and spill nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from remora.kernels.gpu.arch import Arch

HERE = Path(__file__).parent
TIMEOUT_S = 600
# Of products of float32, which tensor cores do not make: ptxas puts a counter or two aside although
# registers are left.
FEW_BYTES = 32
Compiled = list[dict[str, Any]]


def compile_for(arch: Arch) -> Compiled:
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


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[Arch, Future[Compiled]]]:
    """What came of compiling for each target, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {arch: pool.submit(compile_for, arch) for arch in Arch}


def allowed(found: dict[str, Any]) -> int:
    return FEW_BYTES if "float32" in found["case"] else 0


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("arch", Arch, ids=lambda arch: arch.value)
def test_kernels_fit_and_spill_nothing(
    compiled: dict[Arch, Future[Compiled]], arch: Arch, record_property: Any
) -> None:
    made = compiled[arch].result()
    record_property("kernels", json.dumps(made))

    families = {path.stem for path in (HERE / "launches").glob("*.py")}
    assert {found["family"] for found in made} == families
    assert [found for found in made if found["spilled"] > allowed(found)] == []
    assert [found for found in made if found["shared"] > arch.shared_bytes] == []
