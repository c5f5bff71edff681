"""The Serve replica of this process: its log and its address."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Collection

from remora.deployments.ray_private import http_host, is_access_line


def log_through_serve() -> None:
    """Send remora's log lines to Serve's handlers: the replica's file and the terminal."""
    ours, serves = logging.getLogger("remora"), logging.getLogger("ray.serve")
    ours.setLevel(serves.level or logging.INFO)
    ours.handlers = list(serves.handlers)


class _AccessLevel(logging.Filter):
    """Drops Serve's access lines below a level, and of some paths."""

    level = logging.NOTSET
    skipped: frozenset[str] = frozenset()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record."""
        if not is_access_line(record):
            return True
        path = record.getMessage().split(" ", 2)[1:2]  # METHOD PATH STATUS TIME
        return record.levelno >= self.level and self.skipped.isdisjoint(path)


_access_level = _AccessLevel()


def limit_access_log(level: str | None, skipped: Collection[str] = ()) -> None:
    """Set the level of Serve's access log in this process, and paths that it leaves out.

    level:  None = Serve's own
    """
    _access_level.skipped = frozenset(skipped)
    _access_level.level = logging.NOTSET if level is None else getattr(logging, level)
    logging.getLogger("ray.serve").addFilter(_access_level)  # added only once


def listens_locally() -> bool:
    """Return whether only this machine can reach the HTTP server; False outside Serve.

    The peer of a connection is Serve's proxy, not the client, so the address that Serve listens on
    decides; proxies and replicas share it.
    """
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    host = http_host()
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
