"""/v1/messages/batches: Anthropic's message batches, run by the executor of OpenAI's batches.

The requests of a message batch become an input file whose lines are requests to /v1/messages.
Results are OpenAI's records on disk, and become Anthropic's as they are read. Params are checked
when their request runs, as in Anthropic's API.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from remora.configs.errors import InvalidRequest
from remora.deployments.http.batches.input import MAX_LINES, MESSAGES_PATH, read_input
from remora.deployments.http.batches.results import EXPIRED
from remora.deployments.http.batches.store import Batch, BatchStore
from remora.deployments.http.core.auth import viewer
from remora.deployments.http.core.fields import Body, parse
from remora.deployments.http.core.wire import JSONAnswer, dumps
from remora.deployments.http.core.wire_formats import anthropic_error, anthropic_page
from remora.deployments.http.generation.routes import read_body
from remora.deployments.http.generation.server_state import ServerState

_PREFIX, _OWN_PREFIX = "msgbatch_", "batch_"
_CHUNK_LINES = 64
Id = Annotated[str | None, Query(max_length=256)]


class MessageRequest(Body):
    """One request of a message batch."""

    custom_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]


class MessageBatchBody(Body):
    """Body of /v1/messages/batches."""

    requests: Annotated[
        list[MessageRequest], Field(min_length=1, max_length=MAX_LINES, fail_fast=True)
    ]


def message_batch_routes(server: ServerState, store: BatchStore) -> APIRouter:
    """Return the routes of message batches."""
    router = APIRouter(tags=["batches"])

    async def find(request: Request, batch_id: str) -> Batch:
        own = _OWN_PREFIX + batch_id.removeprefix(_PREFIX)
        if not batch_id.startswith(_PREFIX):
            raise HTTPException(404, f"There is no message batch {batch_id[:64]!r}.")
        return await asyncio.to_thread(store.find, own, viewer(request), (MESSAGES_PATH,))

    @router.post("/v1/messages/batches")
    async def create(request: Request) -> Response:
        body = parse(MessageBatchBody, await read_body(server, request))
        headers = server.report_ignored(body)
        given = _input_file(body, server.config.api.max_body_bytes)
        batch = await asyncio.to_thread(_add, server, store, request, given, len(body.requests))
        return JSONAnswer(_shown(request, store, batch), headers=headers)

    @router.get("/v1/messages/batches")
    async def list_batches(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
        before_id: Id = None,
        after_id: Id = None,
    ) -> Response:
        found = await asyncio.to_thread(store.seen_by, viewer(request), (MESSAGES_PATH,))
        shown = [_shown(request, store, batch) for batch in found]
        return JSONAnswer(anthropic_page(shown, limit, before_id, after_id))

    @router.get("/v1/messages/batches/{batch_id}")
    async def retrieve(request: Request, batch_id: str) -> Response:
        return JSONAnswer(_shown(request, store, await find(request, batch_id)))

    @router.get("/v1/messages/batches/{batch_id}/results")
    async def results(request: Request, batch_id: str) -> Response:
        batch = await find(request, batch_id)
        if not batch.has_ended:
            raise InvalidRequest("The batch has not ended yet; its results come at its end.")
        lines = _results(store, batch, server.config.api.max_body_bytes)
        return StreamingResponse(_in_thread(lines), media_type="application/x-jsonl")

    @router.post("/v1/messages/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Response:
        batch = await find(request, batch_id)
        if not batch.has_ended:
            await asyncio.to_thread(store.cancel, batch.id)
            batch.status = "cancelling"
        return JSONAnswer(_shown(request, store, batch))

    @router.delete("/v1/messages/batches/{batch_id}")
    async def delete(request: Request, batch_id: str) -> Response:
        batch = await find(request, batch_id)
        if not batch.has_ended:
            raise InvalidRequest("The batch has not ended yet; cancel it first.")
        await asyncio.to_thread(store.delete, batch)
        return JSONAnswer({"id": batch_id, "type": "message_batch_deleted"})

    return router


def _input_file(body: MessageBatchBody, max_line_bytes: int) -> bytes:
    """Return the requests as an input file. Raises InvalidRequest."""
    lines, names = list[bytes](), set[str]()
    for place, one in enumerate(body.requests):
        param = f"requests[{place}]"
        if one.custom_id in names:
            message = f"{param}.custom_id {one.custom_id!r} is not unique."
            raise InvalidRequest(message, f"{param}.custom_id")
        names.add(one.custom_id)
        if one.params.get("stream"):
            message = f"{param}.params.stream: a batch cannot stream."
            raise InvalidRequest(message, f"{param}.params.stream")
        line = {"custom_id": one.custom_id, "method": "POST", "url": MESSAGES_PATH}
        lines.append(dumps(line | {"body": one.params}) + b"\n")
        if len(lines[-1]) > max_line_bytes:
            raise InvalidRequest(f"{param} is longer than {max_line_bytes} bytes.", param)
    return b"".join(lines)


def _add(
    server: ServerState, store: BatchStore, request: Request, given: bytes, total: int
) -> Batch:
    owner = request.state.owner
    file = store.files.add(
        io.BytesIO(given), filename="requests.jsonl", purpose="batch", owner=owner
    )
    try:
        return store.add(
            endpoint=MESSAGES_PATH,
            input_file_id=file.id,
            owner=owner,
            tenant=request.state.tenant,
            model=server.plan.served_model_name,
            metadata=None,
            total=total,
        )
    except BaseException:
        store.files.discard(file.id)
        raise


def _shown(request: Request, store: BatchStore, batch: Batch) -> dict[str, Any]:
    """Return Anthropic's object."""
    batch_id = _PREFIX + batch.id.removeprefix(_OWN_PREFIX)
    cancelled_at = store.cancelled_at(batch.id)
    status = "canceling" if batch.status == "cancelling" else "in_progress"
    ended_at = batch.times.get(f"{batch.status}_at") if batch.has_ended else None
    url = f"{request.base_url}v1/messages/batches/{batch_id}/results"
    return {
        "id": batch_id,
        "type": "message_batch",
        "processing_status": "ended" if batch.has_ended else status,
        "request_counts": _counts(batch),
        "created_at": _written(batch.created_at),
        "expires_at": _written(batch.expires_at),
        "ended_at": _written(ended_at),
        "cancel_initiated_at": _written(cancelled_at),
        "archived_at": None,
        "results_url": url if batch.has_ended else None,
    }


