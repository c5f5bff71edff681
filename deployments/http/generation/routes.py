"""HTTP routes of endpoints: read the body, run the job, send the response whole or streamed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from remora.deployments.http.core.fields import Body
from remora.deployments.http.core.sse import EventStream, while_connected
from remora.deployments.http.core.wire import JSONAnswer, read_json, written
from remora.deployments.http.generation.endpoint import Endpoint, open_outputs, run
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """The path of a generating endpoint.

    body:  model of the request body, for the OpenAPI description
    """

    path: str
    endpoint: Endpoint[Any]
    body: type[Body]
    methods: tuple[str, ...] = ("POST",)


def generation_routes(server: ServerState, routes: Iterable[Route]) -> APIRouter:
    """Return the router of all generating endpoints."""
    router = APIRouter(tags=["generation"])
    for route in routes:
        for method in route.methods:
            router.add_api_route(route.path, handler(server, route.endpoint), methods=[method])
    return router


async def read_body(server: ServerState, request: Request) -> Any:
    """Return the parsed body. Raises InvalidRequest, or HTTPException 408, 413, 415."""
    return await read_json(request, max_bytes=server.config.api.max_body_bytes)


def handler(server: ServerState, endpoint: Endpoint[Any]) -> Handler:
    """Return the route of an endpoint that generates."""

    async def handle(request: Request) -> Response:
        context = RequestContext.of(request, server.metrics.labels)
        body = await read_body(server, request)
        if endpoint.dialect is not None:
            request.state.dialect = endpoint.dialect(body)
        dialect = request.state.dialect
        job, headers = await endpoint.job(server, body, context)
        if not job.streams:
            whole = await while_connected(request, run(server, job))
            return JSONAnswer(await written(whole), headers=dict(headers))
        async with AsyncExitStack() as held:
            # Headers are sent only once there is a first output.
            outputs = await while_connected(request, open_outputs(server, job, held))
            answer = EventStream(
                outputs, job.writer(), dialect, request_id=context.request_id, headers=headers
            )
            held.pop_all()  # the response closes the outputs
        return answer

    return handle
