"""What a deployment of ours must know of the Serve replica that it runs in."""

from __future__ import annotations

import ipaddress
import logging


def log_through_serve() -> None:
    """Send our log lines where Serve sends its own: the replica's file and the terminal."""
    ours, serves = logging.getLogger("remora"), logging.getLogger("ray.serve")
    ours.setLevel(serves.level or logging.INFO)
    ours.handlers = list(serves.handlers)


def listens_locally() -> bool:
    """Return whether nothing but this machine can reach the HTTP server; False outside Serve.

    The peer of a connection says nothing: between us and the client stands Serve's proxy. But
    proxies and replicas alike listen at the host that Serve was started with.
    """
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.exceptions import RayServeException

    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    host = _get_global_client().http_config.host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