def _counts(batch: Batch) -> dict[str, int]:
    """Return the numbers of results, which are all processing until the batch has ended."""
    kinds = ("processing", "succeeded", "errored", "canceled", "expired")
    if not batch.has_ended:
        return dict.fromkeys(kinds, 0) | {"processing": batch.total}
    if batch.status == "failed":  # the input file has been deleted
        return dict.fromkeys(kinds, 0) | {"errored": batch.total}
    errored = batch.failed - batch.expired
    canceled = batch.total - batch.completed - batch.failed
    return dict(zip(kinds, (0, batch.completed, errored, canceled, batch.expired), strict=True))


def _written(seconds: float | None) -> str | None:
    """Return a Unix time in RFC 3339."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _results(store: BatchStore, batch: Batch, max_line_bytes: int) -> Iterator[bytes]:
    """Yield the results as lines, in pieces. Blocks."""
    seen, lines = set[str](), list[bytes]()
    for file_id in (batch.output, batch.error):
        path = store.files.data_path(file_id)
        if not path.exists():
            continue
        with path.open("rb") as file:
            for raw in file:
                record = orjson.loads(raw)
                seen.add(record["custom_id"])
                lines.append(_line(record["custom_id"], _result(record)))
                if len(lines) == _CHUNK_LINES:
                    yield b"".join(lines)
                    lines.clear()
    yield b"".join(lines)
    path = store.files.data_path(batch.input_file_id)
    if len(seen) < batch.total and path.exists():
        given = read_input(path, MESSAGES_PATH, max_line_bytes=max_line_bytes)
        rest = [line.custom_id for line in given.lines if line.custom_id not in seen]
        yield b"".join(_line(name, {"type": "canceled"}) for name in rest)


def _line(custom_id: str, result: dict[str, Any]) -> bytes:
    return dumps({"custom_id": custom_id, "result": result}) + b"\n"


def _result(record: dict[str, Any]) -> dict[str, Any]:
    """Return Anthropic's result of a record of the output or the error file."""
    response, error = record["response"], record["error"]
    if response is None:
        if error["code"] == EXPIRED:
            return {"type": "expired"}
        return {"type": "errored", "error": anthropic_error(500, error["message"])}
    if response["status_code"] == 200:
        return {"type": "succeeded", "message": response["body"]}
    shown = anthropic_error(response["status_code"], response["body"]["error"]["message"])
    return {"type": "errored", "error": shown | {"request_id": response["request_id"]}}


async def _in_thread(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield what a blocking iterator yields."""
    while (piece := await asyncio.to_thread(lambda: next(pieces, None))) is not None:
        yield piece
