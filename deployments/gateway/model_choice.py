"""Which model a request names, and whether it requests a stream. Pure.

The model is the body's field `model`, the NAME of /v1/models/NAME, or the query's `model`.
Malformed requests are left to a replica to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from remora.configs.errors import InvalidRequest, UnknownModel
from remora.deployments.http.core.wire_formats import EVENT_STREAM, Dialect

_CARDS = "/v1/models/"
_CHATS = "/v1/chat/completions"  # without a body: stored ones
# Every model answers these alike, and these requests name none.
_SHARED_PATHS = (
    "/openapi.json",
    "/v1/responses/",
    _CHATS,
    "/api/version",
    "/version",
)
_STREAMS_ALWAYS = frozenset({"/generate_stream"})
# RTP-LLM's name of `stream`, and the objects that may hold it.
_YIELDS, _CONFIGS = "yield_generator", ("generate_config", "generation_config")
_MAX_SHOWN_CHARS = 200


def choose_model(names: Sequence[str], path: str, query: str, body: Any) -> str:
    """Return the name of the model to answer. Raises UnknownModel and InvalidRequest.

    names:  of all models; a single model gets every request
    body:   parsed; None = there is none, or it is not JSON
    """
    if len(names) == 1:
        return names[0]
    listed = ", ".join(map(repr, names))
    wanted = _named_model(path, query, body)
    if wanted is None:
        if body is None and (path == "/" or path.startswith(_SHARED_PATHS)):
            return names[0]
        message = f"model is required: this server serves {listed}."
        raise InvalidRequest(message, "model", "missing_required_parameter")
    if not isinstance(wanted, str):
        return names[0]
    # An adapter or an Ollama tag follows a colon; names may contain colons too.
    fitting = [name for name in names if f"{wanted}:".startswith(f"{name}:")]
    if not fitting:
        shown = wanted[:_MAX_SHOWN_CHARS]
        message = f"The model {shown!r} does not exist; this server serves {listed}."
        raise UnknownModel(message, "model")
    return max(fitting, key=len)


def _named_model(path: str, query: str, body: Any) -> Any:
    if path.startswith(_CARDS) and len(path) > len(_CARDS):
        return path.removeprefix(_CARDS)
    if isinstance(body, dict):
        for field in ("model", "name") if path.startswith("/api/") else ("model",):
            if body.get(field) is not None:
                return body[field]
    return parse_qs(query).get("model", [None])[-1]


def wants_stream(path: str, dialect: Dialect, body: Any) -> bool:
    """Return whether a request asks for server-sent events, so that comments may be sent."""
    if dialect.media_type != EVENT_STREAM or not isinstance(body, dict):
        return False
    return path in _STREAMS_ALWAYS or body.get("stream") is True or _yields(path, body)


def _yields(path: str, body: Mapping[str, Any]) -> bool:
    if path != "/":
        return False
    places = (body, *(body.get(name) for name in _CONFIGS))
    return any(isinstance(place, dict) and place.get(_YIELDS) is True for place in places)
