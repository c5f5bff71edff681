"""The FastAPI application of one replica, built over a running engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response

from remora.configs.errors import InvalidRequest, RemoraError
from remora.deployments.http import ops
from remora.deployments.http.dialects import dialect_of
from remora.deployments.http.edge import Edge, error_answer
from remora.deployments.http.errors import log_error
from remora.deployments.http.fields import Body
from remora.deployments.http.jobs import CHAT, COMPLETIONS, GENERATE, Endpoint, run
from remora.deployments.http.native_bodies import GenerateBody
from remora.deployments.http.openai_bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from remora.deployments.http.openapi import describe_bodies
from remora.deployments.http.served import Served
from remora.deployments.http.sse import EventStream, as_events, while_connected
from remora.deployments.http.wire import JSONAnswer, read_json

_BODIES: Mapping[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/generate": GenerateBody,
    "/tokenize": TokenizeBody,
    "/v1/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/detokenize": DetokenizeBody,
    "/abort_request": ops.AbortBody,
}

Handler = Callable[[Request], Awaitable[Response]]


def build_http_app(served: Served, *, echo_request_id: bool = True) -> FastAPI:
    """Return the application.

    echo_request_id:  False where a proxy in front already sends `x-request-id` back
    """
    edge = Middleware(Edge, echo_request_id=echo_request_id, count=served.metrics.count_response)
    app = FastAPI(
        title="remora",
        summary=f"Serves {served.plan.served_model_name}",
        middleware=[edge],
        exception_handlers={
            RemoraError: _answer_error,
            HTTPException: _answer_error,
            RequestValidationError: _answer_error,
        },
        redirect_slashes=False,
    )
    app.include_router(_generation_routes(served))
    app.include_router(_token_routes(served))
    app.include_router(_information_routes(served))
    app.include_router(_control_routes(served))
    describe_bodies(app, _BODIES)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        error = InvalidRequest("A parameter of the URL is malformed.")
    log_error(error, request.state.request_id)
    dialect = getattr(request.state, "dialect", None) or dialect_of(request.url.path)
    return error_answer(error, dialect)


async def _body(served: Served, request: Request) -> Any:
    return await read_json(request, max_bytes=served.config.api.max_body_bytes)


def _handler(served: Served, endpoint: Endpoint[Any]) -> Handler:
    """Return the route of an endpoint that generates text."""

    async def handle(request: Request) -> Response:
        request_id = request.state.request_id
        body = await _body(served, request)
        dialect = endpoint.dialect(body) if endpoint.dialect else dialect_of(request.url.path)
        request.state.dialect = dialect  # for an error's answer
        job, headers = await endpoint.job(served, body, request_id)
        if not job.streams:
            answer = await while_connected(request, run(served, job))
            return JSONAnswer(answer, headers=dict(headers))
        # No header is sent before there is a first token to send with it.
        opening = served.calls.open(job.rid, job.requests)
        outputs = await while_connected(request, opening)
        events = as_events(job.chunks(outputs), dialect, request_id)
        return EventStream(events, dialect, close=outputs.aclose, headers=headers)

    return handle


def _generation_routes(served: Served) -> APIRouter:
    router = APIRouter(tags=["generation"])
    for path, endpoint, methods in (
        ("/v1/chat/completions", CHAT, ["POST"]),
        ("/v1/completions", COMPLETIONS, ["POST"]),
        ("/generate", GENERATE, ["GET", "POST", "PUT"]),
    ):
        for method in methods:
            router.add_api_route(path, _handler(served, endpoint), methods=[method])
    return router


def _token_routes(served: Served) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(request: Request) -> Response:
        answer, headers = await ops.tokenize(served, await _body(served, request))
        return JSONAnswer(answer, headers=headers)

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(request: Request) -> Response:
        answer, headers = await ops.detokenize(served, await _body(served, request))
        return JSONAnswer(answer, headers=headers)

    return router


def _information_routes(served: Served) -> APIRouter:
    router = APIRouter(tags=["information"])

    @router.get("/v1/models")
    async def models() -> Response:
        return JSONAnswer({"object": "list", "data": [ops.model_card(served)]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        served.check_model(name)
        return JSONAnswer(ops.model_card(served))

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> Response:
        return JSONAnswer(ops.model_info(served))

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> Response:
        return JSONAnswer(ops.server_info(served))

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(served.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router


def _control_routes(served: Served) -> APIRouter:
    router = APIRouter(tags=["control"])

    async def health() -> Response:
        ops.check_health(served)
        return Response()

    for path in ("/health", "/healthz", "/ready"):
        router.add_api_route(path, health, methods=["GET"])
        router.add_api_route(path, health, methods=["HEAD"], include_in_schema=False)

    @router.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        await while_connected(request, ops.check_token(served))
        return Response()

    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def flush_cache() -> Response:
        return JSONAnswer(await ops.flush_cache(served))

    @router.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        return JSONAnswer(await ops.abort(served, await _body(served, request)))

    return router
