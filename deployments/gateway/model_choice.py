"""Which model a request is for, and whether it asks for a stream. Pure.

The field `model` of a body says it; /v1/models/NAME says it in the path; elsewhere it may stand in
the query, as `?model=NAME`. What is malformed is left to a replica to refuse, in its own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

from remora.configs.errors import InvalidRequest, UnknownModel
from remora.deployments.http.core.wire_formats import EVENT_STREAM, Dialect

_CARDS = "/v1/models/"
# The same whichever model answers; nothing in these requests names one.
_SHARED_PATHS = ("/docs", "/redoc", "/openapi.json", "/v1/responses/", "/api/version")
_STREAMS_ALWAYS = frozenset({"/generate_stream"})
_MAX_SHOWN_CHARS = 200


def choose(names: Sequence[str], path: str, query: str, body: Any) -> str:
    """Return the name of the model that is to answer. Raises UnknownModel and InvalidRequest.

    names:  of all models; of one that is alone, everything is its own to judge
    body:   parsed; None = there is none, or it is no JSON
    """
    if len(names) == 1:
        return names[0]
    listed = ", ".join(map(repr, names))
    asked = _asked_for(path, query, body)
    if asked is None:
        if body is None and _is_shared(path):
            return names[0]
        message = f"model is required: this server serves {listed}."
        raise InvalidRequest(message, "model", "missing_required_parameter")
    if not isinstance(asked, str):
        return names[0]
    # Adapters and tags of Ollama's are written behind a colon, which names may have themselves.
    fitting = [name for name in names if f"{asked}:".startswith(f"{name}:")]
    if not fitting:
        shown = asked[:_MAX_SHOWN_CHARS]
        message = f"The model {shown!r} does not exist; this server serves {listed}."
        raise UnknownModel(message, "model")
    return max(fitting, key=len)


def _asked_for(path: str, query: str, body: Any) -> Any:
    if path.startswith(_CARDS) and len(path) > len(_CARDS):
        return path.removeprefix(_CARDS)
    if isinstance(body, dict):
        for field in ("model", "name") if path.startswith("/api/") else ("model",):
            if body.get(field) is not None:
                return body[field]
    return parse_qs(query).get("model", [None])[-1]


def _is_shared(path: str) -> bool:
    return path == "/" or any(path.startswith(shared) for shared in _SHARED_PATHS)


def asks_for_stream(path: str, dialect: Dialect, body: Any) -> bool:
    """Return whether a request asks for server-sent events, so that comments may come first."""
    if dialect.media_type != EVENT_STREAM or not isinstance(body, dict):
        return False
    return path in _STREAMS_ALWAYS or body.get("stream") is True
