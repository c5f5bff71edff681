"""Whether this process may join the Ray cluster that it is about to join.

Without a token, Ray tries to reach a cluster that requires one for a while, and then says only that
it could not connect.
"""

from __future__ import annotations

from collections.abc import Mapping

from remora.configs.errors import ConfigError
from remora.deployments.ray_private import last_started_cluster, requires_token


def check_token(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if `ray.init` would join a cluster whose token is not to be sent.

    Does nothing once Ray is connected.
    """
    import ray

    if ray.is_initialized() or environment.get("RAY_AUTH_MODE") == "token":
        return
    address = environment.get("RAY_ADDRESS") or last_started_cluster() or ""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return  # Ray starts a cluster of its own, or is reached by its client
    if requires_token(address):
        raise ConfigError(
            f"RAY_AUTH_MODE is not set, and the Ray cluster at {address} requires a token; set "
            "RAY_AUTH_MODE=token to join it with the token in ~/.ray/auth_token, or "
            "RAY_ADDRESS=local to start another one"
        )
