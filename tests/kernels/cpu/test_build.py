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
from remora.kernels.cpu.build import InstructionSet, NativeUnavailable, build_library, load_library

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
    return folder


def make_compiler(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def build_and_ask(folders: tuple[Path, Path]) -> int:
    cache_dir, source_dir = folders
    answer: int = load_library(cache_dir, source_dir=source_dir).answer()
    return answer


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that leaves a line in this file each time it is started."""
    calls = tmp_path / "calls"
    calls.touch()
    real = build._find_compiler()[0]
    script = make_compiler(tmp_path / "cxx", f'echo "$$" >> "{calls}"\nexec "{real}" "$@"')
    monkeypatch.setenv("CXX", str(script))
    return calls


def test_all_sources_become_one_library(tmp_path: Path) -> None:
    library = load_library(tmp_path / "cache", source_dir=make_sources(tmp_path / "src"))

    assert library.answer() == 42
    assert library.twice(4) == 8


def test_a_second_build_does_not_start_the_compiler(tmp_path: Path, counted: Path) -> None:
    source_dir = make_sources(tmp_path / "src")

    first = build_library(tmp_path / "cache", source_dir=source_dir)
    second = build_library(tmp_path / "cache", source_dir=source_dir)

    assert first == second
    assert len(counted.read_text().splitlines()) == 1
    assert list((tmp_path / "cache").iterdir()) == [first]


def test_a_changed_header_makes_another_library(tmp_path: Path, counted: Path) -> None:
    old = load_library(tmp_path / "cache", source_dir=make_sources(tmp_path / "src"))
    new = load_library(tmp_path / "cache", source_dir=make_sources(tmp_path / "src", answer=43))

    assert (old.answer(), new.answer()) == (42, 43)
    assert len(counted.read_text().splitlines()) == 2


def test_another_compiler_makes_another_library(tmp_path: Path, counted: Path) -> None:
    source_dir = make_sources(tmp_path / "src")
    first = build_library(tmp_path / "cache", source_dir=source_dir)
    with Path(os.environ["CXX"]).open("a") as script:
        script.write("# newer\n")

    assert build_library(tmp_path / "cache", source_dir=source_dir) != first


def test_processes_that_build_at_once_share_one_compilation(tmp_path: Path, counted: Path) -> None:
    folders = (tmp_path / "cache", make_sources(tmp_path / "src"))

    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        answers = list(pool.map(build_and_ask, [folders] * 3))

    assert answers == [42, 42, 42]
    assert len(counted.read_text().splitlines()) == 1


def test_a_damaged_library_is_made_again(tmp_path: Path) -> None:
    source_dir = make_sources(tmp_path / "src")
    build_library(tmp_path / "cache", source_dir=source_dir).write_bytes(b"")

    assert load_library(tmp_path / "cache", source_dir=source_dir).answer() == 42


def test_it_is_said_what_takes_so_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "remora.kernels.cpu.build")

    build_library(tmp_path / "cache", source_dir=make_sources(tmp_path / "src"))

    # Loggers that other tests have set up may hand on each record twice.
    said = dict.fromkeys(record.getMessage().split()[0] for record in caplog.records)
    assert list(said) == ["compiling", "compiled"]


def test_a_machine_without_compiler_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(NativeUnavailable, match=r"looked for g\+\+, clang\+\+, c\+\+; install"):
        build_library(tmp_path / "cache", source_dir=make_sources(tmp_path / "src"))


def test_a_source_that_does_not_compile_shows_the_compilers_words(tmp_path: Path) -> None:
    source_dir = make_sources(tmp_path / "src")
    (source_dir / "answer.cpp").write_text("int broken = nonsense;\n")

    with pytest.raises(NativeUnavailable, match=r"answer\.cpp:1.*nonsense"):
        build_library(tmp_path / "cache", source_dir=source_dir)

    assert list((tmp_path / "cache").iterdir()) == []


OLD = ("unrecognized command-line option '-std=c++20'", "bad value ('x86-64-v4') for '-march='")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "CXX = .*/cxx"),
        ("\x7fELF", "does not start"),
        ("#!/bin/sh\nexit 0", "does not load"),
        *((f'#!/bin/sh\necho "error: {line}" >&2; exit 1', "too old") for line in OLD),
    ],
)
def test_a_compiler_of_no_use_is_named_with_its_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, reason: str
) -> None:
    program = tmp_path / "cxx"
    if script is not None:
        make_compiler(program, "").write_text(script)
    monkeypatch.setenv("CXX", f"{program} -O1")

    with pytest.raises(NativeUnavailable, match=reason):
        load_library(tmp_path / "cache", source_dir=make_sources(tmp_path / "src"))


def test_unusable_folders_are_named(tmp_path: Path) -> None:
    in_the_way = tmp_path / "cache"
    in_the_way.touch()

    with pytest.raises(NativeUnavailable, match=r"cache cannot be written.*REMORA_CACHE"):
        build_library(in_the_way, source_dir=make_sources(tmp_path / "src"))
    with pytest.raises(NativeUnavailable, match="no C"):
        build_library(tmp_path / "other", source_dir=tmp_path)


def test_a_compiler_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survived = tmp_path / "survived"
    hanging = make_compiler(tmp_path / "cxx", f'(sleep 1; touch "{survived}") & wait')
    monkeypatch.setenv("CXX", str(hanging))
    monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.2)

    with pytest.raises(NativeUnavailable, match="0 s"):
        build_library(tmp_path / "cache", source_dir=make_sources(tmp_path / "src"))

    time.sleep(1.2)
    assert not survived.exists()


@pytest.mark.parametrize(
    ("cpu_flags", "expected"),
    [
        (AVX512, InstructionSet.AVX512),
        (AVX512 - {"avx512bw"}, InstructionSet.AVX2),
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
    plain = build._target_flags(InstructionSet.AVX512, AVX512)
    full = build._target_flags(InstructionSet.AVX512, AVX512 | {"avx512_bf16", "avx512_vnni"})

    assert not {"-mavx512bf16", "-mavx512vnni"} & set(plain)
    assert {"-mavx512bf16", "-mavx512vnni"} <= set(full)
    assert build._target_flags(InstructionSet.PORTABLE, AVX512) == []


def test_code_that_the_cpu_cannot_run_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "read_cpu_flags", lambda: AVX2)

    with pytest.raises(NativeUnavailable, match="its best instruction set is avx2"):
        load_library(
            tmp_path, instruction_set=InstructionSet.AVX512, source_dir=make_sources(tmp_path)
        )


@pytest.mark.parametrize("instruction_set", InstructionSet)
def test_the_kernels_compile_for(instruction_set: InstructionSet) -> None:
    # In the user's cache: what compiled once need not be compiled for every run of the tests.
    library = build_library(cache_dir() / "kernels", instruction_set=instruction_set)

    assert library.stat().st_size > 0
