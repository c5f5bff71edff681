"""Facts about the machine, its software and its load, from /proc and git.

Knows no torch and no Ray.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from remora.configs.machine import read_machine_facts

PACKAGES = ("remora", "torch", "ray", "transformers", "numpy")
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
        "cores": str(facts.num_cores),
        "features": ", ".join(facts.cpu_features),
        "memory": f"{facts.total_bytes / 2**30:.1f} GiB",
        "system": platform.platform(),
    }


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
    """Return the busy seconds of all processors since boot; 0 if unknown."""
    try:
        fields = (_PROC / "stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, interrupt, soft, stolen = map(int, fields)
    return (user + nice + system + interrupt + soft + stolen) / os.sysconf("SC_CLK_TCK")


def peak_memory(pid: int) -> PeakMemory | None:
    """Return the peak of a process and all its descendants; None if unknown."""
    peaks = [peak for member in _family(pid) if (peak := _peak_bytes(member)) is not None]
    return PeakMemory(largest_bytes=max(peaks), sum_bytes=sum(peaks)) if peaks else None


def forget_peak_memory() -> None:
    """Reset the peak of this process."""
    with suppress(OSError):  # only on Linux, and not in every container
        (_PROC / "self" / "clear_refs").write_text("5")


def _family(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*"):
        children.setdefault(_stat(int(entry.name))[1], []).append(int(entry.name))
    family = [pid]
    for member in family:  # grows during the iteration
        family += children.get(member, [])
    return family


def _stat(pid: int) -> tuple[str, int]:
    """Return (command, parent) of a process; ("", 0) if it has ended."""
    try:
        before, _, after = (_PROC / str(pid) / "stat").read_text().rpartition(")")
    except OSError:
        return "", 0
    return before.partition("(")[2], int(after.split()[1])


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
    sockets = _listening_sockets(port)
    for entry in _PROC.glob("[0-9]*"):
        if sockets & _open_sockets(entry):
            pid = int(entry.name)
            parent = _stat(pid)[1]
            return parent if _stat(parent)[0] == "raylet" else pid
    return None


def _listening_sockets(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found


def _open_sockets(process: Path) -> set[str]:
    found: set[str] = set()
    with suppress(OSError):  # no permission, or the process has ended
        for link in (process / "fd").iterdir():
            with suppress(OSError):  # closed in the meantime
                found.add(str(link.readlink()))
    return found
