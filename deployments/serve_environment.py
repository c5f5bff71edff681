"""The environment variables of Ray and Serve, which read them when they are first imported.

`remora serve` sets them (WITHOUT_TRACEBACKS unless it is verbose); with `serve run` the operator
sets them before Ray starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ERRORS = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
_THREAD = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"
_PROXY = "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"
_NICE = "RAY_worker_niceness"

# Defaults: no usage statistics; token authentication (a file in ~/.ray), as Ray's ports listen on
# every interface and run code for any client; Serve's own errors in JSON; requests in the loop that
# writes to the sockets, as passing each event to another thread is its largest cost; a dead
# proxy replaced after three failed checks, 0.25 s apart instead of 10 s (one that does not answer
# has 10 s for each, whatever the period); and workers with the priority of other processes (Ray's
# default is 15), as an engine thread that is preempted holds up its team.
ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        _ERRORS: "remora.deployments.http.core.serve_proxy:middlewares",
        _THREAD: "0",
        _PROXY: "0.25",
        _NICE: "0",
    }
)
_WITHOUT = {
    _ERRORS: "errors of Serve's own proxy are plain text, and trailers count as headers",
    _THREAD: "tokens pass through another thread",
    _PROXY: "a dead proxy goes unnoticed for half a minute",
    _NICE: "engines yield their cores to other processes",
}

# Lines that Ray does not copy from the logs of its processes to the terminal: of a Python traceback
# all but the errors themselves. A frame is `File "x", line 1, in f`, below it the code by at least
# four spaces; Ray's own messages hold a whole traceback each.
_TRACEBACK = (
    r"Traceback \(most recent call last\):",
    r'^[\s|]*File ".+", line \d+, in ',
    r"^( {4}(?! *[|+])| +\| {3}| +\+-)",  # | and + are of groups of errors
    r"^[\s|]*(The above exception was the direct cause|During handling of the above exception)",
    r"^(\x1b\[\d+m)?ray::\S+\(\)(\x1b\[\d+m)? \(pid=\d+",
    r"^\s*$",
)
# Lines of Serve about its parts that start, without a meaning for the operator of one machine.
_OF_SERVE = (
    r" -- Allocated port \d+ for RequestProtocol",
    r" -- Calling user-provided callback from import path 'remora\.",
    r" -- (Successfully started RequestProtocol\.HTTP|Started HTTP) server on port",
    r" -- HTTPOptions\.host='(127\.|localhost|::1).* won't accept connections from HAProxy",
)
WITHOUT_TRACEBACKS: Mapping[str, str] = MappingProxyType(
    {"RAY_DEDUP_LOGS_SKIP_REGEX": "|".join((*_TRACEBACK, *_OF_SERVE))}
)
# Makes Ray write the lines of its processes without colours.
PLAIN_PREFIXES = ("RAY_COLOR_PREFIX", "0")


def unset_warning(environment: Mapping[str, str]) -> str | None:
    """Return a warning about the variables that are not set; None if all are."""
    missing = [
        f"{name}={ENVIRONMENT[name]} ({why})"
        for name, why in _WITHOUT.items()
        if name not in environment
    ]
    if not missing:
        return None
    return f"Ray was started without {', '.join(missing)}; `remora serve` sets these"
