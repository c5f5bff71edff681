"""The processes of a server by what they are, and what they use."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil  # type: ignore[import-untyped]

# By the start of the command line, or of the program's name.
KINDS: Mapping[str, str] = {
    "ray::ServeReplica:remora:LLMServer": "replica",
    "ray::ServeReplica:remora:Gateway": "gateway",
    "ray::ServeReplica:remora:RoutingService": "routing service",
    "ray::EngineWorker": "rank",
    "ray::ServeReplica:remora:LoRAManager": "manager",
    "haproxy": "haproxy",
    "ray::ProxyActor": "serve proxy",
    "ray::ServeController": "controller",
    "gcs_server": "gcs",
    "raylet": "raylet",
}
# A `remora serve` and its forks, each below the one before.
CHAIN = ("front", "supervisor", "driver")
OURS = frozenset({*CHAIN, "replica", "gateway", "routing service", "rank", "manager", "haproxy"})
OTHER = "other of ray"
_RSS_ANON = re.compile(r"^Anonymous:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process uses.

    anonymous_bytes:  memory of its own, without files (RssAnon; swapped memory is not in it)
    """

    kind: str
    pid: int
    anonymous_bytes: int
    num_descriptors: int
    num_threads: int


def kind_of(command: list[str]) -> str:
    """Return the kind of a process of Ray or Serve by its command line."""
    if not command:
        return OTHER
    program = Path(command[0].split(" ")[0]).name
    title = " ".join(command)
    for start, kind in KINDS.items():
        if title.startswith(start) or program == start:
            return kind
    return OTHER


def processes_of(front: int) -> list[tuple[int, str]]:
    """Return (pid, kind) of a `remora serve` and its descendants, the oldest first."""
    found = {front: CHAIN[0]}
    below = dict(pairwise(CHAIN))
    with suppress(psutil.Error):
        root = psutil.Process(front)
        own_command = root.cmdline()
        for process in root.children(recursive=True):
            with suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                command = process.cmdline()
                kind = below.get(found.get(process.ppid(), "")) if command == own_command else None
                found[process.pid] = kind or kind_of(command)
    return sorted(found.items())


def usages_of(front: int) -> list[Usage]:
    """Return what each process of a server uses now; without those that have just ended."""
    found = []
    for pid, kind in processes_of(front):
        with suppress(OSError, psutil.Error):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            match = _RSS_ANON.search(rollup)
            found.append(
                Usage(
                    kind,
                    pid,
                    int(match[1]) * 1024 if match else 0,
                    len(os.listdir(f"/proc/{pid}/fd")),
                    psutil.Process(pid).num_threads(),
                )
            )
    return found
