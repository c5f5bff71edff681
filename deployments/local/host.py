"""The process of a server without Ray, as the host of its only replica."""

from __future__ import annotations

import logging
from collections.abc import Callable

from remora.deployments.serve_context import is_loopback

_FORMAT = "%(levelname)s %(asctime)s %(name)s -- %(message)s"


class LocalHost:
    """A process that listens at `address`.

    show:  writes the banner
    """

    echo_request_id = True

    def __init__(self, address: str, show: Callable[[str], None]) -> None:
        self.is_stopping = False
        self._address = address
        self._show = show

    def take_logs(self) -> None:
        """Write remora's lines to standard error."""
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        ours = logging.getLogger("remora")
        ours.setLevel(logging.INFO)
        ours.handlers = [handler]
        ours.propagate = False

    def listens_locally(self) -> bool:
        """Return whether the address is a loopback address."""
        return is_loopback(self._address)

    def announce(self, banner: str) -> None:
        """Write the banner."""
        self._show(banner)

    def stop_check(self) -> Callable[[], bool]:
        """Return whether `is_stopping` is set."""
        return lambda: self.is_stopping
