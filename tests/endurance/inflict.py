"""Do faults to processes of a server. Linux only; needs to be the processes' user."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import psutil  # type: ignore[import-untyped]

from tests.deployments.lifecycle.server import kill

_PIDFD_GETFD = 438
_LIBC = ctypes.CDLL(None, use_errno=True)


@asynccontextmanager
async def stopped(pid: int, seconds: float) -> AsyncIterator[None]:
    """Stop a process; let it continue after some time, or at the end of the block if earlier."""
    kill(pid, signal.SIGSTOP)

    async def resume() -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            kill(pid, signal.SIGCONT)

    task = asyncio.create_task(resume())
    try:
        yield
    finally:
        await task


@asynccontextmanager
async def limited(pid: int, kind: int, value: int) -> AsyncIterator[None]:
    """Lower the soft limit of a resource of a process within the block."""
    try:
        before = resource.prlimit(pid, kind)
        resource.prlimit(pid, kind, (value, before[1]))
    except ProcessLookupError:
        yield
        return
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, kind, before)


def num_descriptors(pid: int) -> int:
    """Return one more than the highest descriptor of a process: a limit that is reached."""
    return max(int(name) for name in os.listdir(f"/proc/{pid}/fd")) + 1


def sever(pid: int, family: frozenset[int]) -> int:
    """Shut down the sockets between a process and others of `family`; return how many.

    Sockets to Ray's own processes are left alone: they are in no family. Behind Serve's Python
    proxy requests pass through the connections of Ray's workers to one another.
    """
    return sum(_shut(pid, descriptor) for descriptor in sorted(_sockets_to(pid, family)))


def _sockets_to(pid: int, family: frozenset[int]) -> set[int]:
    mine = _established(pid)
    peers = [found for other in family - {pid} for found in _established(other)]
    ends = {_ends(found.raddr, found.laddr) for found in peers if found.raddr}
    found = {own.fd for own in mine if own.raddr and _ends(own.laddr, own.raddr) in ends}
    # Of two Unix sockets only one has an address: that of a listener in the family.
    unix = socket.AF_UNIX
    return found | {own.fd for own in mine if own.family == unix and _is_remoras(own.laddr)}


def _ends(one: object, other: object) -> tuple[object, object]:
    """Return both addresses of a connection; gRPC's sockets write those of IPv4 as IPv6."""
    plain = (
        (address[0].removeprefix("::ffff:"), address[1]) if isinstance(address, tuple) else address
        for address in (one, other)
    )
    return next(plain), next(plain)


def _is_remoras(address: object) -> bool:
    return isinstance(address, str) and "remora" in address


def _established(pid: int) -> list[psutil._common.pconn]:
    with suppress(psutil.Error, OSError):
        connections = psutil.Process(pid).net_connections(kind="all")
        return [found for found in connections if found.status != psutil.CONN_LISTEN]
    return []


def _shut(pid: int, descriptor: int) -> bool:
    with suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            copy = _LIBC.syscall(_PIDFD_GETFD, process, descriptor, 0)
        finally:
            os.close(process)
        if copy >= 0:
            with socket.socket(fileno=copy) as taken:
                if taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return False
                taken.shutdown(socket.SHUT_RDWR)
                return True
    return False
