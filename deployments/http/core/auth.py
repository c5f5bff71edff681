"""Access: every route needs a key unless it is in OPEN_PATHS.

Keys are compared by their SHA-256 digests, all of them each time and in constant time, so response
times reveal nothing of a key. Routes for the operator only have `dependencies=ADMIN`. Without an
admin key they answer only if the server listens on this machine alone: then the holder of an
ordinary key is the operator or, if no key is set, any local program except a page in a browser.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from typing import Self
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from remora.configs.secrets import read_keys
from remora.configs.sections.api import ApiSection
from remora.deployments.http.core.wire import route_path

OPEN_PATHS = frozenset({"/health", "/healthz", "/ready", "/health_generate", "/metrics"})


class Role(IntEnum):
    """What a caller may do; each includes what those before it may."""

    STRANGER = 0
    CALLER = 1
    OPERATOR = 2


class Keys:
    """Some keys, as digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def hold(self, key: bytes) -> bool:
        """Return whether this is one of them."""
        digest, is_held = _digest(key), False
        for known in self._digests:
            is_held |= hmac.compare_digest(known, digest)
        return is_held


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may do what.

    keys, admin_keys:  None = none are asked for, or there are none
    is_local:          whether only this machine can reach the server
    """

    keys: Keys | None = None
    admin_keys: Keys | None = None
    is_local: bool = False

    @classmethod
    def of(cls, api: ApiSection, *, is_local: bool) -> Self:
        """Read the keys that the configuration names. Raises ConfigError."""

        def keys(reference: str | None, key: str) -> Keys | None:
            return None if reference is None else Keys(read_keys(reference, key))

        return cls(
            keys=keys(api.api_key, "api.api_key"),
            admin_keys=keys(api.admin_api_key, "api.admin_api_key"),
            is_local=is_local,
        )

    def role(self, headers: Headers) -> Role:
        """Return what the sender of these headers may do."""
        given = _given_keys(headers)
        if self.admin_keys is not None and any(map(self.admin_keys.hold, given)):
            return Role.OPERATOR
        if self.keys is not None and not any(map(self.keys.hold, given)):
            return Role.STRANGER
        return Role.OPERATOR if self.admin_keys is None and self.is_local else Role.CALLER

    def takes_for_operator(self, headers: Headers) -> bool:
        """Return whether the sender of these headers may do what only the operator may."""
        needs_key = self.keys is not None or self.admin_keys is not None
        return self.role(headers) is Role.OPERATOR and (needs_key or not _is_of_a_page(headers))

    def owner(self, headers: Headers) -> str:
        """Return a name of the key in these headers; "" where no keys are set."""
        held = [
            key for key in _given_keys(headers) if self.keys is not None and self.keys.hold(key)
        ]
        return _digest(held[0]).hex()[:32] if held else ""

    def viewer(self, headers: Headers) -> str | None:
        """Return whose things the sender may see; None = everybody's."""
        is_admin = self.admin_keys is not None and any(
            map(self.admin_keys.hold, _given_keys(headers))
        )
        return None if self.keys is None or is_admin else self.owner(headers)

    def refusal(self, headers: Headers) -> HTTPException:
        """Return why a caller may not do what only the operator may."""
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
    """Return the keys sent, in OpenAI's way and in Anthropic's."""
    given = [value.encode("latin-1") for value in headers.getlist("x-api-key")]
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            given.append(key.strip().encode("latin-1"))
    return given


def _is_of_a_page(headers: Headers) -> bool:
    """Whether a browser may have sent these headers for a web page from elsewhere.

    Such a page is known by its origin, or, once its own name means this machine, by that name.
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
    """Return the error of a key that is missing or wrong."""
    how = "Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
    return HTTPException(401, f"{message} {how}", {"www-authenticate": "Bearer"})


class Gate:
    """ASGI middleware that refuses callers without a key. `Edge` answers its errors.

    access:  who may do what at the moment
    """

    def __init__(self, app: ASGIApp, *, access: Callable[[], Access]) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] == "http":
            headers, access = Headers(scope=scope), self._access()
            role = access.role(headers)
            if role is Role.STRANGER and route_path(scope) not in OPEN_PATHS:
                found = "is not one of this server's" if _given_keys(headers) else "is missing"
                raise unauthorized(f"The API key {found}.")
            state = scope.setdefault("state", {})
            state.update(access=access, owner=access.owner(headers))
        await self._app(scope, receive, send)


async def require_operator(request: Request) -> None:
    """Raise HTTPException 401 or 403 unless the caller is the operator."""
    access: Access = request.state.access
    if not access.takes_for_operator(request.headers):
        raise access.refusal(request.headers)


def viewer(request: Request) -> str | None:
    """Return the owner of what the caller may see; None = of everything."""
    access: Access = request.state.access
    return access.viewer(request.headers)


ADMIN = [Depends(require_operator)]
