"""What Ray and Serve are to find in their environment. They read it when they are first imported.

`remora serve` sets it; with `serve run` it is the operator's to set before Ray starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ERRORS = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
_THREAD = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"
_PROXY = "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"

# When the user has said nothing: no phoning home, Serve's own errors in our shape, token
# authentication (a file in ~/.ray), since Ray's ports listen on every interface and whoever may
# talk to them may run code, and our handlers in the loop that writes to the sockets, since passing
# each event on to another thread costs more than all else about it. A dead proxy is replaced after
# three failed checks, which take half a minute if nothing else is said.
ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        _ERRORS: "remora.deployments.http.core.serve_proxy:middlewares",
        _THREAD: "0",
        _PROXY: "1",
    }
)
_WITHOUT = {
    _ERRORS: "errors that Serve's proxy itself makes are plain text",
    _THREAD: "tokens take a detour through another thread",
    _PROXY: "a dead proxy is missed for half a minute",
}


def without(environment: Mapping[str, str]) -> str | None:
    """Say what is worse for what is not set there; None if nothing is."""
    missing = [
        f"{name}={ENVIRONMENT[name]} ({why})"
        for name, why in _WITHOUT.items()
        if name not in environment
    ]
    if not missing:
        return None
    return f"Ray was started without {', '.join(missing)}; `remora serve` sets these"
