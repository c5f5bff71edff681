"""Ports for a program that will listen later, where a port of the system's choice would not do.

The system gives port 0 and outgoing connections numbers of one range, so a port that it chose may
be taken by any connection before the program listens. The ports here lie outside that range, unless
the system is set to another one.
"""

from __future__ import annotations

import random
import socket
from itertools import islice

# Above the ports of Ray's workers; below those of replicas and of outgoing connections.
_PORTS = range(20_000, 30_000)


def free_ports(num_ports: int) -> list[int]:
    """Return different random ports that nothing on this machine listens on."""
    candidates = random.sample(_PORTS, len(_PORTS))
    return list(islice(filter(_is_free, candidates), num_ports))


def free_port() -> int:
    """Return a random port that nothing on this machine listens on."""
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
