"""Routes of adapters: load, unload, pin, list, as in vLLM and SGLang, and the server's own.

A change applies to all replicas, whichever replica receives the request: the adapter manager
carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from remora.deployments.http.core.auth import ADMIN
from remora.deployments.http.core.fields import (
    Body,
    PathText,
    parse,
)
from remora.deployments.http.core.wire import JSONAnswer
from remora.deployments.http.generation.routes import read_body
from remora.deployments.http.generation.server_state import ServerState

_Name = Annotated[str, Field(min_length=1, max_length=1024)]


class LoadBody(Body):
    """Body of /v1/load_lora_adapter and /load_lora_adapter."""

    lora_name: _Name
    lora_path: PathText
    load_inplace: bool | None = None
    pinned: bool | None = None
    model: str | None = None  # for a gateway in front of several models


class UnloadBody(Body):
    """Body of /v1/unload_lora_adapter and /unload_lora_adapter."""

    lora_name: _Name
    lora_int_id: int | None = None
    force: bool | None = None
    model: str | None = None


LORA_BODIES: Mapping[str, type[Body]] = {
    "/v1/load_lora_adapter": LoadBody,
    "/load_lora_adapter": LoadBody,
    "/v1/unload_lora_adapter": UnloadBody,
    "/unload_lora_adapter": UnloadBody,
}


def lora_routes(server: ServerState) -> APIRouter:
    """Return the routes of adapters."""
    router = APIRouter(tags=["adapters"])

    async def load(request: Request) -> tuple[LoadBody, dict[str, str]]:
        body = parse(LoadBody, await read_body(server, request))
        headers = server.report_ignored(body)
        await server.adapters.manager.load(
            body.lora_name,
            body.lora_path,
            pinned=bool(body.pinned),
            replaces=bool(body.load_inplace),
        )
        return body, headers

    async def unload(request: Request) -> tuple[UnloadBody, dict[str, str]]:
        body = parse(UnloadBody, await read_body(server, request))
        headers = server.report_ignored(body)
        await server.adapters.manager.unload(body.lora_name, ends=bool(body.force))
        return body, headers

    async def loaded() -> dict[str, str]:
        known = (await server.adapters.describe())["adapters"]
        return {entry["name"]: entry["source"] for entry in known if "source" in entry}

    @router.post("/v1/load_lora_adapter", dependencies=ADMIN)
    async def load_openai(request: Request) -> Response:
        body, headers = await load(request)
        text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
        return PlainTextResponse(text, headers=headers)

    @router.post("/v1/unload_lora_adapter", dependencies=ADMIN)
    async def unload_openai(request: Request) -> Response:
        body, headers = await unload(request)
        text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        return PlainTextResponse(text, headers=headers)

    @router.post("/load_lora_adapter", dependencies=ADMIN)
    async def load_native(request: Request) -> Response:
        _, headers = await load(request)
        return JSONAnswer({"success": True, "loaded_adapters": await loaded()}, headers=headers)

    @router.post("/unload_lora_adapter", dependencies=ADMIN)
    async def unload_native(request: Request) -> Response:
        _, headers = await unload(request)
        return JSONAnswer({"success": True, "loaded_adapters": await loaded()}, headers=headers)

    @router.get("/v1/lora_adapters", dependencies=ADMIN)
    async def adapters() -> Response:
        described = await server.adapters.describe()
        counters = {"replicas": described["replicas"]} if "replicas" in described else {}
        return JSONAnswer({"object": "list", "data": described["adapters"], **counters})

    @router.post("/v1/lora_adapters/{name}/pin", dependencies=ADMIN)
    async def pin(name: str) -> Response:
        return JSONAnswer(await server.adapters.manager.pin(name, pinned=True))

    @router.post("/v1/lora_adapters/{name}/unpin", dependencies=ADMIN)
    async def unpin(name: str) -> Response:
        return JSONAnswer(await server.adapters.manager.pin(name, pinned=False))

    return router
