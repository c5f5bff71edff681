"""Input items of /v1/responses."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import PlainValidator, WithJsonSchema, model_validator

from remora.deployments.http.core.body_limits import check_size
from remora.deployments.http.core.fields import Body, Label, fault, unsupported_part
from remora.deployments.http.generation.messages import CallId, ToolName

REFERENCE = "item_reference"
COMPACTION = "compaction"
_SUMMARY = "remora-summary:"  # before the base64 of a compaction item's text
_REQUIRED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "custom_tool_call": ("call_id", "name", "input"),
        "custom_tool_call_output": ("call_id", "output"),
        "reasoning": (),
        COMPACTION: ("encrypted_content",),
        REFERENCE: ("id",),
    }
)
_ITEM_TYPES = tuple(_REQUIRED)
# Type of a part -> field that holds its text.
_PART_TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "text": "text",
        "input_text": "text",
        "output_text": "text",
        "reasoning_text": "text",
        "summary_text": "text",
        "refusal": "refusal",
    }
)
_MEDIA_PARTS = ("input_image", "input_file", "input_audio", "computer_screenshot")


def _check_texts(value: Any) -> tuple[str, ...] | None:
    """Return the texts of the parts of an item."""
    if value is None:
        return None
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise fault("must be a text or a list of parts")
    check_size("max_parts", value)
    return tuple(_check_part(part, f"[{index}]") for index, part in enumerate(value))


def _check_part(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _MEDIA_PARTS:
        raise unsupported_part(f"part {place} is no text, and this model takes text only")
    name = _PART_TEXTS.get(kind) if isinstance(kind, str) else None
    text = part.get(name) if name else None
    if not isinstance(text, str):
        raise fault(f'part {place} must be {{"type": "input_text", "text": ...}}')
    return text


def _check_item_type(value: Any) -> str:
    if isinstance(value, str) and value in _ITEM_TYPES:
        return value
    known = ", ".join(_ITEM_TYPES)
    raise unsupported_part(
        f"{str(value)[:64]!r} found, but only items of these types are supported: {known}"
    )


def compacted(summary: str) -> str:
    """Return the content of a compaction item. It is encoded, not encrypted."""
    return _SUMMARY + b64encode(summary.encode("utf-8", "replace")).decode()


def _summary_in(content: str) -> str:
    """Return the summary in the content of a compaction item."""
    try:
        if content.startswith(_SUMMARY):
            return b64decode(content.removeprefix(_SUMMARY), validate=True).decode()
    except ValueError:
        pass
    raise fault("was not made by /v1/responses/compact of this server", param="encrypted_content")


Texts = Annotated[
    tuple[str, ...] | None,
    PlainValidator(_check_texts),
    WithJsonSchema({"type": ["string", "array"]}),
]


class Item(Body):
    """An input item: a message, a call, a result, reasoning, a summary, or a reference by id."""

    type: Annotated[
        str,
        PlainValidator(_check_item_type),
        WithJsonSchema({"type": "string", "enum": list(_ITEM_TYPES)}),
    ] = "message"
    id: Label | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Texts = None
    call_id: CallId | None = None
    name: ToolName | None = None
    arguments: str | None = None
    input: str | None = None
    output: Texts = None
    summary: Texts = None
    # Further fields of output items; clients send them back.
    status: str | None = None
    encrypted_content: str | None = None
    phase: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _name_kind(cls, value: Any) -> Any:
        """Add the type to an item without one: `item_reference` for a bare id, else `message`."""
        if not isinstance(value, dict) or value.get("type") is not None:
            return value
        is_bare = value.keys() <= {"id", "type"} and "id" in value
        return value | {"type": REFERENCE if is_bare else "message"}

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        for name in _REQUIRED[self.type]:
            if getattr(self, name) is None:
                raise fault(f"is required in a {self.type}", param=name)
        if self.type == COMPACTION:
            _summary_in(self.encrypted_content or "")
        return self

    @property
    def compacted_text(self) -> str:
        """The summary in a compaction item."""
        return _summary_in(self.encrypted_content or "")
