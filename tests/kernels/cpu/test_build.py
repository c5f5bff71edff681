"""Making the native library: what is compiled when, what is cached, and what failures say."""

from __future__ import annotations

import logging
import os
import stat
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from remora.configs.environment import cache_dir
from remora.kernels.cpu import build
from remora.kernels.cpu.build import (
    InstructionSet,
    NativeUnavailable,
    best_instruction_set,
    build_library,
    load_library,
    read_cpu_flags,
)

AVX2 = frozenset(
    ["sse4_2", "popcnt", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"],
)
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def make_sources(folder: Path, answer: int = 42) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "answer.h").write_text(f"constexpr int ANSWER = {answer};\n")
    (folder / "answer.cpp").write_text(
        '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'
    )
    (folder / "twice.cpp").write_text('extern "C" int twice(int x) { return 2 * x; }\n')
    # Asked on CPUs with AMX.
    (folder / "tiles.cpp").write_text('extern "C" int remora_may_use_tiles() { return 1; }\n')
    return folder


def make_compiler(path: Path, content: str) -> Path:
    path.write_text(content)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def build_and_ask(folders: tuple[Path, Path]) -> int:
    cache, sources = folders
    answer: int = load_library(cache, source_dir=sources).answer()
    return answer


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return make_sources(tmp_path / "src")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file to which the compiler adds a line for each library that it links."""
    calls = tmp_path / "calls"
    calls.touch()
    real = build.find_compiler()[0]
    count = f'case "$*" in *-shared*) echo "$$" >> "{calls}";; esac'
    script = f'#!/bin/sh\n{count}\nexec "{real}" "$@"\n'
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path / "cxx", script)))
    return calls


def test_a_second_build_does_not_start_the_compiler(
    cache: Path, sources: Path, counted: Path
) -> None:
    first = build_library(cache, source_dir=sources)
    second = build_library(cache, source_dir=sources)

    assert first == second
    assert len(counted.read_text().splitlines()) == 1
    assert list(cache.iterdir()) == [first]


def test_a_changed_header_makes_another_library(cache: Path, sources: Path, counted: Path) -> None:
    old = load_library(cache, source_dir=sources)
    new = load_library(cache, source_dir=make_sources(sources, answer=43))

    assert (old.answer(), new.answer(), new.twice(4)) == (42, 43, 8)
    assert len(counted.read_text().splitlines()) == 2


def test_another_compiler_makes_another_library(cache: Path, sources: Path, counted: Path) -> None:
    first = build_library(cache, source_dir=sources)
    with Path(os.environ["CXX"]).open("a") as script:
        script.write("# newer\n")

    assert build_library(cache, source_dir=sources) != first


def test_concurrent_processes_share_one_compilation(
    cache: Path, sources: Path, counted: Path
) -> None:
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        answers = list(pool.map(build_and_ask, [(cache, sources)] * 3))

    assert answers == [42, 42, 42]
    assert len(counted.read_text().splitlines()) == 1


def test_a_damaged_library_is_made_again(cache: Path, sources: Path) -> None:
    build_library(cache, source_dir=sources).write_bytes(b"")

    assert load_library(cache, source_dir=sources).answer() == 42


def test_a_compilation_is_logged(
    cache: Path, sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "remora.kernels.cpu.build")

    build_library(cache, source_dir=sources)

    # Loggers that other tests have set up may hand on each record twice.
    said = dict.fromkeys(record.getMessage().split()[0] for record in caplog.records)
    assert list(said) == ["compiling", "compiled"]


def test_an_error_without_compiler_names_what_to_install(
    cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache))

    with pytest.raises(NativeUnavailable, match=r"looked for g\+\+, clang\+\+, c\+\+; install"):
        build_library(cache, source_dir=sources)


def test_an_error_in_a_source_shows_the_compilers_message(cache: Path, sources: Path) -> None:
    (sources / "answer.cpp").write_text("int broken = nonsense;\n")

    with pytest.raises(NativeUnavailable, match=r"answer\.cpp:1.*nonsense"):
        build_library(cache, source_dir=sources)

    assert list(cache.iterdir()) == []


OLD = ("unrecognized command-line option '-std=c++20'", "bad value ('x86-64-v4') for '-march='")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "CXX = .*/cxx"),
        ("\x7fELF", "does not start"),
        ("#!/bin/sh\nexit 0", "made no library"),
        ('#!/bin/sh\nfor last; do :; done\n: > "$last"', "does not load"),
        *((f'#!/bin/sh\necho "error: {line}" >&2; exit 1', "too old") for line in OLD),
    ],
)
def test_an_error_names_a_useless_compiler_and_its_fault(
    tmp_path: Path,
    cache: Path,
    sources: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str | None,
    reason: str,
) -> None:
    program = tmp_path / "cxx"
    if script is not None:
        make_compiler(program, script)
    monkeypatch.setenv("CXX", f"{program} -O1")

    with pytest.raises(NativeUnavailable, match=reason):
        load_library(cache, source_dir=sources)


def test_an_error_names_unusable_folders(tmp_path: Path, cache: Path, sources: Path) -> None:
    cache.touch()

    with pytest.raises(NativeUnavailable, match=r"cache cannot be written.*REMORA_CACHE"):
        build_library(cache, source_dir=sources)
    with pytest.raises(NativeUnavailable, match="no C"):
        build_library(tmp_path / "other", source_dir=tmp_path)


def test_a_compiler_that_hangs_is_ended_with_its_children(
    tmp_path: Path, cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survived = tmp_path / "survived"
    script = f'#!/bin/sh\n(sleep 1; touch "{survived}") & wait\n'
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path / "cxx", script)))
    monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.2)

    with pytest.raises(NativeUnavailable, match="0 s"):
        build_library(cache, source_dir=sources)

    time.sleep(1.2)
    assert not survived.exists()


@pytest.mark.parametrize(
    ("cpu_flags", "expected"),
    [
        (AVX512, InstructionSet.AVX512),
        (AVX512 - {"avx512bw"}, InstructionSet.AVX2),
        (AVX512 | {"avx512_bf16", "avx512_vnni", "amx_tile"}, InstructionSet.AVX512),
        (
            AVX512 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"},
            InstructionSet.AMX,
        ),
        (AVX2, InstructionSet.AVX2),
        (AVX2 - {"fma"}, InstructionSet.PORTABLE),
        (frozenset(), InstructionSet.PORTABLE),
    ],
)
def test_the_best_instruction_set_of_a_cpu_is_chosen(
    cpu_flags: frozenset[str], expected: InstructionSet
) -> None:
    assert build.best_instruction_set(cpu_flags) is expected


def test_dot_products_are_used_only_where_the_cpu_has_them() -> None:
    plain = build._target_flags(InstructionSet.AVX512, AVX512, "AuthenticAMD")
    flags = AVX512 | {"avx512_bf16", "avx512_vnni"}
    full = build._target_flags(InstructionSet.AVX512, flags, "AuthenticAMD")

    assert not {"-mavx512bf16", "-mavx512vnni"} & set(plain)
    assert {"-mavx512bf16", "-mavx512vnni"} <= set(full)
    assert build._target_flags(InstructionSet.PORTABLE, AVX512, "AuthenticAMD") == []
    assert "-mavxvnni" not in build._target_flags(InstructionSet.AVX2, AVX2, "GenuineIntel")
    client = build._target_flags(InstructionSet.AVX2, AVX2 | {"avx_vnni"}, "GenuineIntel")
    assert "-mavxvnni" in client


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (["asimd", "atomics"], []),
        (["asimd", "asimddp"], ["-march=armv8.2-a+dotprod"]),
        (["asimddp", "i8mm", "bf16"], ["-march=armv8.2-a+dotprod+bf16+i8mm"]),
    ],
)
def test_dot_products_of_arm_are_used_where_the_cpu_has_them(
    features: list[str], expected: list[str]
) -> None:
    flags = frozenset(features)

    assert build.best_instruction_set(flags) is InstructionSet.PORTABLE
    assert build._target_flags(InstructionSet.PORTABLE, flags, "") == expected


def test_features_of_arm_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd asimddp\n")
    monkeypatch.setattr(build, "Path", lambda _: info)

    assert build.read_cpu_flags() == {"fp", "asimd", "asimddp"}


@pytest.mark.parametrize(
    ("vendor", "widens"), [("AuthenticAMD", False), ("GenuineIntel", True), ("", False)]
)
def test_bfloat16_is_widened_where_that_is_faster(vendor: str, widens: bool) -> None:
    flags = build._target_flags(InstructionSet.AVX512, AVX512 | {"avx512_bf16"}, vendor)

    assert ("-DREMORA_WIDEN_BF16=1" in flags) is widens


@pytest.mark.parametrize("target", [InstructionSet.AMX, InstructionSet.EMULATED])
def test_tiles_are_added_to_the_vectors_of_the_cpu(target: InstructionSet) -> None:
    vectors = build._target_flags(InstructionSet.AVX512, AVX512, "")
    number = 1 if target is InstructionSet.AMX else 2
    found = build._target_flags(target, AVX512, "")

    assert found[: len(vectors) + 1] == [*vectors, f"-DREMORA_TILES={number}"]


def test_code_that_the_cpu_cannot_run_is_not_loaded(
    cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "read_cpu_flags", lambda: AVX2)

    with pytest.raises(NativeUnavailable, match="its best instruction set is avx2"):
        load_library(cache, instruction_set=InstructionSet.AVX512, source_dir=sources)


ORDER = list(InstructionSet)
RUN_HERE = ORDER[ORDER.index(best_instruction_set(read_cpu_flags())) :]


@pytest.mark.parametrize(
    "instruction_set",
    [pytest.param(each, marks=[] if each in RUN_HERE else [pytest.mark.slow]) for each in ORDER],
)
def test_the_kernels_compile_for(
    instruction_set: InstructionSet, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if instruction_set in RUN_HERE:
        cache = cache_dir() / "kernels"  # where other tests find it, and run it
    else:
        # Takes a quarter of the time.
        unoptimised = tuple("-O0" if flag == "-O3" else flag for flag in build._FLAGS)
        monkeypatch.setattr(build, "_FLAGS", unoptimised)

    assert build_library(cache, instruction_set=instruction_set).stat().st_size > 0
