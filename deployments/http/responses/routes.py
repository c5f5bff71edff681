"""Routes of /v1/responses that generate nothing: existing responses, and the length of an input."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.fields import parse
from remora.deployments.http.core.wire import JSONAnswer
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.routes import read_body
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.responses.archive import Archive, archive_of
from remora.deployments.http.responses.background import (
    cancel_elsewhere,
    resumed,
    runs_of,
    stream_of,
)
from remora.deployments.http.responses.bodies import PromptBody
from remora.deployments.http.responses.compact import count_input
from remora.deployments.http.responses.response import CANCELLED

MAX_LISTED = 100


def responses_routes(server: ServerState) -> APIRouter:
    """Return the routes of existing responses, and of /input_tokens."""
    router = APIRouter(tags=["responses"])

    def archive_for(request: Request) -> Archive:
        return archive_of(server, RequestContext.of(request, server.metrics.labels))

    @router.post("/v1/responses/input_tokens")
    async def input_tokens(request: Request) -> Response:
        body = parse(PromptBody, await read_body(server, request))
        headers = server.report_ignored(body)
        context = RequestContext.of(request, server.metrics.labels)
        num_tokens = await count_input(server, body, context)
        found = {"object": "response.input_tokens", "input_tokens": num_tokens}
        return JSONAnswer(found, headers=headers)

    @router.get("/v1/responses/{response_id}")
    async def retrieve(
        request: Request,
        response_id: str,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0)] = None,
    ) -> Response:
        archive = archive_for(request)
        if stream:
            after = -1 if starting_after is None else starting_after
            return stream_of(request, await resumed(server, archive, response_id, after), {})
        if starting_after is not None:
            raise InvalidRequest("starting_after needs stream to be true.", "starting_after")
        run = runs_of(server).find(response_id, archive)
        running = archive.running(response_id) if run is None else run.response
        return JSONAnswer(running or (await archive.find(response_id)).response)

    @router.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> Response:
        archive = archive_for(request)
        run = runs_of(server).find(response_id, archive)
        if run is not None:
            await run.cancel()
        else:  # a replica that still makes it would store it again
            await cancel_elsewhere(archive, await archive.find(response_id))
        await archive.forget(response_id)
        return JSONAnswer({"id": response_id, "object": "response", "deleted": True})

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        archive = archive_for(request)
        run = runs_of(server).find(response_id, archive)
        if run is not None:
            return JSONAnswer(await run.cancel())
        running = archive.running(response_id)
        if running is not None and await server.calls.abort(response_id):
            return JSONAnswer(running | {"status": CANCELLED})
        record = await archive.find(response_id)
        if record.response["background"]:
            return JSONAnswer(await cancel_elsewhere(archive, record))
        raise InvalidRequest(f"The response has already ended: {record.response['status']}.")

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        items = (await archive_for(request).find(response_id)).items
        return JSONAnswer(_page(items if order == "asc" else items[::-1], limit, after))

    return router


def _page(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    ids = [item["id"] for item in items]
    if after is not None:
        if after not in ids:
            raise InvalidRequest("after is not the id of an item.", "after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
