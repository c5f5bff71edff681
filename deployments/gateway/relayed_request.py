"""What a gateway sends to a replica with each request. Pickled once per request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from remora.configs.errors import RemoraError, Unavailable
from remora.deployments.http.generation.resumption import Begun

# Entries of an ASGI scope that are plain data and belong to the request.
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


class TcpNeeded(RemoraError):
    """The replica is on another machine, and the gateway does not listen on TCP yet."""


class GatewayUnreachable(Unavailable):
    """A replica cannot connect to the gateway; another replica may."""

    def __init__(self, replica: str) -> None:
        super().__init__(f"The replica {replica} cannot reach the gateway. Please try again.")
        self.replica = replica

    def __reduce__(self) -> tuple[type[GatewayUnreachable], tuple[str]]:
        """Pickle the constructor's argument instead of the message."""
        return GatewayUnreachable, (self.replica,)


class AnswerTruncated(RemoraError):
    """An answer has no end although its replica lives: a bug, or a client that read nothing."""


class CannotContinue(RemoraError):
    """The replica's answer differs from the part that another replica has sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a gateway listens for answers.

    node_id:  Ray's id of its machine
    path:     of its Unix socket
    tcp:      host and port for other machines; None = it does not listen on TCP yet
    """

    node_id: str
    path: str
    tcp: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedRequest:
    """A request and the address for its answer.

    scope:   the plain part of its ASGI scope
    secret:  identifies the answer to the gateway
    begun:   set if streams are resumed: the part of the answer that the client has
    """

    scope: Mapping[str, Any]
    body: bytes
    address: Address
    secret: bytes
    begun: Begun | None = None


def plain_scope(scope: Scope, request_id: str) -> Mapping[str, Any]:
    """Return the plain part of a scope, with the request id as a header."""
    plain = {key: scope[key] for key in _SCOPE_KEYS if key in scope}
    headers = [(name, value) for name, value in scope["headers"] if name != _REQUEST_ID]
    return plain | {"headers": [*headers, (_REQUEST_ID, request_id.encode("latin-1"))]}
