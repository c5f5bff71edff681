"""The address of a server that starts: whether it is free, and how it is shown."""

from __future__ import annotations

import socket

from remora.deployments.cli.terminal import Failure


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet. Raises Failure."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        message = f"cannot listen on {host}:{port}: {reason}; choose another with --port"
        raise Failure(message) from None
    return listener


def ready_line(seconds: float, host: str, port: int, *, is_https: bool = False) -> str:
    """Return the line of a server that has started, with the addresses to try."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    shown = f"[{shown}]" if ":" in shown else shown
    return (
        f"ready in {seconds:.1f} s: {'https' if is_https else 'http'}://{shown}:{port}/v1 "
        "(OpenAI), /generate (SGLang), /docs, /metrics. Ctrl-C stops the server."
    )
