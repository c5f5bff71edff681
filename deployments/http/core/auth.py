"""API keys and roles: every route needs a key unless it is in OPEN_PATHS.

A key is compared with the SHA-256 digest of every known key, in constant time, so response times
reveal nothing about the keys. Routes for the operator only have `dependencies=ADMIN`. Without an
admin key these routes answer only if the server listens on this machine alone: the holder of an
ordinary key then counts as the operator, as does, if no key is set, any local program except a
page in a browser.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256
from typing import Any, Self
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from remora.configs.schema import ServeConfig
from remora.configs.secrets import read_callers_keys, read_keys
from remora.configs.sections.limits import UNNAMED
from remora.deployments.http.core.wire import route_path
from remora.deployments.http.core.wire_formats import OPENAI, Dialect

PING = "/ping"  # Amazon SageMaker's health check
# RTP-LLM's health checks.
RTP_PROBES = (
    "/status",
    "/health_check",
    "/frontend_health",
    "/GraphService/cm2_status",
    "/SearchService/cm2_status",
)
_ALSO_POST = frozenset({PING, *RTP_PROBES})
OPEN_PATHS = frozenset(
    {
        "/health",
        "/healthz",
        "/ready",
        "/liveness",
        "/readiness",
        "/health_generate",
        "/metrics",
        PING,
        *RTP_PROBES,
    }
)


def open_methods(path: str) -> tuple[str, ...]:
    """Return the methods of one of OPEN_PATHS."""
    return ("GET", "HEAD", "POST") if path in _ALSO_POST else ("GET", "HEAD")


class Role(IntEnum):
    """Role of a caller; each role includes the rights of the roles before it."""

    STRANGER = 0
    CALLER = 1
    OPERATOR = 2


class Keys:
    """A set of keys, stored as digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def hold(self, key: bytes) -> bool:
        """Return whether `key` is in the set."""
        digest, is_held = _digest(key), False
        for known in self._digests:
            is_held |= hmac.compare_digest(known, digest)
        return is_held


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The keys of a server and the rights that they give.

    keys, admin_keys:  None = no key is needed, or there is no admin key
    tenants:           the keys of each tenant, which `keys` are checked after
    is_local:          whether only this machine can reach the server
    """

    keys: Keys | None = None
    admin_keys: Keys | None = None
    is_local: bool = False
    tenants: Mapping[str, Keys] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ServeConfig, *, is_local: bool) -> Self:
        """Return the access rules of a configuration. Raises ConfigError."""
        admin, keys = config.api.admin_api_key, read_callers_keys(config)
        return cls(
            keys=Keys(key for given in keys.values() for key in given) if keys else None,
            tenants={name: Keys(given) for name, given in keys.items() if name != UNNAMED},
            admin_keys=None if admin is None else Keys(read_keys(admin, "api.admin_api_key")),
            is_local=is_local,
        )

    def role(self, headers: Headers) -> Role:
        """Return the role of the sender of these headers."""
        given = _given_keys(headers)
        if self.admin_keys is not None and any(map(self.admin_keys.hold, given)):
            return Role.OPERATOR
        if self.keys is not None and not any(map(self.keys.hold, given)):
            return Role.STRANGER
        return Role.OPERATOR if self.admin_keys is None and self.is_local else Role.CALLER

    def takes_for_operator(self, headers: Headers) -> bool:
        """Return whether the sender of these headers may use the operator's routes."""
        needs_key = self.keys is not None or self.admin_keys is not None
        return self.role(headers) is Role.OPERATOR and (needs_key or not _is_of_a_page(headers))

    def owner(self, headers: Headers) -> str:
        """Return a name for the key in these headers; "" if no keys are set."""
        held = [
            key for key in _given_keys(headers) if self.keys is not None and self.keys.hold(key)
        ]
        return _digest(held[0]).hex()[:32] if held else ""

    def tenant(self, headers: Headers) -> str:
        """Return the tenant of the key in these headers; "" if it belongs to none."""
        given = _given_keys(headers)
        held = [name for name, keys in self.tenants.items() if any(map(keys.hold, given))]
        return held[0] if held else ""

    def viewer(self, headers: Headers) -> str | None:
        """Return the owner whose objects the sender may see; None = all owners."""
        is_admin = self.admin_keys is not None and any(
            map(self.admin_keys.hold, _given_keys(headers))
        )
        return None if self.keys is None or is_admin else self.owner(headers)

    def refusal(self, headers: Headers) -> HTTPException:
        """Return the error for a caller without the operator's rights."""
        if self.role(headers) is Role.OPERATOR:
            return HTTPException(
                403,
                "This route is not for web pages of other sites, nor for names of this machine "
                "other than localhost: send the request to 127.0.0.1 from a program, or set "
                "api.admin_api_key and send that.",
            )
        if self.admin_keys is None:
            return HTTPException(
                403,
                "This route is off, since others than this machine can reach the server: set "
                "api.admin_api_key, or listen on 127.0.0.1.",
            )
        if not _given_keys(headers):
            return unauthorized("This route needs the admin key.")
        return HTTPException(403, "This route needs the admin key; yours is not it.")


