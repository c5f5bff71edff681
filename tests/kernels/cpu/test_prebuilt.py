"""Libraries of a wheel: which CPU gets which one, and when one is compiled instead."""

from __future__ import annotations

import logging
import platform
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.kernels.cpu import build
from remora.kernels.cpu.build import NativeUnavailable, find_compiler, hash_sources
from remora.kernels.cpu.prebuilt import (
    VARIANTS,
    Variant,
    find_compiler_for,
    find_prebuilt,
    load_library,
    variants_for,
)
from tests.kernels.cpu.test_build import AVX2, AVX512, make_compiler, make_sources

MACHINES = ["x86_64", "aarch64"]
VENDORS = ["GenuineIntel", "AuthenticAMD", ""]
FLAGS = sorted(frozenset().union(*(variant.needs for variant in VARIANTS)))
AMX = AVX512 | {"amx_bf16", "amx_int8", "amx_tile", "avx512_bf16", "avx512_vnni", "avx512vbmi"}


@pytest.mark.parametrize(
    ("machine", "vendor", "flags", "name"),
    [
        pytest.param("x86_64", "GenuineIntel", AMX, "amx", id="Sapphire Rapids"),
        pytest.param(
            "x86_64", "GenuineIntel", AMX - {"amx_tile"}, "avx512-bf16-intel", id="guest"
        ),
        pytest.param(
            "x86_64", "AuthenticAMD", AVX512 | {"avx512_bf16", "avx512_vnni"}, "avx512-bf16",
            id="Zen 4",
        ),
        pytest.param(
            "x86_64", "GenuineIntel", AVX512 | {"avx512_vnni"}, "avx512-vnni", id="Ice Lake"
        ),
        pytest.param("x86_64", "GenuineIntel", AVX512, "avx512", id="Skylake-SP"),
        pytest.param("x86_64", "GenuineIntel", AVX2 | {"avx_vnni"}, "avx2-vnni", id="Alder Lake"),
        pytest.param("x86_64", "GenuineIntel", AVX2, "avx2-intel", id="Haswell"),
        pytest.param("x86_64", "AuthenticAMD", AVX2, "avx2", id="Zen 3"),
        pytest.param("x86_64", "GenuineIntel", AVX2 - {"avx2"}, "x86-64", id="Ivy Bridge"),
        pytest.param("aarch64", "", {"asimd", "asimddp", "bf16", "i8mm"}, "neon-bf16", id="V1"),
        pytest.param("aarch64", "", {"asimd", "asimddp"}, "neon-dot", id="N1"),
        pytest.param("aarch64", "", {"asimd"}, "neon", id="Cortex-A72"),
    ],
)  # fmt: skip
def test_a_cpu_gets_the_library_of_its_kind(
    machine: str, vendor: str, flags: frozenset[str], name: str
) -> None:
    assert variants_for(machine, frozenset(flags), vendor)[0].name == name


@given(
    st.sampled_from(MACHINES),
    st.frozensets(st.sampled_from(FLAGS)),
    st.frozensets(st.sampled_from(FLAGS)),
    st.sampled_from(VENDORS),
)
def test_a_cpu_can_run_its_library_and_more_features_give_no_worse_one(
    machine: str, flags: frozenset[str], more: frozenset[str], vendor: str
) -> None:
    fitting = variants_for(machine, flags, vendor)
    better = variants_for(machine, flags | more, vendor)

    assert all(each.needs <= flags and each.machine == machine for each in fitting)
    assert all(each.vendor in ("", vendor) for each in fitting)
    assert VARIANTS.index(better[0]) <= VARIANTS.index(fitting[0])
    assert set(fitting) <= set(better)


def test_another_machine_gets_no_library() -> None:
    assert variants_for("riscv64", frozenset(FLAGS), "") == []


def best_here() -> Variant:
    fitting = variants_for(platform.machine(), build.read_cpu_flags(), build.read_cpu_vendor())
    if not fitting:
        pytest.skip(f"no wheel has libraries for {platform.machine()}")
    return fitting[0]


