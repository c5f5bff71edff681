"""Libraries that a wheel brings, so that no compiler is needed where it is installed.

`VARIANTS` lists the kinds of CPUs that have a library. `remora compile --into` compiles them;
`load_library` loads the best one for this CPU. Its file is named after the variant and a hash of
the sources, so a library of other sources is never loaded.

A checkout has no such libraries and compiles for the very machine. So can the user of a wheel: what
`remora compile` leaves in the cache is preferred.

Knows kinds of CPUs and where libraries are. Knows nothing of what the sources compute.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from remora.kernels.cpu import build
from remora.kernels.cpu.build import (
    AMX_NEEDS,
    AVX2_NEEDS,
    AVX512_NEEDS,
    SOURCE_DIR,
    Compilation,
    NativeUnavailable,
)

logger = logging.getLogger(__name__)

PREBUILT_DIR = SOURCE_DIR.with_name("lib")


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of CPU that has a library.

    machine:  architecture, as `platform.machine` names it
    needs:    CPU flags that the library depends on, as Linux names them
    vendor:   vendor of these CPUs, as Linux names it; "" = any
    tune:     CPU whose instruction costs the compiler assumes
    """

    name: str
    machine: str
    needs: frozenset[str]
    vendor: str
    tune: str

    def compile(
        self, cache_dir: Path, compiler: list[str], *, source_dir: Path = SOURCE_DIR
    ) -> Path:
        """Return the compiled library's path in the cache. Raises NativeUnavailable."""
        options = [f"-mtune={self.tune}", "-s"]
        kind = Compilation.for_cpus(self.needs, self.vendor, compiler=compiler, options=options)
        return kind.build(cache_dir, source_dir)

    def file_name(self, sources: str) -> str:
        """Return the library's name in a wheel; `sources` is from `build.hash_sources`."""
        return f"remora-cpu-{self.name}-{sources}.so"


_INTEL = "GenuineIntel"
_AVX512_DOT = AVX512_NEEDS | {"avx512_bf16", "avx512_vnni"}

# Of one architecture, the best first. Intel has rows of its own where bfloat16 is multiplied in
# another way there (build.py), and where tuning matters: with AVX2 on Golden Cove, prefill is 13 %
# slower when tuned for Haswell, Skylake or Alder Lake. g++ 11 and clang++ 14 know these tunings.
VARIANTS = (
    Variant("amx", "x86_64", AMX_NEEDS, _INTEL, "sapphirerapids"),
    Variant("avx512-bf16-intel", "x86_64", _AVX512_DOT, _INTEL, "sapphirerapids"),
    Variant("avx512-bf16", "x86_64", _AVX512_DOT, "", "znver3"),
    Variant("avx512-vnni", "x86_64", AVX512_NEEDS | {"avx512_vnni"}, "", "icelake-server"),
    Variant("avx512", "x86_64", AVX512_NEEDS, "", "skylake-avx512"),
    Variant("avx2-vnni", "x86_64", AVX2_NEEDS | {"avx_vnni"}, "", "icelake-server"),
    Variant("avx2-intel", "x86_64", AVX2_NEEDS, _INTEL, "icelake-server"),
    Variant("avx2", "x86_64", AVX2_NEEDS, "", "znver3"),
    Variant("x86-64", "x86_64", frozenset(), "", "generic"),
    Variant("neon-bf16", "aarch64", frozenset(["asimddp", "bf16", "i8mm"]), "", "neoverse-v1"),
    Variant("neon-dot", "aarch64", frozenset(["asimddp"]), "", "neoverse-n1"),
    Variant("neon", "aarch64", frozenset(), "", "generic"),
)


def variants_for(machine: str, cpu_flags: frozenset[str], vendor: str) -> list[Variant]:
    """Return the variants that a CPU can run, the best first."""
    return [
        variant
        for variant in VARIANTS
        if variant.machine == machine
        and variant.needs <= cpu_flags
        and variant.vendor in ("", vendor)
    ]


def find_prebuilt(
    folder: Path = PREBUILT_DIR, *, source_dir: Path = SOURCE_DIR
) -> Iterator[tuple[Variant, Path]]:
    """Yield the libraries in `folder` that fit this CPU and the sources, the best first."""
    if not folder.is_dir():
        return
    sources = build.hash_sources(source_dir)
    cpu_flags, vendor = build.read_cpu_flags(), build.read_cpu_vendor()
    for variant in variants_for(platform.machine(), cpu_flags, vendor):
        path = folder / variant.file_name(sources)
        if path.exists():
            yield variant, path


def load_library(
    cache_dir: Path, *, folder: Path = PREBUILT_DIR, source_dir: Path = SOURCE_DIR
) -> ctypes.CDLL:
    """Load the library compiled for this CPU if it is in the cache, else the best one in `folder`.

    If neither is there or loads, compile one. Raises NativeUnavailable.
    """
    if build.find_compiled(cache_dir, source_dir=source_dir) is None:
        library = _load_prebuilt(folder, source_dir)
        if library is not None:
            return library
    return build.load_library(cache_dir, source_dir=source_dir)


def _load_prebuilt(folder: Path, source_dir: Path) -> ctypes.CDLL | None:
    for variant, path in find_prebuilt(folder, source_dir=source_dir):
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            # The C library of this system is older than that of the system that made the wheel.
            logger.warning(
                "a library for this CPU is compiled; the wheel's does not load: %s", error
            )
            return None
        if library.remora_may_use_tiles():
            logger.info("native CPU kernels: %s, prebuilt", variant.name)
            return library
        logger.warning("the system refuses AMX to this process; products use AVX-512, more slowly")
    return None


def find_compiler_for(machine: str) -> list[str]:
    """Return the command words of a compiler for this or another architecture.

    Raises NativeUnavailable.
    """
    if machine == platform.machine():
        return build.find_compiler()
    name = f"{machine}-linux-gnu-g++"
    if program := shutil.which(name):
        return [program]
    package = f"g++-{machine.replace('_', '-')}-linux-gnu"
    raise NativeUnavailable(f"{name} was not found (Debian, Ubuntu: apt-get install {package})")
