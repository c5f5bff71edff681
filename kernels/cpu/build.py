"""Compiles the C++ sources of `src/` into a shared library, once per machine and version.

Sources are compiled side by side, as many at once as this process has cores, and linked. The
library's name in the cache folder is a hash of sources, flags and compiler, so a changed source or
an upgraded compiler makes a new library and none is ever stale.
Every failure raises NativeUnavailable with advice for the operator; the caller can then serve
without native kernels.

Knows nothing of what the sources compute.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).with_name("src")
COMPILERS = ("g++", "clang++", "c++")
COMPILE_TIMEOUT_S = 300.0

# A compiler may need a gigabyte of memory for one source.
MAX_COMPILERS = 8

_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=fast", "-fPIC", "-pthread", "-w")
# A third of the time to compile, for code that only tests run. The second option contracts products
# and sums, as -O3 does.
_QUICKLY = ("-O1", "-fexpensive-optimizations")
# CPU flags that instruction sets consist of, as Linux names them.
AVX2_NEEDS = frozenset(
    ["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "popcnt", "sse4_2", "xsave"]
)
AVX512_NEEDS = AVX2_NEEDS | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
AMX_NEEDS = AVX512_NEEDS | {"amx_bf16", "amx_int8", "amx_tile", "avx512_bf16", "avx512_vnni"}
# Parts of AVX-512 that not every CPU has: Linux's name -> the compiler's option.
_AVX512_EXTRAS = {
    "avx512_bf16": "-mavx512bf16",
    "avx512_vnni": "-mavx512vnni",
    "avx512vbmi": "-mavx512vbmi",
}
_AVX2_EXTRAS = {"avx_vnni": "-mavxvnni"}
# Parts of ARMv8.2: Linux's name -> the architecture's extension.
_ARM_EXTRAS = {"asimddp": "+dotprod", "bf16": "+bf16", "i8mm": "+i8mm"}
# Vendors whose bfloat16 dot product takes longer than two multiply-adds of floats: twice as long on
# Sapphire Rapids, half as long on Zen 4 and 5. `remora doctor` shows the rates.
_WIDENING_VENDORS = frozenset(["GenuineIntel"])
# Compiler messages about options or library features newer than the compiler.
_AGE_SIGNS = ("unrecognized", "unknown argument", "bad value", "invalid value", "no member named")


class NativeUnavailable(Exception):
    """The native library is unavailable; the message names the cause and the remedy."""


class InstructionSet(StrEnum):
    """Target of the compilation, the widest first.

    AMX:       AVX-512 and Intel's tile registers (src/tile.h)
    PORTABLE:  the architecture's baseline (arm64: NEON, with the CPU's dot products)
    EMULATED:  the widest of the others, with emulated tile registers; for tests
    """

    AMX = "amx"
    AVX512 = "avx512"
    AVX2 = "avx2"
    PORTABLE = "portable"
    EMULATED = "emulated"


def read_cpu_flags() -> frozenset[str]:
    """Return this CPU's feature flags as Linux names them; empty on other systems."""
    return frozenset((_read_cpu_line("flags") or _read_cpu_line("Features")).split())


def read_cpu_vendor() -> str:
    """Return this CPU's vendor as Linux names it; empty on other systems."""
    return _read_cpu_line("vendor_id")


