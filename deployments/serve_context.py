"""The Serve replica of this process: its log, its names, its address, its banner and its end."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Callable, Collection

from remora.deployments.ray_private import (
    http_host,
    is_access_line,
    kv_get,
    kv_put,
    shutdown_check,
)
from remora.deployments.serve_environment import unset_warning

# Of Ray's processes: whether the driver writes the banner, without the prefix of an actor's lines.
BANNER_SWITCH = "REMORA_DRIVER_SHOWS_BANNER"
_BANNERS = b"remora-banners"  # the namespace in Ray's key-value store

log = logging.getLogger(__name__)


class ServeHost:
    """Ray Serve as the host of a replica; outside of Serve, nothing stops it."""

    echo_request_id = False  # Serve's proxy does

    def take_logs(self) -> None:
        """Send remora's log lines to Serve's handlers."""
        log_through_serve()

    def listens_locally(self) -> bool:
        """Return whether Serve listens on a loopback address."""
        return listens_locally()

    def announce(self, banner: str) -> None:
        """Log the banner, or keep it for the driver, which shows that of the first replica."""
        names = own_names() if os.environ.get(BANNER_SWITCH) == "1" else None
        if names is None:
            log.info("ready\n%s", banner)
            return
        deployment, application = names
        if banner_of(application, deployment) is None:
            kv_put(_banner_key(application, deployment), banner, namespace=_BANNERS)
        else:
            log.info("ready")

    def stop_check(self) -> Callable[[], bool] | None:
        """Return Serve's shutdown flag; None outside of Serve."""
        is_stopping = shutdown_check()
        if is_stopping is not None and (warning := unset_warning(os.environ)) is not None:
            log.warning(warning)
        return is_stopping


def banner_of(application: str, deployment: str) -> str | None:
    """Return the banner of a deployment's first replica; None before it is ready."""
    found = kv_get(_banner_key(application, deployment), namespace=_BANNERS)
    return None if found is None else found.decode()


def _banner_key(application: str, deployment: str) -> bytes:
    return f"{application}/{deployment}".encode()


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
        if record.levelno < self.level:
            return False
        # METHOD PATH STATUS TIME
        return not self.skipped or self.skipped.isdisjoint(record.getMessage().split(" ", 2)[1:2])


_access_level = _AccessLevel()


def limit_access_log(level: str | None, skipped: Collection[str] = ()) -> None:
    """Set the level of Serve's access log in this process, and paths that it leaves out.

    level:  None = Serve's own
    """
    _access_level.skipped = frozenset(skipped)
    _access_level.level = logging.NOTSET if level is None else getattr(logging, level)
    logging.getLogger("ray.serve").addFilter(_access_level)  # added only once


def own_names() -> tuple[str, str] | None:
    """Return the names of this replica's deployment and application; None outside Serve."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        context = serve.get_replica_context()
    except RayServeException:
        return None
    return context.deployment, context.app_name


def listens_locally() -> bool:
    """Return whether only this machine can reach the HTTP server; False outside Serve.

    The peer of a connection is Serve's proxy, not the client, so the address that Serve listens on
    decides; proxies and replicas share it.
    """
    return own_names() is not None and is_loopback(http_host())


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
