"""llama.cpp's routes that need no engine: /props, /slots and /apply-template."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request
from starlette.responses import Response

from remora.deployments.http.core.fields import Body, parse
from remora.deployments.http.core.wire import JSONAnswer
from remora.deployments.http.generation.routes import read_body
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.llamacpp import info
from remora.deployments.http.llamacpp.bodies import ApplyTemplateBody

# Bodies of these paths, for the OpenAPI description.
LLAMA_BODIES: Mapping[str, type[Body]] = {"/apply-template": ApplyTemplateBody}


def llama_routes(server: ServerState) -> APIRouter:
    """Return the router of these paths."""
    router = APIRouter(tags=["information"])

    @router.get("/props")
    async def props() -> Response:
        return JSONAnswer(info.props(server))

    @router.get("/slots")
    async def slots(fail_on_no_slot: bool = False) -> Response:
        return JSONAnswer(info.slots(server, needs_free=fail_on_no_slot))

    @router.post("/apply-template")
    async def apply_template(request: Request) -> Response:
        body = parse(ApplyTemplateBody, await read_body(server, request))
        headers = server.report_ignored(body)
        return JSONAnswer(await info.apply_template(server, body), headers=headers)

    return router
