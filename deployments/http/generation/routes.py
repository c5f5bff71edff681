"""HTTP routes of endpoints: read the body, run the job, send the response whole or streamed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from remora.deployments.http.core.fields import Body
from remora.deployments.http.core.sse import EventStream, while_connected
from remora.deployments.http.core.wire import JSONAnswer, read_json, written
from remora.deployments.http.generation.endpoint import Endpoint, Job, open_outputs, run
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState

Handler = Callable[[Request], Awaitable[Response]]
Responder = Callable[[ServerState, Request, Job, Mapping[str, str]], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """The path of a generating endpoint.

    body:    model of the request body, for the OpenAPI description
    answer:  sends the response to a job; None = `answer_job`
    """

    path: str
    endpoint: Endpoint[Any]
    body: type[Body]
    methods: tuple[str, ...] = ("POST",)
    answer: Responder | None = None


def generation_routes(server: ServerState, routes: Iterable[Route]) -> APIRouter:
    """Return the router of all generating endpoints."""
    router = APIRouter(tags=["generation"])
    for route in routes:
        handle = handler(server, route.endpoint, route.answer or answer_job)
        for method in route.methods:
            router.add_api_route(route.path, handle, methods=[method])
    return router


async def read_body(server: ServerState, request: Request) -> Any:
    """Return the parsed body. Raises InvalidRequest, or HTTPException 408, 413, 415."""
    return await read_json(request, max_bytes=server.config.api.max_body_bytes)


async def answer_job(
    server: ServerState, request: Request, job: Job, headers: Mapping[str, str]
) -> Response:
    """Run a job for as long as its client is connected, and return its response."""
    if not job.streams:
        whole = await while_connected(request, run(server, job))
        return JSONAnswer(await written(whole), headers=dict(headers))
    async with AsyncExitStack() as held:
        # Headers are sent only once there is a first output.
        outputs = await while_connected(request, open_outputs(server, job, held))
        answer = EventStream(
            outputs,
            job.writer(),
            request.state.dialect,
            request_id=request.state.request_id,
            headers=headers,
        )
        held.pop_all()  # the response closes the outputs
    return answer


def handler(
    server: ServerState, endpoint: Endpoint[Any], answer: Responder = answer_job
) -> Handler:
    """Return the route of an endpoint that generates."""

    async def handle(request: Request) -> Response:
        return await respond(server, endpoint, request, await read_body(server, request), answer)

    return handle


async def respond(
    server: ServerState,
    endpoint: Endpoint[Any],
    request: Request,
    body: Any,
    answer: Responder = answer_job,
) -> Response:
    """Return an endpoint's response to a request whose body has been read."""
    context = RequestContext.of(request, server.metrics.labels)
    if endpoint.dialect is not None:
        request.state.dialect = endpoint.dialect(body) or request.state.dialect
    job, ignored = await endpoint.job(server, body, context)
    server.field_log.note(ignored)
    return await answer(server, request, job, ignored.headers)