def add_prebuilt(folder: Path, variant: Variant, sources: Path) -> Path:
    """Compile `variant` into `folder`."""
    folder.mkdir(exist_ok=True)
    library = variant.compile(folder.parent / "made", find_compiler(), source_dir=sources)
    return Path(shutil.copy(library, folder / variant.file_name(hash_sources(sources))))


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return make_sources(tmp_path / "src")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "lib"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def hide_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")


def test_a_prebuilt_library_needs_no_compiler(
    cache: Path, folder: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_prebuilt(folder, best_here(), sources)
    hide_compilers(monkeypatch)

    library = load_library(cache, folder=folder, source_dir=sources)

    assert library.answer() == 42
    assert library._name == str(path)
    assert not cache.exists()


def test_what_was_compiled_for_this_machine_is_preferred(
    cache: Path, folder: Path, sources: Path
) -> None:
    add_prebuilt(folder, best_here(), sources)
    compiled = build.build_library(cache, source_dir=sources)

    assert load_library(cache, folder=folder, source_dir=sources)._name == str(compiled)


def test_changed_sources_are_compiled(
    cache: Path, folder: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_prebuilt(folder, best_here(), sources)
    make_sources(sources, answer=43)

    assert load_library(cache, folder=folder, source_dir=sources).answer() == 43
    hide_compilers(monkeypatch)
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler was found.*install"):
        load_library(cache, folder=folder, source_dir=sources)


def test_a_library_that_does_not_load_is_compiled(
    cache: Path, folder: Path, sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_prebuilt(folder, best_here(), sources).write_bytes(b"\x7fELF")

    library = load_library(cache, folder=folder, source_dir=sources)

    assert library.answer() == 42
    assert Path(library._name).parent == cache
    assert "the wheel's does not load" in caplog.text


def test_refused_tiles_leave_the_next_library(
    cache: Path,
    folder: Path,
    sources: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The CPU is taken for one with AMX; the library's few functions run on any."""
    if platform.machine() != "x86_64":
        pytest.skip("this machine has no AMX")
    monkeypatch.setattr(build, "read_cpu_flags", lambda: AMX)
    monkeypatch.setattr(build, "read_cpu_vendor", lambda: "GenuineIntel")
    (sources / "tiles.cpp").write_text(
        "#ifndef REMORA_TILES\n#define REMORA_TILES 0\n#endif\n"
        'extern "C" int remora_may_use_tiles() { return !REMORA_TILES; }\n'
    )
    for variant in VARIANTS[:2]:
        add_prebuilt(folder, variant, sources)
    hide_compilers(monkeypatch)

    library = load_library(cache, folder=folder, source_dir=sources)

    assert "avx512-bf16-intel" in library._name
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "the system refuses AMX to this process; products use AVX-512, more slowly"
    ]


def test_a_folder_without_libraries_offers_none(folder: Path, sources: Path) -> None:
    assert list(find_prebuilt(folder, source_dir=sources)) == []


def test_a_cross_compiler_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = next(machine for machine in MACHINES if machine != platform.machine())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeUnavailable, match=rf"{other}-linux-gnu-g\+\+ was not found.*apt-get"):
        find_compiler_for(other)

    program = make_compiler(tmp_path / f"{other}-linux-gnu-g++", "#!/bin/sh\n")

    assert find_compiler_for(other) == [str(program)]


@pytest.mark.parametrize("machine", MACHINES)
def test_libraries_differ_and_are_not_tuned_for_the_machine_that_compiles(
    tmp_path: Path, cache: Path, sources: Path, machine: str
) -> None:
    calls = tmp_path / "calls"
    script = f'#!/bin/sh\necho "$@" >> {calls}\nwhile [ "$1" != -o ]; do shift; done\ntouch "$2"\n'
    compiler = [str(make_compiler(tmp_path / "cxx", script))]
    variants = [variant for variant in VARIANTS if variant.machine == machine]

    made = {variant.compile(cache, compiler, source_dir=sources) for variant in variants}

    assert len(made) == len(variants)
    assert "=native" not in calls.read_text()
