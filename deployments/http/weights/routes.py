"""Routes that change the served weights and their memory: SGLang's, vLLM's and the server's own.

A change applies to all replicas, whichever replica receives the request.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from remora.configs.errors import InvalidRequest
from remora.configs.fields import base_url
from remora.deployments.http.core.auth import ADMIN
from remora.deployments.http.core.body_limits import limit
from remora.deployments.http.core.fields import Body, PathText, parse
from remora.deployments.http.core.wire import JSONAnswer, read_bytes
from remora.deployments.http.generation.routes import read_body
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.generation.weight_update import (
    PART_BYTES,
    TAGS,
    InstanceUpdate,
    Update,
    WeightPart,
)

_BINARY = "application/octet-stream"
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?")
_UploadId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
_Tag = Literal["weights", "kv_cache", "cuda_graph"]
# Routes whose tensors come by ways that this server does not have, and what they would need.
_REFUSED: Mapping[str, str] = {
    "/update_weights_from_distributed": "a NCCL group with the trainer",
    "/init_weights_update_group": "a NCCL group with the trainer",
    "/destroy_weights_update_group": "a NCCL group with the trainer",
    "/update_weights_from_ipc": "CUDA memory that processes share",
    "/init_weight_transfer_engine": "a NCCL group with the trainer",
    "/start_weight_update": "a transfer engine of NCCL or CUDA IPC",
    "/update_weights": "a transfer engine of NCCL or CUDA IPC",
    "/finish_weight_update": "a transfer engine of NCCL or CUDA IPC",
}


class DiskBody(Body):
    """Body of /update_weights_from_disk."""

    model_path: PathText
    load_format: PathText | None = None
    abort_all_requests: bool | None = None
    weight_version: PathText | None = None


class TensorBody(Body):
    """Body of /update_weights_from_tensor; a binary body has these fields in the URL.

    safetensors:  base64 of the bytes of a safetensors file, or of a part of it
    upload_id:    joins the parts of one file
    offset:       of this part in the file
    is_last:      whether the file ends with this part, and is served then
    """

    safetensors: str | None = None
    serialized_named_tensors: Any = None
    load_format: str | None = None
    upload_id: _UploadId = "default"
    offset: Annotated[int, Field(ge=0, le=2**50)] = 0
    is_last: bool = True
    abort_all_requests: bool | None = None
    weight_version: PathText | None = None


class InstanceBody(Body):
    """Body of /update_weights_from_instance.

    url:             http://host:port of a server in model.weight_instances
    api_key:         its admin key
    model:           the name of the model there, if a gateway serves several
    weight_version:  the label here; the other server's by default
    """

    url: Annotated[str, Field(min_length=1, max_length=2048)]
    api_key: str | None = None
    model: PathText | None = None
    weight_version: PathText | None = None
    abort_all_requests: bool | None = None


class VersionBody(Body):
    """Body of /update_weight_version."""

    new_version: PathText
    abort_all_requests: bool | None = None


class MemoryBody(Body):
    """Body of /release_memory_occupation and /resume_memory_occupation; no tags = all."""

    tags: list[_Tag] | None = None


class SaveBody(Body):
    """Body of /save_weights.

    path:  of a new folder below a folder of model.weight_roots
    """

    path: PathText


class SleepQuery(Body):
    """Parameters of /sleep."""

    level: Literal["1", "2"] = "1"
    mode: Literal["abort", "wait"] = "abort"


WEIGHT_BODIES: Mapping[str, type[Body]] = {
    "/update_weights_from_disk": DiskBody,
    "/update_weights_from_tensor": TensorBody,
    "/update_weights_from_instance": InstanceBody,
    "/update_weight_version": VersionBody,
    "/release_memory_occupation": MemoryBody,
    "/resume_memory_occupation": MemoryBody,
    "/save_weights": SaveBody,
}


def weight_routes(server: ServerState) -> APIRouter:
    """Return the routes of weights and memory."""
    router = APIRouter(tags=["weights"])
    weights = server.weights

    @router.post("/update_weights_from_disk", dependencies=ADMIN)
    async def from_disk(request: Request) -> Response:
        body = parse(DiskBody, await read_body(server, request))
        await weights.update(
            Update(
                path=body.model_path,
                load_format=body.load_format,
                version=body.weight_version,
                aborts=bool(body.abort_all_requests),
            )
        )
        return _served(server)

    @router.post("/update_weights_from_tensor", dependencies=ADMIN)
    async def from_tensor(request: Request) -> Response:
        body, part = await _read_part(server, request)
        await weights.add_part(body.upload_id, body.offset, part)
        if not body.is_last:
            num_bytes = body.offset + len(part)
            return _done(f"{num_bytes} bytes have arrived.", num_bytes=num_bytes)
        await weights.update(
            Update(
                upload=body.upload_id,
                version=body.weight_version,
                aborts=bool(body.abort_all_requests),
            )
        )
        return _served(server)

    @router.post("/update_weights_from_instance", dependencies=ADMIN)
    async def from_instance(request: Request) -> Response:
        body = parse(InstanceBody, await read_body(server, request))
        await weights.update_from_instance(_instance(body))
        return _served(server)

    @router.get("/weights", dependencies=ADMIN)
    async def read(request: Request) -> Response:
        start, num_bytes = _range(request.headers.get("range", ""))
        tag = request.headers.get("if-match")
        part = await weights.read_part(start, num_bytes, None if tag is None else tag.strip('"'))
        return _part_answer(part, tag)

    @router.post("/save_weights", dependencies=ADMIN)
    async def save(request: Request) -> Response:
        body = parse(SaveBody, await read_body(server, request))
        num_bytes = await weights.save(body.path)
        return _done("The weights were saved.", num_bytes=num_bytes)

    @router.get("/get_weight_version")
    @router.get("/weight_version")
    async def version() -> Response:
        return JSONAnswer({"weight_version": weights.version})

    @router.post("/update_weight_version", dependencies=ADMIN)
    async def relabel(request: Request) -> Response:
        body = parse(VersionBody, await read_body(server, request))
        await weights.relabel(body.new_version)
        if body.abort_all_requests:
            await server.client.abort(None)
        return _done("The label was changed.", new_version=weights.version)

    _add_refused(router)
    _add_memory_routes(router, server)
    return router


def _add_memory_routes(router: APIRouter, server: ServerState) -> None:
    weights = server.weights

    async def tags_of(request: Request) -> frozenset[str]:
        is_empty = request.headers.get("content-length", "0") == "0"
        body = parse(MemoryBody, {} if is_empty else await read_body(server, request))
        return frozenset(TAGS if body.tags is None else body.tags)

    @router.post("/release_memory_occupation", dependencies=ADMIN)
    async def release(request: Request) -> Response:
        await weights.sleep(await tags_of(request), "idle", forgets=False)
        return _done("The memory was released.")

    @router.post("/resume_memory_occupation", dependencies=ADMIN)
    async def resume(request: Request) -> Response:
        await weights.wake(await tags_of(request))
        return _done("The memory is in use.")

    @router.post("/sleep", dependencies=ADMIN)
    async def sleep(request: Request) -> Response:
        query = parse(SleepQuery, dict(request.query_params))
        await weights.sleep(frozenset(TAGS), query.mode, forgets=query.level == "2")
        return Response()

    @router.post("/wake_up", dependencies=ADMIN)
    async def wake_up(request: Request) -> Response:
        given = request.query_params.getlist("tags")
        body = parse(MemoryBody, {"tags": given or None})
        await weights.wake(frozenset(body.tags or TAGS))
        return Response()

    @router.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return JSONAnswer({"is_sleeping": bool({"weights", "kv_cache"} & {*weights.released})})


def _add_refused(router: APIRouter) -> None:
    def refusal(path: str, needs: str) -> None:
        async def refuse() -> Response:
            raise InvalidRequest(
                f"{path} needs {needs}, which this server does not have. Use "
                "/update_weights_from_tensor with safetensors, or /update_weights_from_disk.",
                code="not_supported",
            )

        router.add_api_route(path, refuse, methods=["POST"], dependencies=ADMIN)

    for path, needs in _REFUSED.items():
        refusal(path, needs)


def _instance(body: InstanceBody) -> InstanceUpdate:
    """Check where weights are to come from. Raises InvalidRequest."""
    try:
        url = base_url(body.url)
    except ValueError as error:
        raise InvalidRequest(f"url: {error}.", "url") from None
    key = body.api_key
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise InvalidRequest("api_key has characters that no header may have.", "api_key")
    return InstanceUpdate(
        url=url,
        api_key=key,
        model=body.model,
        version=body.weight_version,
        aborts=bool(body.abort_all_requests),
    )


def _range(header: str) -> tuple[int, int]:
    """Return the start and the number of bytes to send. Raises InvalidRequest."""
    found = _RANGE.fullmatch(header.strip())
    if found is None:
        raise InvalidRequest(
            "The weights are sent in parts: send the header `range: bytes=FIRST-LAST`, and "
            f"`if-match` with the first answer's etag. A part has at most {PART_BYTES:,} bytes.",
            "range",
        )
    start, last = int(found[1]), int(found[2]) if found[2] else 2**62
    if last < start:
        raise InvalidRequest(f"range ends at {last}, before its start at {start}.", "range")
    return start, min(last + 1 - start, PART_BYTES)


def _part_answer(part: WeightPart, wanted: str | None) -> Response:
    """Return a part of the file. Raises HTTPException 412 and 416."""
    if wanted is not None and wanted.strip('"') != part.tag:
        raise HTTPException(412, "The weights or their label have changed; begin again.")
    if not part.content:
        message = f"The weights have {part.total_bytes} bytes; the range begins behind them."
        raise HTTPException(416, message, {"content-range": f"bytes */{part.total_bytes}"})
    last = part.start + len(part.content) - 1
    return Response(
        part.content,
        206,
        {
            "etag": f'"{part.tag}"',
            "content-range": f"bytes {part.start}-{last}/{part.total_bytes}",
            "cache-control": "no-store",
        },
        media_type=_BINARY,
    )


async def _read_part(server: ServerState, request: Request) -> tuple[TensorBody, bytes]:
    """Read the fields and the bytes of a part. Raises InvalidRequest."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == _BINARY:
        fields: dict[str, Any] = dict(request.query_params)
        for name in ("is_last", "abort_all_requests"):
            if name in fields:
                fields[name] = _truth(name, fields[name])
        if fields.get("offset", "").isdecimal():
            fields["offset"] = int(fields["offset"][:20])
        body = parse(TensorBody, fields)
        most = server.config.api.max_body_bytes
        part = await read_bytes(request, most, limit("body_timeout_s"))
    else:
        body = parse(TensorBody, await read_body(server, request))
        part = _decoded(body)
    if body.load_format not in (None, "safetensors"):
        raise InvalidRequest(
            f"load_format is {body.load_format!r}; tensors are received as safetensors only.",
            "load_format",
        )
    return body, part


def _decoded(body: TensorBody) -> bytes:
    if body.serialized_named_tensors is not None:
        raise InvalidRequest(
            "serialized_named_tensors are pickles, which can run any code when they are read, and "
            "are refused. Send the bytes of a safetensors file as `safetensors` (base64), or as a "
            f"body of type {_BINARY}.",
            "serialized_named_tensors",
            code="not_supported",
        )
    if body.safetensors is None:
        raise InvalidRequest("safetensors is required: base64 of a file.", "safetensors")
    try:
        return b64decode(body.safetensors, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("safetensors is not valid base64.", "safetensors") from None


def _truth(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name} is {value[:20]!r}; expected true or false.", name)
    return value.lower() in ("true", "1")


def _served(server: ServerState) -> Response:
    version = server.weights.version
    return _done("The new weights are served.", weight_version=version, num_paused_requests=0)


def _done(message: str, **more: Any) -> Response:
    return JSONAnswer({"success": True, "message": message, **more})
