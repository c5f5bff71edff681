"""What a replica needs of the process that it runs in: Ray Serve's, or a server without Ray.

Knows nothing of either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class ReplicaHost(Protocol):
    """The process of a replica.

    echo_request_id:  whether the replica itself returns `x-request-id`: no proxy in front does
    """

    @property
    def echo_request_id(self) -> bool:
        """See above."""
        ...

    def take_logs(self) -> None:
        """Send remora's log lines to where the host's lines go."""
        ...

    def listens_locally(self) -> bool:
        """Return whether only this machine can reach the HTTP server. May block."""
        ...

    def announce(self, banner: str) -> None:
        """Show the start-up banner: the replica is ready."""
        ...

    def stop_check(self) -> Callable[[], bool] | None:
        """Return a function that says whether the replica is being stopped; None = unknown."""
        ...
