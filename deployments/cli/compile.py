"""`remora compile`: compile the native CPU kernels ahead of the first start, or for a wheel."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from remora.configs.environment import cache_dir
from remora.deployments.cli.terminal import Failure, answer
from remora.kernels.cpu.build import NativeUnavailable, build_library, hash_sources
from remora.kernels.cpu.prebuilt import VARIANTS, Variant, find_compiler_for

KERNELS = "kernels"  # the folder of compiled libraries in the cache


def compile_kernels(
    into: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Compile for all kinds of CPUs instead, into FOLDER."),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With --into: only this kind of CPU; repeatable."),
    ] = None,
) -> None:
    """Compile the native CPU kernels for this machine, unless they are in the cache."""
    started = time.perf_counter()
    try:
        made = build_library(cache_dir() / KERNELS) if into is None else _fill(into, variant)
    except NativeUnavailable as reason:
        raise Failure(f"cannot build the native kernels: {reason}") from reason
    answer(f"{made} ({time.perf_counter() - started:.1f} s)")


def _fill(folder: Path, names: list[str] | None) -> Path:
    """Compile the named variants, or all, into `folder`; return it.

    Architectures without a compiler are left out and named.
    """
    compilers, variants = {}, _named(names)
    for machine in dict.fromkeys(variant.machine for variant in variants):
        try:
            compilers[machine] = find_compiler_for(machine)
        except NativeUnavailable as reason:
            answer(f"nothing for {machine}: {reason}")
    variants = [variant for variant in variants if variant.machine in compilers]
    if not variants:
        raise NativeUnavailable("no compiler was found")
    folder.mkdir(parents=True, exist_ok=True)
    sources, cache = hash_sources(), cache_dir() / KERNELS
    for variant in variants:
        library = variant.compile(cache, compilers[variant.machine])
        shutil.copyfile(library, folder / variant.file_name(sources))
        answer(f"{variant.machine} {variant.name}")
    return folder


def _named(names: list[str] | None) -> list[Variant]:
    known = {variant.name: variant for variant in VARIANTS}
    if unknown := sorted({*(names or ())} - {*known}):
        raise Failure(f"unknown variants {', '.join(unknown)}; allowed are {', '.join(known)}")
    return [known[name] for name in names or known]
