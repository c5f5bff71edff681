"""Resources of processes, to check that none are left after their end.

Call `belongings(pids)` while the processes run (several results can be joined with `|`), stop them,
and call `left()`. For resources of Ray, compare `in_ray()` before and after. Both ignore resources
of other processes and clusters on the machine.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

SHARED_MEMORY = "/dev/shm/"
# Ray leaves the sockets of a session in its log folder, and one of its dashboard in TMPDIR.
_RAYS_OWN = ("/ray/session_", "/pymp-")


@dataclass(frozen=True, slots=True)
class Belongings:
    """Resources of processes at one time.

    processes:  (pid, start time, command line)
    files:      shared memory files, and Unix sockets
    ports:      listening TCP ports
    """

    processes: frozenset[tuple[int, float, str]] = frozenset()
    files: frozenset[str] = frozenset()
    ports: frozenset[int] = frozenset()

    def __or__(self, other: Belongings) -> Belongings:
        return Belongings(
            self.processes | other.processes, self.files | other.files, self.ports | other.ports
        )

    def left(self) -> list[str]:
        """Return descriptions of the resources that still exist."""
        processes = [f"process {pid} {name}" for pid, at, name in self.processes if _runs(pid, at)]
        files = [f"file {path}" for path in self.files if os.path.exists(path)]
        ports = [f"port {port}" for port in self.ports if _is_listened_on(port)]
        return sorted(processes + files + ports)


def belongings(pids: Iterable[int]) -> Belongings:
    """Return the current resources of these processes and their descendants."""
    found = Belongings()
    for process in _family(pids):
        with suppress(psutil.Error, OSError):
            found |= _of(process)
    return found


def in_ray() -> frozenset[str]:
    """Return descriptions of live actors and placement groups in the connected cluster."""
    import ray
    from ray.util import placement_group_table

    living = {
        f"actor {actor['ActorClassName']} {actor['Name']} {actor['ActorID']}"
        for actor in ray._private.state.actors().values()
        if actor["State"] != "DEAD"
    }
    groups = placement_group_table().values()
    held = {
        f"placement group {group['name']} {group['placement_group_id']}"
        for group in groups
        if group["state"] != "REMOVED"
    }
    return frozenset(living | held)


def until_gone(left: Callable[[], Iterable[str]], timeout_s: float = 20.0) -> list[str]:
    """Wait until nothing is left; return what is left after the timeout."""
    deadline = time.monotonic() + timeout_s
    while (names := sorted(left())) and time.monotonic() < deadline:
        time.sleep(0.1)
    return names


def _family(pids: Iterable[int]) -> list[psutil.Process]:
    family: dict[int, psutil.Process] = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            family |= {p.pid: p for p in (process, *process.children(recursive=True))}
    return list(family.values())


def _of(process: psutil.Process) -> Belongings:
    # Ray keeps idle workers.
    command = " ".join(process.cmdline()).strip()[:120] or process.name()
    own = (
        () if command.startswith("ray::IDLE") else ((process.pid, process.create_time(), command),)
    )
    connections = process.net_connections(kind="all")
    listening = [c for c in connections if c.status == psutil.CONN_LISTEN]
    sockets = {c.laddr for c in connections if c.family == socket.AF_UNIX and c.laddr}
    mapped = {m.path for m in process.memory_maps(grouped=True)} | _open_files(process.pid)
    files = {path for path in mapped if path.startswith(SHARED_MEMORY)} | sockets
    return Belongings(
        frozenset(own),
        frozenset(path for path in files if not _is_rays_own(path) and os.path.exists(path)),
        frozenset(c.laddr.port for c in listening),
    )


def _is_rays_own(path: str) -> bool:
    return any(part in path for part in _RAYS_OWN)


def _open_files(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.add(os.readlink(entry))
    return found


def _runs(pid: int, began: float) -> bool:
    try:
        process = psutil.Process(pid)
        return bool(process.create_time() == began and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_listened_on(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
