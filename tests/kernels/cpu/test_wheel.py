"""A wheel: its libraries are for the architectures that they claim, and need no compiler.

A library's results have the same bits as those of the library that is compiled on this machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from remora.kernels.cpu.build import NativeUnavailable, read_cpu_flags, read_cpu_vendor
from remora.kernels.cpu.library import Epilogue, Library, Team
from remora.kernels.cpu.packing import PACKED
from remora.kernels.cpu.prebuilt import VARIANTS, find_compiler_for, variants_for
from tests.kernels.cpu.attending import Heads, run_in_chunks
from tests.kernels.cpu.products import make_rows, multiply, pack_alone

ROOT = Path(__file__).resolve().parents[3]
# At 18 in an ELF header: the architecture.
ELF_MACHINES = {"x86_64": b"\x3e\x00", "aarch64": b"\xb7\x00"}

RUN = """
import json, pathlib, sys
from remora.kernels.cpu.library import Library
from remora.kernels.cpu.prebuilt import load_library
from tests.kernels.cpu.test_wheel import results

library = load_library(pathlib.Path(sys.argv[1]))
print(json.dumps({"path": library._name, **results(Library(library))}))
"""


def results(library: Library) -> dict[str, str]:
    """Return hashes of products in every format, and of attention."""
    team = Team(library, 2)
    torch.manual_seed(1)
    x, weight = torch.randn(7, 192), torch.randn(96, 192)
    outputs = {
        f"{format.name} {epilogue.name}": multiply(
            team,
            make_rows(team, format, x),
            pack_alone(team, weight, None, format, gated=epilogue is Epilogue.GATED),
            epilogue=epilogue,
        )
        for format in PACKED
        for epilogue in (Epilogue.STORE, Epilogue.GATED)
    }
    heads = Heads(heads_per_kv=4, head_dim=64, dtype=torch.bfloat16)
    outputs["attention"] = run_in_chunks(team, heads, heads.draw(70, seed=2), [64, 5, 1])
    team.close()
    return {
        name: hashlib.sha256(out.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, out in outputs.items()
    }


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a wheel is installed: libraries for this CPU and the other architecture."""
    try:
        if int(version("setuptools").split(".")[0]) < 77:
            pytest.skip("setuptools is older than 77")
    except PackageNotFoundError:
        pytest.skip("setuptools is not installed")
    variants = variants_for(platform.machine(), read_cpu_flags(), read_cpu_vendor())[:1]
    for machine in ELF_MACHINES.keys() - {platform.machine()}:
        with suppress(NativeUnavailable):
            find_compiler_for(machine)
            variants += [variant for variant in VARIANTS if variant.machine == machine][:1]
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    run(
        *("make", "wheel-here", f"PYTHON={sys.executable}", f"WHEEL={wheels}"),
        f"VARIANTS={' '.join(variant.name for variant in variants)}",
        "PIP_OPTIONS=--no-build-isolation",
    )
    (wheel,) = wheels.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--target", target, wheel)
    return target


@pytest.mark.slow
def test_libraries_are_for_the_architectures_that_they_name(installed: Path) -> None:
    known = {variant.name: ELF_MACHINES[variant.machine] for variant in VARIANTS}
    libraries = sorted((installed / "remora/kernels/cpu/lib").iterdir())

    assert libraries
    for path in libraries:
        found = re.fullmatch(r"remora-cpu-(.*)-[0-9a-f]{16}\.so", path.name)
        assert found is not None
        assert path.read_bytes()[18:20] == known[found[1]]


@pytest.mark.slow
def test_an_installed_wheel_computes_the_same_bits_without_a_compiler(
    installed: Path, tmp_path: Path, library: Library
) -> None:
    env = {name: value for name, value in os.environ.items() if name != "CXX"}
    env |= {"PATH": str(tmp_path), "PYTHONPATH": f"{installed}{os.pathsep}{ROOT}"}
    assert not any(shutil.which(name, path=env["PATH"]) for name in ("g++", "clang++", "c++"))

    found: dict[str, Any] = json.loads(run(sys.executable, "-c", RUN, tmp_path / "cache", env=env))

    assert Path(found.pop("path")).parent == installed / "remora/kernels/cpu/lib"
    assert found == results(library)
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_an_installed_wheel_has_the_files_of_the_playground(installed: Path) -> None:
    place = Path("deployments/http/playground/static")
    found = {path.name for path in (installed / "remora" / place).iterdir()}

    assert found == {path.name for path in (ROOT / place).iterdir()}
