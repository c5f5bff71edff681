"""Content blocks of /v1/messages: text, documents, search results, reasoning, calls, results."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import PlainValidator, WithJsonSchema, model_validator

from remora.deployments.http.core.body_limits import check_size
from remora.deployments.http.core.fields import Body, fault, unsupported_part
from remora.deployments.http.generation.messages import CallId, ToolName

DOCUMENT, SEARCH_RESULT = "document", "search_result"
# Required fields of a block by type.
_REQUIRED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "text": ("text",),
        "thinking": ("thinking",),
        "redacted_thinking": (),
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
        DOCUMENT: ("source",),
        SEARCH_RESULT: ("source", "title", "content"),
    }
)
# Fields that blocks of each type may have, but for the type and cache_control.
_ALLOWED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "text": ("text", "citations"),
        "thinking": ("thinking", "signature"),
        "redacted_thinking": ("data",),
        "tool_use": ("id", "name", "input", "caller", "toolset_name"),
        "tool_result": ("tool_use_id", "content", "is_error", "toolset_name"),
        DOCUMENT: ("source", "title", "context", "citations"),
        SEARCH_RESULT: ("source", "title", "content", "citations"),
    }
)
BY_ROLE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "user": ("text", DOCUMENT, SEARCH_RESULT, "tool_result"),
        "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
        "system": ("text",),
    }
)
_IN_RESULTS = ("text", DOCUMENT, SEARCH_RESULT)


def _check_block_type(value: Any) -> str:
    if isinstance(value, str) and value in _REQUIRED:
        return value
    known = ", ".join(_REQUIRED)
    found = str(value)[:64]
    raise unsupported_part(
        f"{found!r} found, but only blocks of these types are supported: {known}"
    )


def _check_content(value: Any) -> str | None:
    """Return the text of a block's content: that of a tool's result or of a search result."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fault("must be a text or a list of blocks of text")
    check_size("max_parts", value)
    return "\n".join(_check_part(part, index) for index, part in enumerate(value))


def _check_part(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in _IN_RESULTS:
        raise unsupported_part(f"block [{index}] is no text, and this model takes text only")
    if kind in (DOCUMENT, SEARCH_RESULT):
        _check_citations(part.get("citations"))
    if kind == DOCUMENT:
        return document_text(_text_of(part.get("source")), part.get("title"), part.get("context"))
    if kind == SEARCH_RESULT:
        content = _check_content(part.get("content"))
        return search_text(content or "", part.get("title"), part.get("source"))
    if kind is None or not isinstance(part.get("text"), str):
        raise fault(f'block [{index}] must be {{"type": "text", "text": ...}}')
    text: str = part["text"]
    return text


def _text_of(source: Any) -> str:
    """Return the text of a document's source."""
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "text":
        if source.get("media_type") not in (None, "text/plain"):
            raise unsupported_part("only the media type text/plain is supported")
        if isinstance(source.get("data"), str):
            text: str = source["data"]
            return text
    elif kind == "content":
        content = _check_content(source.get("content"))
        if content is not None:
            return content
    elif isinstance(kind, str):
        raise unsupported_part(
            f"a source of the type {kind[:64]!r} found, but only text and content are supported: "
            "this model takes text only"
        )
    raise fault('must be {"type": "text", "media_type": "text/plain", "data": ...}')


def _check_source(value: Any) -> str | None:
    """Return the text of a document, or the source of a search result."""
    return value if value is None or isinstance(value, str) else _text_of(value)


def _check_citations(value: Any) -> Any:
    """Refuse a wish for citations. An answer that is sent back may hold a list of them."""
    if isinstance(value, dict) and value.get("enabled"):
        raise unsupported_part("citations are not available; leave them out")
    return value


def document_text(text: str, title: Any, context: Any) -> str:
    """Return a document as the model reads it."""
    return _titled("Document", text, (("Title", title), ("Context", context)))


def search_text(text: str, title: Any, source: Any) -> str:
    """Return a search result as the model reads it."""
    return _titled("Search result", text, (("Title", title), ("Source", source)))


def _titled(kind: str, text: str, lines: tuple[tuple[str, Any], ...]) -> str:
    for name, value in lines:
        if value is not None and not isinstance(value, str):
            raise fault(f"the {name.lower()} of a {kind.lower()} must be a text")
    head = [f"{name}: {value}" for name, value in lines if value]
    return "\n".join([f"[{kind}]", *head, "", text])


class Block(Body):
    """A content block."""

    type: Annotated[
        str,
        PlainValidator(_check_block_type),
        WithJsonSchema({"type": "string", "enum": list(_REQUIRED)}),
    ]
    text: str | None = None
    thinking: str | None = None
    id: CallId | None = None
    name: ToolName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: CallId | None = None
    content: Annotated[
        str | None,
        PlainValidator(_check_content),
        WithJsonSchema({"type": ["string", "array"]}),
    ] = None
    is_error: bool | None = None
    source: Annotated[
        str | None,
        PlainValidator(_check_source),
        WithJsonSchema({"type": ["string", "object"]}),
    ] = None
    title: str | None = None
    context: str | None = None
    citations: Annotated[
        Any, PlainValidator(_check_citations), WithJsonSchema({"type": ["array", "object"]})
    ] = None
    # Fields of Anthropic's own service, without effect here.
    signature: str | None = None
    data: str | None = None
    cache_control: Any = None
    caller: Any = None
    toolset_name: Any = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        for name in _REQUIRED[self.type]:
            if getattr(self, name) is None:
                raise fault(f"is required in a block of the type {self.type}", param=name)
        for name in type(self).model_fields.keys() - {"type", "cache_control"}:
            if getattr(self, name) is not None and name not in _ALLOWED[self.type]:
                raise fault(f"is no field of a block of the type {self.type}", param=name)
        return self

    @property
    def read_text(self) -> str | None:
        """The text that the model reads of a text, a document or a search result; else None."""
        if self.type == DOCUMENT:
            return document_text(self.source or "", self.title, self.context)
        if self.type == SEARCH_RESULT:
            return search_text(self.content or "", self.title, self.source)
        return self.text if self.type == "text" else None
