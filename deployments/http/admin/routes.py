"""Routes of the server's administration: information, health, control."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from remora.configs.version import __version__
from remora.deployments.http.admin import server as ops
from remora.deployments.http.core.auth import ADMIN, PING, RTP_PROBES, require_operator
from remora.deployments.http.core.fields import parse
from remora.deployments.http.core.sse import while_connected
from remora.deployments.http.core.wire import JSONAnswer
from remora.deployments.http.generation.routes import read_body
from remora.deployments.http.generation.server_state import ServerState


def information_routes(server: ServerState) -> APIRouter:
    """Return the routes that describe the model and the server's state."""
    router = APIRouter(tags=["information"])

    @router.get("/v1/models")
    async def models() -> Response:
        cards = [ops.model_card(server, name) for name in server.names]
        return JSONAnswer({"object": "list", "data": cards})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONAnswer(ops.model_card(server, (await server.model(name)).name))

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> Response:
        return JSONAnswer(ops.model_info(server))

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> Response:
        return JSONAnswer(ops.server_info(server))

    @router.get("/version")
    async def server_version() -> Response:
        return JSONAnswer({"version": __version__})

    @router.get("/load")
    async def load() -> Response:
        return JSONAnswer(ops.load(server))

    @router.get("/metrics")
    async def metrics() -> Response:
        if not server.config.metrics.enabled:
            raise HTTPException(404, "Metrics are off: metrics.enabled is false.")
        return Response(server.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router


def health_routes(server: ServerState) -> APIRouter:
    """Return the health checks for load balancers."""
    router = APIRouter(tags=["health"])
    asking = asyncio.Lock()

    async def health() -> Response:
        ops.check_health(server)
        return Response()

    async def ready() -> Response:
        ops.check_ready(server)
        return Response()

    async def alive() -> Response:
        ops.check_health(server)
        return JSONAnswer({"status": "ok"})

    async def takes_requests() -> Response:
        ops.check_ready(server)
        return JSONAnswer({"status": "ok"})

    for path, probe in (("/liveness", alive), ("/readiness", takes_requests)):  # LightLLM's
        router.add_api_route(path, probe, methods=["GET"])
        router.add_api_route(path, probe, methods=["HEAD"], include_in_schema=False)
    checks = (("/health", health), ("/healthz", health), (PING, health), ("/ready", ready))
    for path, answer in checks:
        router.add_api_route(path, answer, methods=["GET"])
        router.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)

    router.add_api_route(PING, health, methods=["POST"])

    async def takes_more() -> Response:
        ops.check_ready(server)
        return JSONAnswer("ok")

    for path in RTP_PROBES:
        for method in ("GET", "POST"):
            router.add_api_route(path, takes_more, methods=[method])
        router.add_api_route(path, takes_more, methods=["HEAD"], include_in_schema=False)

    async def token() -> None:
        # One check at a time, since this route generates a token without requiring a key.
        async with asking:
            await ops.check_token(server)

    @router.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        await while_connected(request, token())
        return Response()

    return router


def control_routes(server: ServerState) -> APIRouter:
    """Return the routes that control the server."""
    router = APIRouter(tags=["control"])

    @router.get("/flush_cache", dependencies=ADMIN)
    @router.post("/flush_cache", dependencies=ADMIN)
    async def flush_cache() -> Response:
        return JSONAnswer(await ops.flush_cache(server))

    @router.get("/step_records", dependencies=ADMIN)
    async def step_records() -> Response:
        return JSONAnswer(ops.step_records(server))

    @router.get("/start_profile", dependencies=ADMIN)
    @router.post("/start_profile", dependencies=ADMIN)
    async def start_profile(request: Request) -> Response:
        has_body = request.method == "POST" and request.headers.get("content-length", "0") != "0"
        body = parse(ops.ProfileBody, await read_body(server, request) if has_body else {})
        await ops.profiler(server).start(body.num_steps)
        return JSONAnswer({"success": True, "message": "The profile begins with the next step."})

    @router.get("/stop_profile", dependencies=ADMIN)
    @router.post("/stop_profile", dependencies=ADMIN)
    async def stop_profile() -> Response:
        return JSONAnswer({"success": True, "trace": await ops.profiler(server).stop()})

    @router.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        body = parse(ops.AbortBody, await read_body(server, request))
        if body.abort_all:
            await require_operator(request)
        return JSONAnswer(await ops.abort(server, body))

    return router
