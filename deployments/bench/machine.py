"""Facts about the machine, its software, its processes and its load.

Knows no torch and no Ray.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from remora.configs.machine import read_machine_facts

PACKAGES = ("remora", "torch", "ray", "transformers", "numpy")
# Vendor, family, models and name.
MICROARCHITECTURES: tuple[tuple[str, str, Container[int], str], ...] = (
    ("AuthenticAMD", "23", range(0x30, 0xA0), "Zen 2"),
    ("AuthenticAMD", "25", (*range(0x10), *range(0x20, 0x60)), "Zen 3"),
    ("AuthenticAMD", "25", (*range(0x10, 0x20), *range(0x60, 0xB0)), "Zen 4"),
    ("AuthenticAMD", "26", range(0x100), "Zen 5"),
    ("GenuineIntel", "6", (85,), "Skylake-SP or Cascade Lake"),
    ("GenuineIntel", "6", (106, 108), "Ice Lake-SP"),
    ("GenuineIntel", "6", (143,), "Sapphire Rapids"),
    ("GenuineIntel", "6", (207,), "Emerald Rapids"),
    ("GenuineIntel", "6", (173, 174), "Granite Rapids"),
)
BUSY_SHARE = 0.1  # of one processor; an idle system uses less
_LOOK_S = 0.4
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Peak resident memory of a process and its descendants.

    largest_bytes:  the largest peak of one process
    sum_bytes:      the sum of all peaks: an upper bound, because shared pages count repeatedly
    """

    largest_bytes: int
    sum_bytes: int

    def figures(self) -> dict[str, float]:
        """Return both as figures."""
        return {
            "peak_rss_mib": self.largest_bytes / 2**20,
            "peak_rss_sum_mib": self.sum_bytes / 2**20,
        }


def describe_machine() -> dict[str, str]:
    """Return the facts of the machine by name."""
    facts = read_machine_facts()
    return {
        "processor": facts.cpu_name,
        "microarchitecture": microarchitecture(),
        "cores": str(facts.num_cores),
        "features": ", ".join(facts.cpu_features),
        "memory": f"{facts.total_bytes / 2**30:.1f} GiB",
        "system": platform.platform(),
    }


def microarchitecture(cpuinfo: str | None = None) -> str:
    """Return the name of the processor's microarchitecture, or its numbers; empty if unknown.

    Virtual machines often hide the processor's name, not its numbers.

    cpuinfo:  content of /proc/cpuinfo; None = this machine's
    """
    if cpuinfo is None:
        try:
            cpuinfo = (_PROC / "cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    fields: dict[str, str] = {}
    for name, _, value in lines:
        fields.setdefault(name.strip(), value.strip())
    if "vendor_id" not in fields:
        part = fields.get("CPU part")
        return f"{fields.get('CPU implementer', 'Arm')} part {part}" if part else ""
    vendor, family, model = (fields.get(name, "") for name in ("vendor_id", "cpu family", "model"))
    for known, known_family, models, name in MICROARCHITECTURES:
        if (known, known_family) == (vendor, family) and model.isdigit() and int(model) in models:
            return name
    return f"{vendor} family {family} model {model}"


def describe_software() -> dict[str, str]:
    """Return the versions of Python and the packages, and the git revision."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    revision = _git("rev-parse", "--short=12", "HEAD")
    if revision:
        changed = _git("status", "--porcelain", "--untracked-files=no")
        versions["revision"] = f"{revision} with changes" if changed else revision
    return versions


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def busy_warning() -> str | None:
    """Return a warning if other processes use the processors; None if they are idle."""
    busy, own, started = _busy_s(), _own_s(), time.perf_counter()
    time.sleep(_LOOK_S)
    others = (_busy_s() - busy) - (_own_s() - own)
    share = others / (time.perf_counter() - started)
    if share < BUSY_SHARE:
        return None
    load = os.getloadavg()[0]
    return (
        f"other processes use {share:.1f} of {os.cpu_count()} processors (load {load:.1f}): "
        "figures are low and vary; use `remora bench compare` for ratios under load"
    )


def _own_s() -> float:
    return sum(os.times()[:4])


def _busy_s() -> float:
    """Return the busy seconds of all processors since boot."""
    times = psutil.cpu_times()._asdict()
    busy = ("user", "nice", "system", "irq", "softirq", "steal")
    return float(sum(times.get(kind, 0.0) for kind in busy))


def peak_memory(pid: int) -> PeakMemory | None:
    """Return the peak of a process and all its descendants; None if unknown."""
    family = [pid]
    with suppress(psutil.Error):
        family += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    peaks = [peak for member in family if (peak := _peak_bytes(member)) is not None]
    return PeakMemory(largest_bytes=max(peaks), sum_bytes=sum(peaks)) if peaks else None


def forget_peak_memory() -> None:
    """Reset the peak of this process."""
    with suppress(OSError):  # only on Linux, and not in every container
        (_PROC / "self" / "clear_refs").write_text("5")


def _peak_bytes(pid: int) -> int | None:
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def listener_pid(port: int) -> int | None:
    """Return the process that listens on a port of this machine; None if unknown.

    For a Ray worker, return the raylet, which is an ancestor of all replicas.
    """
    with suppress(psutil.Error):
        for found in psutil.net_connections("tcp"):
            # The process of another user has no pid here.
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid:
                parent = psutil.Process(found.pid).parent()
                return int(parent.pid if parent and parent.name() == "raylet" else found.pid)
    return None
