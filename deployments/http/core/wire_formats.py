"""The wire format of each API: its errors, the frames of its streams, and pages of lists.

A route's format follows from its path and, for paths that several APIs share, from
`api.generate_dialect` or the body (`shared_paths.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from remora.configs.errors import EngineError, InvalidRequest, PromptTooLong
from remora.deployments.http.core.errors import UNSUPPORTED, answer_to, error_body
from remora.deployments.http.core.wire import dumps

EVENT_STREAM = "text/event-stream"


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + dumps(chunk) + b"\n\n"


def _named_event(chunk: Mapping[str, Any]) -> bytes:
    """Return the frame of a chunk as an event named by the chunk's `type`."""
    return b"event: " + str(chunk["type"]).encode() + b"\n" + _event(chunk)


def _bare_event(chunk: Mapping[str, Any]) -> bytes:
    """Return the frame of a chunk for clients that strip exactly `data:`, without a space."""
    return b"data:" + dumps(chunk) + b"\n\n"


def _line(chunk: Mapping[str, Any]) -> bytes:
    return dumps(chunk) + b"\n"


def _status(error: BaseException) -> int:
    return answer_to(error).status


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The wire format of one family of APIs.

    error:       body of an error
    late_error:  an error as a chunk of a stream, given the number of chunks before it; None = as
                 `error`
    status:      HTTP status of an error
    frame:       one chunk of a stream as bytes
    last:        bytes after the last chunk or an error
    keep_alive:  bytes sent after a pause; empty = none
    media_type:  of streams
    id_header:   header with the request's id, which errors then hold too as `request_id`; "" = none
    """

    error: Callable[[BaseException], dict[str, Any]] = error_body
    late_error: Callable[[BaseException, int], dict[str, Any]] | None = None
    status: Callable[[BaseException], int] = _status
    frame: Callable[[Mapping[str, Any]], bytes] = _event
    last: bytes = b"data: [DONE]\n\n"
    keep_alive: bytes = b": keep-alive\n\n"
    media_type: str = EVENT_STREAM
    id_header: str = ""

    def error_of(self, error: BaseException, request_id: str) -> dict[str, Any]:
        """Return the body of an error that answers a request."""
        body = self.error(error)
        return body | {"request_id": request_id} if self.id_header and request_id else body

    def error_frame(self, error: BaseException, place: int) -> bytes:
        """Return the frame of an error in a stream, with `place` chunks before it."""
        if self.late_error is None:
            return self.frame(self.error(error))
        return self.frame(self.late_error(error, place))


def _anthropic_error(error: BaseException) -> dict[str, Any]:
    message = error_body(error)["error"]["message"]
    return anthropic_error(_named_status(error), message)


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Return Anthropic's error object for a status."""
    return {"type": "error", "error": {"type": _kind(status, _ANTHROPIC_TYPES), "message": message}}


def _named_status(error: BaseException) -> int:
    """Return the status that names an error. A failed engine is answered as an overload is."""
    return 500 if isinstance(error, EngineError) else answer_to(error).status


def _kind(status: int, kinds: Mapping[int, str]) -> str:
    return kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")


def anthropic_page(
    items: Sequence[dict[str, Any]], limit: int, before_id: str | None, after_id: str | None
) -> dict[str, Any]:
    """Return Anthropic's page after or before the object of an id. Raises InvalidRequest."""
    if before_id is not None and after_id is not None:
        raise InvalidRequest("before_id cannot be combined with after_id.", "before_id")
    ids = [item["id"] for item in items]
    for name, cursor in (("before_id", before_id), ("after_id", after_id)):
        if cursor is not None and cursor not in ids:
            raise InvalidRequest(f"{name} is not the id of an object in this list.", name)
    if before_id is not None:
        items = items[: ids.index(before_id)]
        page, has_more = items[-limit:], len(items) > limit
    else:
        items = items[ids.index(after_id) + 1 :] if after_id is not None else items
        page, has_more = items[:limit], len(items) > limit
    return {
        "data": list(page),
        "has_more": has_more,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


_ANTHROPIC_TYPES = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)


def _responses_event(error: BaseException, place: int) -> dict[str, Any]:
    inner = error_body(error)["error"]
    fields = {name: inner[name] for name in ("code", "message", "param")}
    return {"type": "error", **fields, "sequence_number": place}


def _ollama_error(error: BaseException) -> dict[str, Any]:
    return {"error": error_body(error)["error"]["message"]}


_TGI_TYPES = MappingProxyType({400: "validation", 429: "overloaded", 503: "overloaded"})


def _tgi_status(error: BaseException) -> int:
    status = answer_to(error).status
    return 422 if status == 400 else status


def _tgi_error(error: BaseException) -> dict[str, Any]:
    kind = _TGI_TYPES.get(_named_status(error), "generation")
    return {"error": error_body(error)["error"]["message"], "error_type": kind}


_LLAMA_TYPES = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        503: "unavailable_error",
    }
)


def _llama_error(error: BaseException) -> dict[str, Any]:
    status, inner = answer_to(error).status, error_body(error)["error"]
    found = {"code": status, "type": _kind(_named_status(error), _LLAMA_TYPES)}
    found |= {name: inner[name] for name in ("message", "param")}
    if isinstance(error, PromptTooLong):
        found["type"] = "exceed_context_size_error"
        numbers = {"n_prompt_tokens": error.num_tokens, "n_ctx": error.max_tokens}
        found |= {name: number for name, number in numbers.items() if number is not None}
    return {"error": found}


