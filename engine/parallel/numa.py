"""Binds a rank's process to the CPUs of a NUMA node."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from remora.configs.errors import ConfigError

NODES = Path("/sys/devices/system/node")
_THREADS = Path("/proc/self/task")


def bind_rank(nodes: tuple[int, ...], rank: int) -> None:
    """Bind all threads of this process to the node of a rank; without nodes, do nothing.

    The kernel then allocates memory on that node where it has room. Threads that start later
    inherit the binding.

    nodes:  of each rank, as in parallel.numa_nodes
    Raises ConfigError if the node does not exist or has no CPU that this process may use.
    """
    if not nodes:
        return
    node = nodes[rank]
    file = NODES / f"node{node}" / "cpulist"
    try:
        listed = _parse(file.read_text(encoding="ascii"))
    except OSError:
        found = sorted(path.name.removeprefix("node") for path in NODES.glob("node[0-9]*"))
        raise ConfigError(
            f"parallel.numa_nodes: {os.uname().nodename} has no NUMA node {node} for rank {rank}; "
            f"it has {', '.join(found) or 'none'}"
        ) from None
    cpus = listed & os.sched_getaffinity(0)
    if not cpus:
        raise ConfigError(
            f"parallel.numa_nodes: rank {rank} may use no CPU of NUMA node {node} of "
            f"{os.uname().nodename}; name another node, or allow its CPUs"
        )
    for thread in _THREADS.iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cpus)


def _parse(cpulist: str) -> set[int]:
    """Return the CPUs of a list such as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, cpulist.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
