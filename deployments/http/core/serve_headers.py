"""The headers that Ray Serve's proxies read themselves, checked before they do.

Serve decodes these headers without a check of its own: a byte that is not UTF-8 would end in a
traceback and a 503.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from remora.configs.errors import InvalidRequest
from remora.deployments.ray_private import session_header

TIMEOUT = "x-request-timeout-seconds"
_MAX_SHOWN = 40
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def _is_text(value: str) -> bool:
    return _CONTROL.search(value) is None


def _is_seconds(value: str) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


def _is_flag(value: str) -> bool:
    return value in ("?0", "?1")


_TEXT = (_is_text, "UTF-8 text without control characters")
# Named as in Serve's constants and HTTP utilities; the test of private names compares them.
RULES: Mapping[str, tuple[Callable[[str], bool], str]] = MappingProxyType(
    {
        "x-request-id": _TEXT,
        "serve_multiplexed_model_id": _TEXT,
        "traceparent": _TEXT,
        TIMEOUT: (_is_seconds, "a number of seconds; 0 or less for no limit"),
        "x-request-disconnect-disabled": (_is_flag, "?0 or ?1"),
    }
)


def check_serve_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Check a request's names of headers, and the values that Serve reads. Raises InvalidRequest.

    As in Serve, `-` and `_` are the same in a name.
    """
    rules = {_plain(name): rule for name, rule in RULES.items()}
    rules[_plain(session_header())] = _TEXT
    for raw_name, raw_value in headers:
        if not raw_name.isascii():
            raise InvalidRequest(
                f"The name of a header is {_shown(raw_name)}. Allowed: ASCII letters, digits, `-`."
            )
        name = raw_name.decode("ascii")
        rule = rules.get(_plain(name))
        if rule is None:
            continue
        is_valid, allowed = rule
        try:
            has_fault = not is_valid(raw_value.decode())
        except UnicodeDecodeError:
            has_fault = True
        if has_fault:
            message = f"The header {name} is {_shown(raw_value)}. Allowed: {allowed}."
            raise InvalidRequest(message, name)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _shown(value: bytes) -> str:
    """Return a value as ASCII text, cut if it is long."""
    text = ascii(value.decode("latin-1"))[1:-1]
    return f"`{text[:_MAX_SHOWN]}`" + (" (cut)" if len(text) > _MAX_SHOWN else "")