def _flat_error(error: BaseException) -> dict[str, Any]:
    """Return SGLang's error object, with OpenAI's inside."""
    body = error_body(error)
    flat = {name: body["error"][name] for name in ("message", "type", "param")}
    return {"object": "error", **flat, "code": answer_to(error).status, **body}


def _rtp_kind(error: BaseException) -> tuple[int, str]:
    status, code = answer_to(error).status, error_body(error)["error"]["code"]
    if isinstance(error, PromptTooLong):
        return 511, "LONG_PROMPT_ERROR"
    if code in (UNSUPPORTED, "not_offered"):
        return 515, "UNSUPPORTED_OPERATION"
    if status == 429:
        return 409, "CONCURRENCY_LIMIT_ERROR"
    if status in (408, 504):
        return 603, "GENERATE_TIMEOUT"
    return (514, "UNKNOWN_ERROR") if status >= 500 else (507, "ERROR_INPUT_FORMAT_ERROR")


def _rtp_error(error: BaseException) -> dict[str, Any]:
    """Return RTP-LLM's error object, with OpenAI's inside."""
    number, name = _rtp_kind(error)
    body = error_body(error)
    about = {"error_code": number, "error_code_str": f"{number}_{name}"}
    return {**about, "message": body["error"]["message"], **body}


def _rtp_event(chunk: Mapping[str, Any]) -> bytes:
    return b"data:" + dumps(chunk) + b"\r\n\r\n"


def _cohere_error(error: BaseException) -> dict[str, Any]:
    body = error_body(error)
    return {"message": body["error"]["message"], **body}


def _cohere_event(error: BaseException, place: int) -> dict[str, Any]:
    message = error_body(error)["error"]["message"]
    return {"type": "message-end", "delta": {"finish_reason": "ERROR", "error": message}}


OPENAI = Dialect()
RESPONSES = Dialect(late_error=_responses_event, frame=_named_event, last=b"")
ANTHROPIC = Dialect(
    error=_anthropic_error,
    frame=_named_event,
    last=b"",
    keep_alive=_named_event({"type": "ping"}),
    id_header="request-id",
)
OLLAMA = Dialect(
    error=_ollama_error,
    frame=_line,
    last=b"",
    keep_alive=b"",
    media_type="application/x-ndjson",
)
TGI = Dialect(error=_tgi_error, status=_tgi_status, last=b"")
LIGHTLLM = Dialect(frame=_bare_event, last=b"")
LLAMACPP = Dialect(error=_llama_error, last=b"")
RTP_LLM = Dialect(error=_rtp_error, frame=_rtp_event, last=b"data:[done]\r\n\r\n")
SGLANG = Dialect(error=_flat_error)
COHERE = Dialect(error=_cohere_error, late_error=_cohere_event, frame=_named_event, last=b"")

# All keep-alives of the dialects.
KEEP_ALIVES = frozenset({OPENAI.keep_alive, ANTHROPIC.keep_alive})

_BY_PATH = (
    ("/v1/messages", ANTHROPIC),
    ("/v1/responses", RESPONSES),
    ("/api", OLLAMA),
    ("/info", TGI),
    ("/embed", TGI),
    ("/embed_all", TGI),
    ("/embed_sparse", TGI),
    ("/predict", TGI),
    ("/similarity", TGI),
    ("/v2/chat", COHERE),
    ("/v2/embed", COHERE),
    ("/v2/rerank", COHERE),
    ("/completion", LLAMACPP),
    ("/infill", LLAMACPP),
    ("/apply-template", LLAMACPP),
    ("/props", LLAMACPP),
    ("/slots", LLAMACPP),
    ("/batch_infer", RTP_LLM),
    ("/tokenizer/encode", RTP_LLM),
    ("/chat/render", RTP_LLM),
    ("/v1/chat/render", RTP_LLM),
    ("/v1/embeddings/similarity", RTP_LLM),
    ("/v1/embeddings/sparse", RTP_LLM),
    ("/v1/embeddings/colbert", RTP_LLM),
    ("/v1/classifier", RTP_LLM),
    ("/v1/reranker", RTP_LLM),
    ("/worker_status", RTP_LLM),
    ("/cache_status", RTP_LLM),
    ("/rtp_llm", RTP_LLM),
)
# Paths that several APIs share, by `api.generate_dialect`.
_SHARED: Mapping[str, Mapping[str, Dialect]] = MappingProxyType(
    {
        "auto": {"/generate": OPENAI, "/generate_stream": TGI, "/": TGI},
        "sglang": {"/generate": OPENAI, "/generate_stream": TGI, "/": TGI},
        "tgi": {"/generate": TGI, "/generate_stream": TGI, "/": TGI},
        "lightllm": {"/generate": LIGHTLLM, "/generate_stream": LIGHTLLM, "/": LIGHTLLM},
    }
)


def dialect_of(path: str, generate: str = "auto") -> Dialect:
    """Return the dialect of a path, whether or not the path exists.

    generate:  `api.generate_dialect`
    """
    shared = _SHARED[generate].get(path)
    if shared is not None:
        return shared
    below = f"{path}/"
    return next((row for prefix, row in _BY_PATH if below.startswith(f"{prefix}/")), OPENAI)
