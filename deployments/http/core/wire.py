"""Bytes of HTTP bodies: JSON input under limits, and strict JSON output.

Input: no body above the limit is held in memory; nesting and the length of integers are limited;
NaN and broken Unicode are refused. Integers beyond 64 bits become floats, which no integer field
accepts. Output: never NaN or Infinity, and a lone surrogate becomes U+FFFD.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing, suppress
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.body_limits import OverLimit, limit
from remora.deployments.http.core.errors import CLIENT_GONE

_PARSE_ON_LOOP_BYTES = 256 * 1024
_MANY = 32  # entries of a response
# Of the rest of a body that is refused for its size.
_MAX_DISCARDED_BYTES = 64 * 2**20
BODY_HAS_ENDED = "body_has_ended"  # name in the scope's state
# Possessive: no backtracking state is kept, whatever the length of a string.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def route_path(scope: Scope) -> str:
    """Return the path below the mount point of the application."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if path.startswith(f"{root}/") else path


async def read_json(request: Request, *, max_bytes: int) -> Any:
    """Return the parsed body. Raises InvalidRequest, or HTTPException 408, 413, 415."""
    _check_media_type(request)
    raw = await read_bytes(request, max_bytes, limit("body_timeout_s"))
    if len(raw) > _PARSE_ON_LOOP_BYTES:
        return await asyncio.to_thread(parse_json, raw)
    return parse_json(raw)


def parse_json(raw: bytes) -> Any:
    """Parse one JSON text. Raises InvalidRequest."""
    if not raw.strip():
        raise InvalidRequest("The body is empty; send a JSON object.", code="invalid_json")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        reason = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise InvalidRequest(
            f"The body is not valid JSON: {reason}.", code="invalid_json"
        ) from None
    max_digits, max_depth = limit("max_json_digits"), limit("max_json_depth")
    long_number = re.compile(rb"[0-9]{%d}" % (max_digits + 1))
    if long_number.search(raw) and long_number.search(_STRING.sub(b'""', raw)):
        message = f"A number has more than {max_digits} digits; write it shorter."
        raise InvalidRequest(message, code="invalid_json", limit="max_json_digits")
    if _is_too_deep(value, max_depth):
        message = f"The body is nested more than {max_depth} levels deep; flatten it."
        raise InvalidRequest(message, code="invalid_json", limit="max_json_depth")
    return value


async def parsed(raw: bytes) -> Any:
    """Return the parsed body for inspection only; None = it is empty or not JSON."""
    try:
        if len(raw) > _PARSE_ON_LOOP_BYTES:
            return await asyncio.to_thread(orjson.loads, raw)
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None


def _is_too_deep(value: Any, max_depth: int) -> bool:
    level = [value]
    for _ in range(max_depth):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _check_media_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "application/json").partition(";")[0]
    media_type = media_type.strip().lower()
    # curl -d sends this type for any body; forms of web pages do too, but with an Origin header.
    is_curl = media_type == "application/x-www-form-urlencoded" and "origin" not in request.headers
    if media_type != "application/json" and not media_type.endswith("+json") and not is_curl:
        raise HTTPException(415, "The content type must be application/json.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "Compressed bodies are not supported; send plain JSON.")


async def read_bytes(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """Return the raw body. Raises HTTPException 408, 413, and 499 when the client disconnects."""
    if declares_more_than(request, max_bytes):
        raise too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s), aclosing(request.stream()) as stream:
            async for chunk in stream:
                body += chunk
                if len(body) > max_bytes:
                    raise too_large(max_bytes)
    except TimeoutError:
        message = f"The body did not arrive in {timeout_s:g} s; send it faster, or in parts."
        raise OverLimit(408, message, "body_timeout_s") from None
    except ClientDisconnect:
        raise HTTPException(CLIENT_GONE, "The client closed the connection.") from None
    return bytes(body)


def declares_more_than(request: Request, max_bytes: int) -> bool:
    """Return whether the Content-Length exceeds `max_bytes`."""
    declared = request.headers.get("content-length", "")
    return declared.isdecimal() and (len(declared) >= 20 or int(declared) > max_bytes)


def too_large(max_bytes: int) -> HTTPException:
    """Return the error for a body larger than `max_bytes`."""
    # The rest of the body is read in part only (`TooLargeAnswer`), so the connection ends.
    message = f"The body is larger than the {max_bytes} bytes allowed; send less at a time."
    headers = {"connection": "close", "x-should-retry": "false"}
    return OverLimit(413, message, "max_body_bytes", headers)


def dumps(value: Any) -> bytes:
    """Return strict JSON."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(_without_surrogates(value))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value


async def written(answer: Any) -> Any:
    """Return the response with its entries in `data` already encoded, if there are many.

    A thread encodes the entries one by one, so other requests run in between.
    """
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list) or len(data) < _MANY:
        return answer
    parts = await asyncio.to_thread(lambda: [orjson.Fragment(dumps(each)) for each in data])
    return {**answer, "data": parts}


class JSONAnswer(Response):
    """A response whose body is strict JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Serialise the content."""
        return dumps(content)


class TooLargeAnswer(JSONAnswer):
    """The answer to a body that is too large: sent at once, and ended after the body.

    A connection that is closed while its client still sends is reset, and the client may lose the
    answer. So the rest of the body is read and dropped, for up to _MAX_DISCARDED_BYTES and
    `limits.body_timeout_s`; a body that declares more than these bytes is not read.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""

        async def send_on(message: Message) -> None:
            await send({**message, "more_body": True} if "body" in message else message)

        await super().__call__(scope, receive, send_on)
        request = Request(scope)
        # A client that waits for `100 Continue` sends no body.
        sends_no_more = scope["state"].get(BODY_HAS_ENDED) or "expect" in request.headers
        if not sends_no_more and not declares_more_than(request, _MAX_DISCARDED_BYTES):
            await _discard_body(receive, limit("body_timeout_s"))
        await send({"type": "http.response.body", "body": b""})


async def _discard_body(receive: Receive, timeout_s: float) -> None:
    num_left, has_more = _MAX_DISCARDED_BYTES, True
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while has_more and num_left > 0:
                message = await receive()
                has_more = message.get("more_body", False)
                num_left -= len(message.get("body", b""))