def _read_cpu_line(name: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = next((line for line in lines if line.startswith(name)), "")
    return found.partition(":")[2].strip()


def best_instruction_set(cpu_flags: frozenset[str]) -> InstructionSet:
    """Return the widest instruction set that a CPU with these flags can run."""
    if cpu_flags >= AMX_NEEDS:
        return InstructionSet.AMX
    if cpu_flags >= AVX512_NEEDS:
        return InstructionSet.AVX512
    return InstructionSet.AVX2 if cpu_flags >= AVX2_NEEDS else InstructionSet.PORTABLE


def load_library(
    cache_dir: Path, *, instruction_set: InstructionSet | None = None, source_dir: Path = SOURCE_DIR
) -> ctypes.CDLL:
    """Load the library for this CPU; compile it first if it is not in the cache.

    instruction_set:  None = the best of this CPU
    Raises NativeUnavailable.
    """
    best = best_instruction_set(read_cpu_flags())
    order = list(InstructionSet)
    if instruction_set is not None and order.index(instruction_set) < order.index(best):
        raise NativeUnavailable(
            f"this CPU cannot run {instruction_set} code; its best instruction set is {best}"
        )
    library = _load(cache_dir, instruction_set, source_dir)
    if (instruction_set or best) is InstructionSet.AMX and not library.remora_may_use_tiles():
        logger.warning("the system refuses AMX to this process; products use AVX-512, more slowly")
        return _load(cache_dir, InstructionSet.AVX512, source_dir)
    return library


def _load(cache_dir: Path, instruction_set: InstructionSet | None, source_dir: Path) -> ctypes.CDLL:
    path = build_library(cache_dir, instruction_set=instruction_set, source_dir=source_dir)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        # A power failure can leave the file's name without its content.
        with suppress(OSError):
            path.unlink()
    path = build_library(cache_dir, instruction_set=instruction_set, source_dir=source_dir)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(
            f"the compiled library does not load: {error}; choose another compiler with CXX"
        ) from error


def build_library(
    cache_dir: Path, *, instruction_set: InstructionSet | None = None, source_dir: Path = SOURCE_DIR
) -> Path:
    """Return the path of the compiled library; compile it if it is not in the cache.

    Raises NativeUnavailable.
    """
    return Compilation.for_this_cpu(instruction_set).build(cache_dir, source_dir)


def find_compiled(cache_dir: Path, *, source_dir: Path = SOURCE_DIR) -> Path | None:
    """Return the library that `build_library` would return for this CPU, None if not compiled."""
    with suppress(NativeUnavailable):
        library = Compilation.for_this_cpu().library(cache_dir, source_dir)
        return library if library.exists() else None
    return None


@dataclass(frozen=True, slots=True)
class Compilation:
    """A compiler and its options: all that a library depends on but the sources.

    compiler:  command words; the program is an absolute path
    """

    instruction_set: InstructionSet
    compiler: list[str]
    options: list[str]

    @classmethod
    def for_this_cpu(cls, instruction_set: InstructionSet | None = None) -> Compilation:
        """Choose the options for this CPU. Raises NativeUnavailable without a compiler."""
        cpu_flags = read_cpu_flags()
        target = instruction_set or best_instruction_set(cpu_flags)
        options = _target_flags(target, cpu_flags, read_cpu_vendor())
        if target is not InstructionSet.PORTABLE:
            # Tuning changes which instructions are preferred, not which are allowed.
            options.append("-mtune=native" if cpu_flags >= AVX2_NEEDS else "-mtune=generic")
        return cls(target, find_compiler(), options)

    @classmethod
    def for_cpus(
        cls, cpu_flags: frozenset[str], vendor: str, *, compiler: list[str], options: list[str]
    ) -> Compilation:
        """Choose the options for CPUs of one vendor that have these flags; add `options`."""
        target = best_instruction_set(cpu_flags)
        return cls(target, compiler, [*_target_flags(target, cpu_flags, vendor), *options])

    def library(self, cache_dir: Path, source_dir: Path) -> Path:
        """Return the library's path in the cache folder. Raises NativeUnavailable."""
        if not any(source_dir.glob("*.cpp")):
            raise NativeUnavailable(f"{source_dir} holds no C++ sources; reinstall remora")
        digest = _hash(self._command(), self.compiler, source_dir)
        return cache_dir / f"remora-cpu-{self.instruction_set}-{digest}.so"

    def build(self, cache_dir: Path, source_dir: Path) -> Path:
        """Return the library's path; compile it if it is not in the cache.

        Safe for concurrent processes: one compiles, the others wait for it.
        Raises NativeUnavailable.
        """
        library = self.library(cache_dir, source_dir)
        if library.exists():
            return library
        sources = sorted(source_dir.glob("*.cpp"))
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _only_one_process(cache_dir / f"{library.name}.lock"):
                if not library.exists():
                    _compile(self._command(), sources, library, self.instruction_set)
        except OSError as error:
            raise NativeUnavailable(
                f"the cache folder {cache_dir} cannot be written: {error}; free some space there "
                "or name another folder in REMORA_CACHE"
            ) from error
        return library

    def _command(self) -> list[str]:
        return [*self.compiler, *_FLAGS, *self.options]


def find_compiler() -> list[str]:
    """Return this machine's compiler: command words, the program as an absolute path.

    Raises NativeUnavailable.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    for words in [chosen] if chosen else [[name] for name in COMPILERS]:
        if program := shutil.which(words[0]):
            return [program, *words[1:]]
    looked_for = f"CXX = {chosen[0]}" if chosen else ", ".join(COMPILERS)
    raise NativeUnavailable(
        f"no C++ compiler was found: looked for {looked_for}; install g++ 11 or newer "
        "(Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) or name one in CXX"
    )


def _target_flags(target: InstructionSet, cpu_flags: frozenset[str], vendor: str) -> list[str]:
    if target is InstructionSet.EMULATED:
        order = list(InstructionSet)
        real = max(best_instruction_set(cpu_flags), InstructionSet.AVX512, key=order.index)
        return [*_target_flags(real, cpu_flags, vendor), "-DREMORA_TILES=2", *_QUICKLY]
    if target is InstructionSet.AMX:
        return [*_target_flags(InstructionSet.AVX512, cpu_flags, vendor), "-DREMORA_TILES=1"]
    if target is InstructionSet.PORTABLE:
        arm = "".join(_extras(_ARM_EXTRAS, cpu_flags))
        return [f"-march=armv8.2-a{arm}"] if arm else []
    if target is InstructionSet.AVX2:
        return ["-march=x86-64-v3", *_extras(_AVX2_EXTRAS, cpu_flags)]
    product = ["-DREMORA_WIDEN_BF16=1"] if vendor in _WIDENING_VENDORS else []
    extras = _extras(_AVX512_EXTRAS, cpu_flags)
    return ["-march=x86-64-v4", "-mprefer-vector-width=512", *extras, *product]


def _extras(options: dict[str, str], cpu_flags: frozenset[str]) -> list[str]:
    return [option for flag, option in options.items() if flag in cpu_flags]


def _hash(command: list[str], compiler: list[str], source_dir: Path) -> str:
    """Hash all inputs of the library; the compiler is identified by its file, not by running it."""
    digest = hashlib.sha256(platform.machine().encode())
    for word in command:
        digest.update(word.encode() + b"\0")
    # `CXX="ccache g++"` names two programs.
    for program in filter(None, map(shutil.which, compiler)):
        status = os.stat(program)
        identity = f"{os.path.realpath(program)} {status.st_mtime_ns} {status.st_size}"
        digest.update(identity.encode() + b"\0")
    digest.update(hash_sources(source_dir).encode())
    return digest.hexdigest()[:16]


def hash_sources(source_dir: Path = SOURCE_DIR) -> str:
    """Hash names and contents of the sources."""
    digest = hashlib.sha256()
    for path in sorted(source_dir.iterdir()):
        if path.suffix in {".cpp", ".h"}:
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


@contextmanager
def _only_one_process(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        # Without lock support (some network file systems) every process compiles for itself.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _compile(
    command: list[str], sources: list[Path], library: Path, target: InstructionSet
) -> None:
    logger.info("compiling the native CPU kernels for %s with %s", target, command[0])
    started = time.monotonic()
    # In a folder of its own until it is complete, so that no process loads a partial library.
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=library.parent) as name:
        folder = Path(name)
        made = {source: str(folder / f"{source.stem}.o") for source in sources}
        linked = folder / library.name
        _run_compilers(
            [[*command, "-c", str(source), "-o", made[source]] for source in sources], folder
        )
        _run_compilers([[*command, "-shared", *made.values(), "-o", str(linked)]], folder)
        if not linked.exists():
            raise NativeUnavailable(
                f"{command[0]} made no library and said nothing; name another compiler in CXX"
            )
        os.replace(linked, library)
    logger.info("compiled the native CPU kernels in %.1f s", time.monotonic() - started)


def _run_compilers(commands: list[list[str]], folder: Path) -> None:
    """Run compilers, several at once; end all of them when one fails. Raises NativeUnavailable.

    folder:  for what they say
    """
    waiting = deque(enumerate(commands))
    running = list[_Compiler]()
    at_once = min(len(os.sched_getaffinity(0)), MAX_COMPILERS)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, command = waiting.popleft()
                running.append(_Compiler(command, folder / f"{number}.txt"))
            time.sleep(0.01)
            running = [compiler for compiler in running if not compiler.has_ended()]
    finally:
        for compiler in running:
            compiler.kill()


class _Compiler:
    """A running compiler, in a process group of its own that can be killed as a whole.

    Raises NativeUnavailable where the compiler does not start.
    """

    def __init__(self, command: list[str], said: Path) -> None:
        self._program, self._said = command[0], said
        self._deadline = time.monotonic() + COMPILE_TIMEOUT_S
        with said.open("w") as stderr:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,
                )
            except OSError as error:
                raise NativeUnavailable(
                    f"{self._program} does not start: {error}; name another compiler in CXX"
                ) from error

    def has_ended(self) -> bool:
        """Return whether the compiler has done its work. Raises NativeUnavailable if it failed."""
        status = self._process.poll()
        if status is None and time.monotonic() > self._deadline:
            raise NativeUnavailable(
                f"{self._program} did not finish within {COMPILE_TIMEOUT_S:.0f} s; check the "
                "machine's load and memory and restart, or name another compiler in CXX"
            )
        if status:
            said = self._said.read_text(errors="replace")
            raise NativeUnavailable(_explain(self._program, status, said))
        return status is not None

    def kill(self) -> None:
        """End the compiler and its children if it still runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _explain(program: str, status: int, output: str) -> str:
    lines = output.splitlines()
    errors = [line for line in lines if "error" in line.lower()] or lines
    what = "; ".join(line.strip() for line in errors[:3]) or "no error message"
    if any(sign in line for sign in _AGE_SIGNS for line in errors):
        todo = "it is too old: install g++ 11 or clang++ 14 or newer, or name another one in CXX"
    else:
        todo = "name another compiler in CXX, or serve without native kernels"
    return f"{program} failed with status {status}: {what}; {todo}"
