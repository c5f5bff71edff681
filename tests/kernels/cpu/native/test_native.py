"""Products, norms, attention and sampling of compiled libraries, called from a C++ program.

`main.cpp` runs the cases that `cases.py` writes, for every instruction set of this CPU and, under
qemu, for ARM's. ARM needs Debian's packages g++-aarch64-linux-gnu and qemu-user.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from remora.configs.environment import cache_dir
from remora.kernels.cpu import build
from remora.kernels.cpu.build import InstructionSet, build_library
from remora.kernels.cpu.library import Library
from tests.kernels.cpu.conftest import load
from tests.kernels.cpu.native.arithmetic import Bf16Sum
from tests.kernels.cpu.native.cases import Target, all_cases, write_case, write_cases

RUNNER = Path(__file__).with_name("main.cpp")
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
ARM_ROOT = Path("/usr/aarch64-linux-gnu")
# CPUs that qemu emulates, and those of their features that matter, as Linux names them.
ARM_CPUS = {
    "cortex-a72": frozenset[str](),
    "cortex-a76": frozenset(["asimddp"]),
    "max": frozenset(["asimddp", "bf16", "i8mm"]),
}
# Cases whose bits are the same on every CPU with fused multiply-adds.
SAME_BITS = ("norm-", "sampling-", "product-f32-", "product-q8-", "product-q8_0-", "product-q4-")

Compile = Callable[[Sequence[str]], Path]


@pytest.fixture(scope="session")
def compile_runner(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Return a function that compiles the runner with a compiler, once."""
    programs: dict[str, Path] = {}

    def compile(compiler: Sequence[str]) -> Path:
        if compiler[0] not in programs:
            program = tmp_path_factory.mktemp("runner") / "runner"
            options = ("-std=c++20", "-O1", "-w", "-pthread", f"-I{build.SOURCE_DIR}", str(RUNNER))
            subprocess.run([*compiler, *options, "-o", program, "-ldl"], check=True)
            programs[compiler[0]] = program
        return programs[compiler[0]]

    return compile


@pytest.fixture
def run_here(compile_runner: Compile, tmp_path: Path) -> Callable[[Library], dict[str, str]]:
    """Return a function that runs all cases on a library of this machine."""

    def run_cases(library: Library) -> dict[str, str]:
        runner = compile_runner(build.find_compiler())
        return run([str(runner)], library.handle._name, write_cases(tmp_path, target_of(library)))

    return run_cases


def target_of(library: Library) -> Target:
    name, product = library.instructions, bytes(library.bf16_product()).decode()
    bf16_sum: Bf16Sum | None = None  # of vdpbf16ps, which vendors do not document alike
    if name in ("AVX-512 with AMX", "emulated tiles"):
        bf16_sum = Bf16Sum.TILES
    elif product == "float32 multiply-adds":
        bf16_sum = Bf16Sum.WIDENED
    elif name.startswith("NEON"):
        bf16_sum = Bf16Sum.BFDOT
    return Target(fuses=name != "portable", bf16_sum=bf16_sum)


def run(command: Sequence[str], library: str, cases: Sequence[Path]) -> dict[str, str]:
    """Run cases; return the hash of each result. Fails with what the runner prints about faults."""
    ended = subprocess.run(
        [*command, library, *map(str, cases)], capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, "\n".join(
        [ended.stderr, *(line for line in ended.stdout.splitlines() if ": " in line)]
    )
    hashes = dict(line.split() for line in ended.stdout.splitlines())
    assert list(hashes) == [path.stem for path in cases]
    return hashes


def bits_that_should_agree(hashes: dict[str, str]) -> dict[str, str]:
    """Select the cases whose bits no instruction set changes; activations are approximated."""
    return {
        name: bits
        for name, bits in hashes.items()
        if name.startswith(SAME_BITS) and "-gated-" not in name
    }


def test_the_library_of_this_machine_gives_the_expected_values(
    run_here: Callable[[Library], dict[str, str]], library: Library
) -> None:
    run_here(library)


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", InstructionSet)
def test_every_instruction_set_gives_the_expected_values(
    run_here: Callable[[Library], dict[str, str]], library: Library, instruction_set: InstructionSet
) -> None:
    other = load(instruction_set)

    hashes = run_here(other)

    if target_of(other).fuses and target_of(library).fuses:
        assert bits_that_should_agree(hashes) == bits_that_should_agree(run_here(library))


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ARM_CPUS)
def test_arm_gives_the_expected_values(
    compile_runner: Compile,
    run_here: Callable[[Library], dict[str, str]],
    library: Library,
    cpu: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = [name for name in (CROSS_COMPILER, EMULATOR) if shutil.which(name) is None]
    if missing or not ARM_ROOT.is_dir():
        pytest.skip(
            f"no {', '.join(missing) or ARM_ROOT}: install g++-aarch64-linux-gnu, qemu-user"
        )
    features = ARM_CPUS[cpu]
    bf16_sum = Bf16Sum.BFDOT if "bf16" in features else Bf16Sum.WIDENED
    cases_dir = tmp_path / "arm"
    cases_dir.mkdir()
    cases = write_cases(cases_dir, Target(fuses=True, bf16_sum=bf16_sum))
    with monkeypatch.context() as patch:
        patch.setenv("CXX", CROSS_COMPILER)
        patch.setattr(build, "read_cpu_flags", lambda: features)
        path = build_library(cache_dir() / "kernels", instruction_set=InstructionSet.PORTABLE)
    runner = compile_runner([CROSS_COMPILER])

    hashes = run([EMULATOR, "-cpu", cpu, "-L", str(ARM_ROOT), str(runner)], str(path), cases)

    if target_of(library).fuses:
        assert bits_that_should_agree(hashes) == bits_that_should_agree(run_here(library))


@pytest.mark.parametrize(("array", "how"), [("bits", "exactly"), ("expected", "about")])
def test_the_runner_reports_a_value_that_differs(
    compile_runner: Compile, library: Library, tmp_path: Path, array: str, how: str
) -> None:
    values = dict(dict(all_cases(target_of(library)))["norm-rms-15-15"])
    changed = torch.as_tensor(values[array]).clone()
    changed[2, 7] *= 1 + 2.0**-16
    case = write_case(tmp_path / "norm-changed.case", {**values, array: changed})

    with pytest.raises(AssertionError, match=f"norm-changed: value 37 .* {how}; wrong: 1\n"):
        run([str(compile_runner(build.find_compiler()))], library.handle._name, [case])
