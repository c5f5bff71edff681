"""/v1/models in Anthropic's shape, for requests with the header `anthropic-version`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from remora.deployments.http.core.wire import JSONAnswer
from remora.deployments.http.core.wire_formats import ANTHROPIC, anthropic_page
from remora.deployments.http.generation.server_state import ServerState

_VERSION_HEADER = "anthropic-version"
MAX_LISTED = 1000
Id = Annotated[str | None, Query(max_length=1024)]


class _VersionedRoute(APIRoute):
    """A route that exists only for clients of Anthropic's API."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether the route takes a request, whose errors are then Anthropic's too."""
        if _VERSION_HEADER not in Headers(scope=scope):
            return Match.NONE, {}
        match, child = super().matches(scope)
        if match is not Match.NONE:
            scope.setdefault("state", {})["dialect"] = ANTHROPIC
        return match, child


def model_routes(server: ServerState) -> APIRouter:
    """Return the routes, which take precedence over the same paths of other APIs."""
    router = APIRouter(tags=["information"], route_class=_VersionedRoute, include_in_schema=False)

    @router.get("/v1/models")
    async def models(
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        before_id: Id = None,
        after_id: Id = None,
    ) -> Response:
        cards = [_card(server, name) for name in server.names]
        return JSONAnswer(anthropic_page(cards, limit, before_id, after_id))

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONAnswer(_card(server, (await server.model(name)).name))

    return router


def _card(server: ServerState, name: str) -> dict[str, Any]:
    longest = server.plan.max_sequence_tokens
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(server.created, UTC)
        .isoformat()
        .replace("+00:00", "Z"),
        "max_input_tokens": longest,
        "max_tokens": longest,
    }
