"""Routes that pause generation and go on: SGLang's, and vLLM's names of the same.

A paused engine takes no steps. Requests that come meanwhile wait, and their time in the queue does
not count. A gateway sends these paths to every replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.auth import ADMIN
from remora.deployments.http.core.fields import Body, parse
from remora.deployments.http.core.wire import JSONAnswer
from remora.deployments.http.generation.routes import read_body
from remora.deployments.http.generation.server_state import ServerState

Mode = Literal["abort", "retract", "in_place"]


class PauseBody(Body):
    """Body of /pause_generation.

    mode:  what becomes of open requests: abort = they end; retract = running ones give up their
           memory and wait; in_place = they keep it
    """

    mode: Mode = "abort"


class ContinueBody(Body):
    """Body of /continue_generation, which may be empty."""


PAUSE_BODIES: Mapping[str, type[Body]] = {
    "/pause_generation": PauseBody,
    "/continue_generation": ContinueBody,
}


async def pause(server: ServerState, mode: Mode) -> None:
    """Pause the engine."""
    await server.client.pause(retracting=mode == "retract")
    if mode == "abort":
        await server.calls.abort_all()


def pause_routes(server: ServerState) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["control"])

    async def read(request: Request, kind: type[Body]) -> tuple[Body, dict[str, str]]:
        has_body = request.headers.get("content-length", "0") != "0"
        body = parse(kind, await read_body(server, request) if has_body else {})
        headers = server.report_ignored(body)
        return body, headers

    @router.post("/pause_generation", dependencies=ADMIN)
    async def pause_generation(request: Request) -> Response:
        body, headers = await read(request, PauseBody)
        assert isinstance(body, PauseBody)
        await pause(server, body.mode)
        done = {"message": "Generation paused successfully.", "status": "ok"}
        return JSONAnswer(done, headers=headers)

    @router.post("/continue_generation", dependencies=ADMIN)
    async def continue_generation(request: Request) -> Response:
        _, headers = await read(request, ContinueBody)
        await server.client.unpause()
        done = {"message": "Generation continued successfully.", "status": "ok"}
        return JSONAnswer(done, headers=headers)

    @router.post("/pause", dependencies=ADMIN)
    async def pause_engine(mode: str = "abort", clear_cache: bool = False) -> Response:
        modes: dict[str, Mode] = {"abort": "abort", "keep": "in_place"}
        if mode not in modes:
            raise InvalidRequest(
                f"mode is {mode[:64]!r}; this server knows abort and keep. To let requests end, "
                "stop sending new ones.",
                "mode",
            )
        if clear_cache and mode == "keep":
            message = "clear_cache needs mode=abort: kept requests use the cache."
            raise InvalidRequest(message, "clear_cache")
        await pause(server, modes[mode])
        if clear_cache:
            await server.client.flush_cache()
        return JSONAnswer({"status": "paused"})

    @router.post("/resume", dependencies=ADMIN)
    async def resume() -> Response:
        await server.client.unpause()
        return JSONAnswer({"status": "resumed"})

    @router.get("/is_paused", dependencies=ADMIN)
    async def is_paused() -> Response:
        return JSONAnswer({"is_paused": server.client.is_paused})

    return router
