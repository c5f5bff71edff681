"""Errors as clients see them: the one table from exceptions to HTTP, in OpenAI's shape.

Every response with a status of 400 or more, including those of FastAPI and Starlette, has the body
`{"error": {"message", "type", "param", "code"}}`. The cause of a 500 is in the log, never in the
body.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from starlette.exceptions import HTTPException

from remora.configs.errors import (
    AdapterNotFound,
    CapacityError,
    EngineError,
    InvalidRequest,
    NotFinite,
    QueueFull,
    RateLimited,
    RemoraError,
    RequestCrashed,
    RequestError,
    RequestTimedOut,
    UnknownModel,
)

log = logging.getLogger(__name__)

UNSUPPORTED = "unsupported"
CLIENT_GONE = 499


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, type and code of an error response."""

    status: int
    type: str
    code: str | None


# The first row whose class matches decides; the error's own code takes precedence.
_TABLE: tuple[tuple[type[RemoraError], Answer], ...] = (
    (UnknownModel, Answer(404, "not_found_error", None)),
    (AdapterNotFound, Answer(404, "not_found_error", None)),
    (RequestError, Answer(400, "invalid_request_error", None)),
    (QueueFull, Answer(429, "rate_limit_error", "queue_full")),
    (RateLimited, Answer(429, "rate_limit_error", "rate_limit_exceeded")),
    (RequestTimedOut, Answer(504, "timeout_error", "timeout")),
    (CapacityError, Answer(503, "overloaded_error", "unavailable")),
    (RequestCrashed, Answer(500, "server_error", "replicas_crashed")),
    (NotFinite, Answer(500, "server_error", "not_finite")),
    (EngineError, Answer(503, "server_error", "engine_failed")),  # another replica can answer
)
# The request itself may be the cause, so a retry may well fail again.
_LIKELY_AGAIN = (RequestCrashed, NotFinite)
_INTERNAL = Answer(500, "server_error", "internal_error")
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
_STATUSES: Mapping[int, Answer] = MappingProxyType(
    {
        401: Answer(401, "authentication_error", "invalid_api_key"),
        403: Answer(403, "permission_error", "permission_denied"),
        404: Answer(404, "not_found_error", "not_found"),
        405: Answer(405, "invalid_request_error", "method_not_allowed"),
        408: Answer(408, "timeout_error", "timeout"),
        409: Answer(409, "conflict_error", "conflict"),
        413: Answer(413, "invalid_request_error", "body_too_large"),
        414: Answer(414, "invalid_request_error", "url_too_long"),
        415: Answer(415, "invalid_request_error", "unsupported_media_type"),
        429: Answer(429, "rate_limit_error", "queue_full"),
        431: Answer(431, "invalid_request_error", "headers_too_large"),
        CLIENT_GONE: Answer(CLIENT_GONE, "invalid_request_error", "client_closed_request"),
        503: Answer(503, "overloaded_error", "unavailable"),
        504: Answer(504, "timeout_error", "timeout"),
    }
)


def unsupported(param: str, message: str) -> InvalidRequest:
    """Return the error for a known field whose value is not supported."""
    return InvalidRequest(message, param, UNSUPPORTED)


def answer_to(error: BaseException) -> Answer:
    """Return the table row for any exception."""
    if isinstance(error, HTTPException):
        return answer_to_status(error.status_code)
    error = _known(error)
    return next((row for kind, row in _TABLE if isinstance(error, kind)), _INTERNAL)


def _known(error: BaseException) -> BaseException:
    """Return the error that the table knows, where no more files could be opened for a while."""
    if isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR:
        return CapacityError("The server can open no more files at the moment. Please try again.")
    return error


def answer_to_status(status: int) -> Answer:
    """Return the row for an error that has only a status, from Starlette or Serve."""
    fallback = _INTERNAL.type if status >= 500 else "invalid_request_error"
    return _STATUSES.get(status, Answer(status, fallback, None))


def error_body(error: BaseException) -> dict[str, Any]:
    """Return the JSON body for an exception; an error event within a stream uses it too."""
    error = _known(error)
    answer = answer_to(error)
    message, param, code = _INTERNAL_MESSAGE, None, answer.code
    if isinstance(error, RequestError):
        message, param, code = error.message, error.param, error.code
    elif isinstance(error, CapacityError):
        message = error.message
    elif isinstance(error, _LIKELY_AGAIN):
        message = str(error)
    elif isinstance(error, EngineError):
        message = "The engine failed while it worked on this request. Please try again."
    elif isinstance(error, HTTPException):
        message = _PLAIN_MESSAGES.get(error.detail, error.detail)
    return shape(message, answer, param=param, code=code)


# Starlette's message -> the message that replaces it.
_PLAIN_MESSAGES = {
    "Not Found": "There is nothing at this path. /docs lists what this server answers, unless it "
    "is turned off (api.docs).",
    "Method Not Allowed": "This path has other methods; the header `allow` names them.",
}
_INTERNAL_MESSAGE = "Something went wrong on our side; the server's log says more."


def shape(
    message: str, answer: Answer, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's error object."""
    return {
        "error": {
            "message": message,
            "type": answer.type,
            "param": param,
            "code": code or answer.code,
        }
    }


def error_headers(error: BaseException) -> dict[str, str]:
    """Return the headers that say whether and when a client should retry."""
    error = _known(error)
    if isinstance(error, RequestTimedOut):
        return {"x-should-retry": "false"}
    if isinstance(error, CapacityError):
        wait = max(1, math.ceil(error.retry_after_s))
        return {"retry-after": str(wait), "x-should-retry": "true"}
    if isinstance(error, EngineError) and not isinstance(error, _LIKELY_AGAIN):
        return {"retry-after": "1", "x-should-retry": "true"}
    own = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return own | {"x-should-retry": "false"}


def log_error(error: BaseException, request_id: str) -> None:
    """Log a server error with its traceback; client errors are counted, not logged.

    An engine failure fails all requests, so the engine logs its traceback, once.
    """
    if isinstance(error, EngineError) or _known(error) is not error:
        log.error("request %s failed: %s", request_id, error)
    elif answer_to(error).status == 500:
        log.error("request %s failed", request_id, exc_info=error)
