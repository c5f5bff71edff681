"""Other launches in the place of those in the tables: which is fastest, as data.

Each entry's alternatives are timed on the case that uses it, the most alike first, for as long as
the entry's time lasts. A launch whose result differs from the present one's by more than the
tolerance is not taken. Writes `launches.json`: for each entry what it is, and what was faster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remora.kernels.gpu.arch import arch_of
from tests.benchmarks.gpu.case import Case
from tests.benchmarks.gpu.interpreted import interpret_on_cpu
from tests.benchmarks.gpu.launch_tables import Entry, entries
from tests.benchmarks.gpu.results import write
from tests.benchmarks.gpu.rows import Row
from tests.benchmarks.gpu.setting import Setting
from tests.benchmarks.gpu.timing import Call, replayed_s

TOLERANCE = 3e-2
ENTRY_S, TINY_TRIES = 18.0, 1


def cases(setting: Setting) -> Iterator[Case]:
    if setting.is_tiny:
        interpret_on_cpu()
    for entry in entries(tiny=setting.is_tiny):
        about = Row(model=entry.case.model, what=entry.name, is_headline=True)
        yield Case(about, partial(sweep, about, entry, setting), 3 * ENTRY_S)


def sweep(about: Row, entry: Entry, setting: Setting) -> Iterator[Row]:
    """Time what the table holds, and as many others as the time allows."""
    arch = arch_of(setting.torch_device)
    torch.manual_seed(0)
    calls = (
        [entry.case.make(setting.torch_device, setting.dtype)]
        if setting.is_tiny
        else entry.case.calls(setting.torch_device, setting.dtype)
    )
    present, present_s = calls[0].computed().clone(), seconds_of(calls, setting)
    tried: list[dict[str, Any]] = []
    best, best_s = entry.launch(arch), present_s
    until = time.monotonic() + ENTRY_S
    for number, launch in enumerate(entry.others(arch)):
        if time.monotonic() > until or (setting.is_tiny and number >= TINY_TRIES):
            break
        with entry.replaced(arch, launch):
            seconds, failure = attempt(calls, present, setting)
        tried.append({"launch": asdict(launch), "us": seconds * 1e6, "failure": failure})
        if not failure and seconds < best_s:
            best, best_s = launch, seconds
    found = {
        "entry": entry.name,
        "arch": arch.value,
        "case": f"{entry.case.kernel} {entry.case.shape}",
        "present": asdict(entry.launch(arch)),
        "present_us": present_s * 1e6,
        "best": asdict(best),
        "best_us": best_s * 1e6,
        "tried": tried,
    }
    keep(Path(setting.work, "launches.json"), found)
    details = {"best": asdict(best), "tried": len(tried)}
    yield about.found(present_s / best_s, "times", details=details)


def attempt(calls: list[Call], present: Tensor, setting: Setting) -> tuple[float, str]:
    """Return the seconds of a launch, and why it cannot be taken."""
    try:
        result = calls[0].computed()
        error = (result.float() - present.float()).abs().max()
        if not error <= TOLERANCE * (1 + present.float().abs().max()):
            return 0.0, f"differs by {float(error):.3g}"
        return seconds_of(calls, setting), ""
    except Exception as error:  # too much shared memory, say
        return 0.0, f"{type(error).__name__}: {error}"[:200]


def seconds_of(calls: list[Call], setting: Setting) -> float:
    if not setting.is_tiny:
        return replayed_s([call.run for call in calls])
    started = time.perf_counter()
    calls[0].run()
    return time.perf_counter() - started


def keep(path: Path, found: dict[str, Any]) -> None:
    """Add to the file what was found; of an entry that was tried before, replace it."""
    known = json.loads(path.read_text()) if path.exists() else []
    known = [
        each for each in known if (each["entry"], each["case"]) != (found["entry"], found["case"])
    ]
    write(path, json.dumps([*known, found], indent=1).encode())
