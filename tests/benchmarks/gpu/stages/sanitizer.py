"""Every kernel on tiny inputs under compute-sanitizer: stray accesses, races, barriers.

torch's cache of memory is off, so that an access beyond a tensor is one beyond an allocation. The
first run, without a checker, compiles the kernels. Without compute-sanitizer only that one runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.benchmarks.gpu.case import Case
from tests.benchmarks.gpu.rows import Row
from tests.benchmarks.gpu.setting import Setting

PROGRAM = Path(__file__).parents[1] / "tiny_kernels.py"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
CASE_S = 100.0


def cases(setting: Setting) -> Iterator[Case]:
    about = Row(model="", what="tiny kernels without a checker")
    yield Case(about, partial(run, about, [], setting), CASE_S)
    for tool in TOOLS:
        about = Row(model="", what=f"compute-sanitizer {tool}", is_headline=True)
        yield Case(about, partial(check, about, tool, setting), CASE_S)


def check(about: Row, tool: str, setting: Setting) -> Iterator[Row]:
    """Run the kernels under a checker."""
    checker = shutil.which("compute-sanitizer")
    if checker is None or setting.is_tiny:
        yield Row(model="", what=f"{about.what}: not run, it or a GPU is missing")
        return
    yield from run(about, [checker, "--tool", tool], setting)


def run(about: Row, prefix: list[str], setting: Setting) -> Iterator[Row]:
    """Run the kernels in a process of their own; yield how many errors were found."""
    log = Path(setting.work, f"{about.what.replace(' ', '-')}.txt")
    with log.open("w") as file:
        done = subprocess.run(
            [*prefix, sys.executable, str(PROGRAM), setting.device],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            check=False,
        )
    text = log.read_text(errors="replace")
    errors = re.findall(r"(\d+) errors?\b", text)
    if done.returncode != 0 and not errors:
        last = text.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
        raise RuntimeError(last[0][:200])
    row = about.found(int(errors[-1]) if errors else 0, "errors")
    # torch's own kernels read memory that was never written, and hide nothing by it.
    yield row if "initcheck" in about.what else row.asking_at_most(0)