def _given_keys(headers: Headers) -> list[bytes]:
    """Return the keys in the headers of OpenAI (`authorization`) and Anthropic (`x-api-key`)."""
    given = [value.encode("latin-1") for value in headers.getlist("x-api-key")]
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            given.append(key.strip().encode("latin-1"))
    return given


def _is_of_a_page(headers: Headers) -> bool:
    """Return whether a browser may have sent these headers for a page of another site.

    Such a page shows by its origin or, if its own host name resolves to this machine, by that name.
    """
    if headers.get("sec-fetch-site") == "cross-site":
        return True
    hosts = [f"//{host}" for host in headers.getlist("host")] or [""]
    return not all(map(_is_local_url, [*hosts, *headers.getlist("origin")]))


def _is_local_url(url: str) -> bool:
    try:
        name = (urlsplit(url).hostname or "").removesuffix(".")
        is_named = name == "localhost" or name.endswith(".localhost")
        return is_named or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def unauthorized(message: str) -> HTTPException:
    """Return the error for a missing or wrong key."""
    how = "Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
    return HTTPException(401, f"{message} {how}", {"www-authenticate": "Bearer"})


class Gate:
    """ASGI middleware that refuses callers without a key. `Edge` answers its errors.

    access:         returns the current access rules
    limit_headers:  returns the headers that report a tenant's limits, for a route's wire format
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Callable[[], Access],
        limit_headers: Callable[[str, Dialect], Mapping[str, str]] = lambda *_: {},
    ) -> None:
        self._app = app
        self._access = access
        self._limit_headers = limit_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] == "http":
            headers, access = Headers(scope=scope), self._access()
            role = access.role(headers)
            if role is Role.STRANGER and route_path(scope) not in OPEN_PATHS:
                found = "is not one of this server's" if _given_keys(headers) else "is missing"
                raise unauthorized(f"The API key {found}.")
            state = scope.setdefault("state", {})
            tenant = access.tenant(headers) if role is not Role.STRANGER else ""
            state.update(access=access, owner=access.owner(headers), tenant=tenant)
            if role is not Role.STRANGER and route_path(scope) not in OPEN_PATHS:
                send = self._reporting(tenant, state, send)
        await self._app(scope, receive, send)

    def _reporting(self, tenant: str, state: Mapping[str, Any], send: Send) -> Send:
        """Return a `send` that adds the state of the tenant's limits to the answer's headers."""

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                dialect = state.get("dialect", OPENAI)
                for name, value in self._limit_headers(tenant, dialect).items():
                    headers[name] = value
            await send(message)

        return send_on


async def require_operator(request: Request) -> None:
    """Raise HTTPException 401 or 403 unless the caller is the operator."""
    access: Access = request.state.access
    if not access.takes_for_operator(request.headers):
        raise access.refusal(request.headers)


def viewer(request: Request) -> str | None:
    """Return the owner whose objects the caller may see; None = all owners."""
    access: Access = request.state.access
    return access.viewer(request.headers)


ADMIN = [Depends(require_operator)]
