"""What a deployment of ours must know of the Serve replica that it runs in."""

from __future__ import annotations

import ipaddress
import logging

from remora.deployments.ray_private import http_host, is_access_line


def log_through_serve() -> None:
    """Send our log lines where Serve sends its own: the replica's file and the terminal."""
    ours, serves = logging.getLogger("remora"), logging.getLogger("ray.serve")
    ours.setLevel(serves.level or logging.INFO)
    ours.handlers = list(serves.handlers)


class _AccessLevel(logging.Filter):
    """Lets Serve's lines about single requests pass from some level on, and all others."""

    level = logging.NOTSET

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged."""
        return record.levelno >= self.level or not is_access_line(record)


_access_level = _AccessLevel()


def limit_access_log(level: str | None) -> None:
    """Let Serve's access log in this process follow a level; None: as Serve has it."""
    _access_level.level = logging.NOTSET if level is None else getattr(logging, level)
    logging.getLogger("ray.serve").addFilter(_access_level)  # once, however often it is added


def listens_locally() -> bool:
    """Return whether nothing but this machine can reach the HTTP server; False outside Serve.

    The peer of a connection says nothing: between us and the client stands Serve's proxy. But
    proxies and replicas alike listen at the host that Serve was started with.
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
