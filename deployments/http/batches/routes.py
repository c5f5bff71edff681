"""Routes of files and of both APIs' batches; they answer 404 unless `api.batch_dir` is set."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

from fastapi import APIRouter, Query, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from remora.configs.errors import InvalidRequest
from remora.deployments.http.batches.input import BATCH_PATHS
from remora.deployments.http.batches.message_batches import message_batch_routes
from remora.deployments.http.batches.store import BatchStore
from remora.deployments.http.batches.upload import MAX_PARALLEL_UPLOADS, read_upload
from remora.deployments.http.core.auth import viewer
from remora.deployments.http.core.fields import (
    Body,
    Label,
    Metadata,
    parse,
)
from remora.deployments.http.core.wire import JSONAnswer
from remora.deployments.http.generation.routes import read_body
from remora.deployments.http.generation.server_state import ServerState


class BatchBody(Body):
    """Body of /v1/batches."""

    input_file_id: Label
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata = None


_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
    },
}
_UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}


class Shown(Protocol):
    """An object in a list."""

    @property
    def id(self) -> str:
        """Its id."""
        ...

    def show(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        ...


ShownT = TypeVar("ShownT", bound=Shown)
After = Annotated[str | None, Query(max_length=256)]


def batch_routes(server: ServerState) -> APIRouter:
    """Return the routes of files and batches."""
    folder = server.config.api.batch_dir
    if folder is None:
        return _nothing()
    store = BatchStore(Path(folder))
    router = APIRouter(tags=["batches"])
    _add_files(router, server, store)
    _add_batches(router, server, store)
    router.include_router(message_batch_routes(server, store))
    return router


def _nothing() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    async def absent() -> Response:
        message = "Files and batches are not served here: the operator has not set api.batch_dir."
        raise HTTPException(404, message)

    for path in ("files", "batches", "messages/batches"):
        for end in ("", "/{rest:path}"):
            router.add_api_route(f"/v1/{path}{end}", absent, methods=["GET", "POST", "DELETE"])
    return router


def _add_files(router: APIRouter, server: ServerState, store: BatchStore) -> None:
    files = store.files
    uploading = asyncio.Semaphore(MAX_PARALLEL_UPLOADS)

    @router.post("/v1/files", openapi_extra=_UPLOAD)
    async def create(request: Request) -> Response:
        async with uploading:
            upload = await read_upload(request)
            with upload.file.file as source:
                made = await asyncio.to_thread(
                    files.add,
                    source,
                    filename=upload.file.filename or "",
                    purpose=upload.purpose,
                    owner=request.state.owner,
                )
        return JSONAnswer(made.show())

    @router.get("/v1/files")
    async def list_files(
        request: Request,
        purpose: Annotated[str | None, Query(max_length=64)] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        after: After = None,
    ) -> Response:
        found = await asyncio.to_thread(files.seen_by, viewer(request), purpose)
        return JSONAnswer(_page(found if order == "desc" else found[::-1], after, limit))

    @router.get("/v1/files/{file_id}")
    async def file(request: Request, file_id: str) -> Response:
        return JSONAnswer((await asyncio.to_thread(files.find, file_id, viewer(request))).show())

    @router.get("/v1/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        found = await asyncio.to_thread(files.find, file_id, viewer(request))
        return FileResponse(files.data_path(found.id), media_type="application/octet-stream")

    @router.delete("/v1/files/{file_id}")
    async def delete(request: Request, file_id: str) -> Response:
        await asyncio.to_thread(files.delete, file_id, viewer(request))
        return JSONAnswer({"id": file_id, "object": "file", "deleted": True})


def _add_batches(router: APIRouter, server: ServerState, store: BatchStore) -> None:
    @router.post("/v1/batches")
    async def create(request: Request) -> Response:
        body = parse(BatchBody, await read_body(server, request))
        headers = server.report_ignored(body)
        if body.endpoint not in BATCH_PATHS:
            raise InvalidRequest(f"endpoint must be one of {', '.join(BATCH_PATHS)}.", "endpoint")
        given = await asyncio.to_thread(store.files.find, body.input_file_id, viewer(request))
        if given.purpose != "batch":
            raise InvalidRequest("The input file's purpose must be batch.", "input_file_id")
        batch = await asyncio.to_thread(
            store.add,
            endpoint=body.endpoint,
            input_file_id=given.id,
            owner=request.state.owner,
            tenant=request.state.tenant,
            model=server.plan.served_model_name,
            metadata=body.metadata,
        )
        return JSONAnswer(batch.show(), headers=headers)

    @router.get("/v1/batches")
    async def list_batches(
        request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: After = None
    ) -> Response:
        found = await asyncio.to_thread(store.seen_by, viewer(request))
        return JSONAnswer(_page(found, after, limit))

    @router.get("/v1/batches/{batch_id}")
    async def batch(request: Request, batch_id: str) -> Response:
        return JSONAnswer((await asyncio.to_thread(store.find, batch_id, viewer(request))).show())

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Response:
        found = await asyncio.to_thread(store.find, batch_id, viewer(request))
        if found.has_ended:
            raise HTTPException(409, f"The batch has ended already: it is {found.status}.")
        await asyncio.to_thread(store.cancel, batch_id)
        found.status = "cancelling"
        return JSONAnswer(found.show())


def _page(found: list[ShownT], after: str | None, limit: int) -> dict[str, Any]:
    """Return OpenAI's list object: the page after the object with id `after`."""
    ids = [item.id for item in found]
    first = ids.index(after) + 1 if after in ids else 0
    chosen = found[first : first + limit]
    return {
        "object": "list",
        "data": [item.show() for item in chosen],
        "first_id": chosen[0].id if chosen else None,
        "last_id": chosen[-1].id if chosen else None,
        "has_more": first + limit < len(found),
    }
