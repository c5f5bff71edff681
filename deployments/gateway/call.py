"""What a gateway hands to a replica with each request. Pickled once per request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from remora.configs.errors import RemoraError, Unavailable
from remora.deployments.http.generation.resumption import Begun

# Of an ASGI scope: what is plain data and belongs to the request.
_SCOPE_KEYS = (
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
    "server",
)
_REQUEST_ID = b"x-request-id"


class Unreachable(RemoraError):
    """The replica is on another machine than the gateway, which listens on its own only."""


class NoWayBack(Unavailable):
    """The gateway did not take a replica's connection; another replica may have more luck."""

    def __init__(self, replica: str) -> None:
        super().__init__(f"The replica {replica} cannot reach the gateway. Please try again.")
        self.replica = replica

    def __reduce__(self) -> tuple[type[NoWayBack], tuple[str]]:
        """Pickle what it is made from."""
        return NoWayBack, (self.replica,)


class BrokenOff(RemoraError):
    """An answer has no end, although its replica lives: a bug, or a client that took nothing."""


class CannotContinue(RemoraError):
    """An answer that another replica had begun came out differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a gateway takes answers.

    node_id:  Ray's id of its machine
    path:     of a Unix socket there
    tcp:      host and port for other machines; None = it does not listen for them yet
    """

    node_id: str
    path: str
    tcp: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, and where its answer is to go.

    scope:   the plain part of its ASGI scope
    secret:  proves to the gateway that an answer is this call's
    begun:   set when the answer may have to go on elsewhere, or has begun elsewhere
    """

    scope: Mapping[str, Any]
    body: bytes
    address: Address
    secret: bytes
    begun: Begun | None = None


def plain_scope(scope: Scope, request_id: str) -> Mapping[str, Any]:
    """Return the part of a scope that can be passed on, with the request's id among its headers."""
    plain = {key: scope[key] for key in _SCOPE_KEYS if key in scope}
    headers = [(name, value) for name, value in scope["headers"] if name != _REQUEST_ID]
    return plain | {"headers": [*headers, (_REQUEST_ID, request_id.encode("latin-1"))]}
