"""Clocks, power and temperature of the GPU while something runs, as nvidia-smi reads them."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FIELDS = (
    "clocks.sm",
    "clocks.mem",
    "power.draw",
    "temperature.gpu",
    "memory.used",
    "clocks_throttle_reasons.active",
)
INTERVAL_MS = 500


@contextmanager
def sampled(path: Path) -> Iterator[None]:
    """Write a line of FIELDS to `path` every half second within the block."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(FIELDS)}",
        "--format=csv,noheader,nounits",
        f"--loop-ms={INTERVAL_MS}",
    ]
    with (
        path.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL) as process,
    ):
        try:
            yield
        finally:
            process.kill()


def summarise(path: Path) -> dict[str, tuple[float, float]]:
    """Return the median and the greatest of each field that is a number."""
    if not path.exists():
        return {}
    lines = [line.split(", ") for line in path.read_text().splitlines()]
    summary = {}
    for at, name in enumerate(FIELDS[:-1]):
        values = [
            float(line[at])
            for line in lines
            if len(line) == len(FIELDS) and line[at].replace(".", "", 1).isdigit()
        ]
        if values:
            summary[name] = statistics.median(values), max(values)
    return summary
