"""Multipart uploads with limits: at most MAX_UPLOAD_BYTES on disk, and little in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.wire import declares_more_than, too_large

MAX_UPLOAD_BYTES = 100 * 2**20
MAX_FIELDS, MAX_FIELD_BYTES = 16, 64 * 1024
UPLOAD_TIMEOUT_S = 600.0
MAX_PARALLEL_UPLOADS = 4


@dataclass(frozen=True, slots=True)
class Upload:
    """A received file, in a temporary file that is deleted when closed."""

    file: UploadFile
    purpose: str


async def read_upload(request: Request) -> Upload:
    """Return the upload in a body. Raises InvalidRequest, or HTTPException 408, 413, 415."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise HTTPException(415, "The content type must be multipart/form-data.")
    if declares_more_than(request, MAX_UPLOAD_BYTES):
        raise too_large(MAX_UPLOAD_BYTES)
    try:
        async with asyncio.timeout(UPLOAD_TIMEOUT_S), aclosing(_limited(request)) as stream:
            form = await MultiPartParser(
                request.headers,
                stream,
                max_files=1,
                max_fields=MAX_FIELDS,
                max_part_size=MAX_FIELD_BYTES,
            ).parse()
    except MultiPartException as error:
        raise InvalidRequest(
            f"The form is malformed: {error.message}", code="invalid_form"
        ) from None
    except TimeoutError:
        raise HTTPException(408, f"The file did not arrive in {UPLOAD_TIMEOUT_S:g} s.") from None
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        await form.close()
        raise InvalidRequest("file is required.", "file", "missing_required_parameter")
    if purpose != "batch":
        await form.close()
        raise InvalidRequest("purpose must be batch; no other is served.", "purpose")
    return Upload(file, purpose)


async def _limited(request: Request) -> AsyncGenerator[bytes, None]:
    num_bytes = 0
    async with aclosing(request.stream()) as stream:
        async for chunk in stream:
            num_bytes += len(chunk)
            if num_bytes > MAX_UPLOAD_BYTES:
                raise too_large(MAX_UPLOAD_BYTES)
            yield chunk
