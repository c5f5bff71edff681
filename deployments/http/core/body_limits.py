"""Limits of request bodies, and the errors of bodies that exceed them.

Bodies are classes, and limits are values of the configuration: `apply` sets the limits of the
running task. Knows nothing of requests and fields.
"""

from __future__ import annotations

from collections.abc import Sized
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from starlette.exceptions import HTTPException

from remora.configs.errors import InvalidRequest
from remora.configs.sections.limits import LimitsSection

DEFAULTS = LimitsSection()
PIECES_PER_MESSAGE = 8
_limits: ContextVar[LimitsSection] = ContextVar("_limits", default=DEFAULTS)
_JSON_BOUNDS = {"array": "maxItems", "object": "maxProperties", "integer": "maximum"}


class OverLimit(HTTPException):
    """A refusal by a limit of HTTP itself. `limit` is the key of the configuration."""

    def __init__(
        self, status: int, message: str, limit: str, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(status, message, headers)
        self.limit = limit


def apply(section: LimitsSection) -> None:
    """Let these limits count for what the running task reads from now on."""
    _limits.set(section)


def limit(key: str) -> Any:
    """Return the value of a limit."""
    return getattr(_limits.get(), key)


def over(key: str, found: int, *, param: str = "") -> PydanticCustomError:
    """Return the error of a validator that found more than a limit allows."""
    message = f"is {found}" if key in _VALUES else f"has {found} {_UNITS[key]}"
    message = f"{message}; at most {limit(key)} {'is' if key in _VALUES else 'are'} allowed"
    return PydanticCustomError(
        "value", "{message}", {"message": message, "param": param, "limit": key}
    )


_VALUES = ("max_n", "max_top_logprobs")
_UNITS = {
    "max_messages": "entries",
    "max_parts": "parts",
    "max_tools": "tools",
    "max_stops": "entries",
    "max_stop_chars": "characters",
    "max_logit_biases": "entries",
    "max_prompts": "prompts",
    "max_inputs": "texts",
}


def check_size(key: str, value: Sized) -> None:
    """Raise the error of a validator when a value has more than a limit allows."""
    if len(value) > limit(key):
        raise over(key, len(value))


def max_pieces() -> int:
    """Return how many parts and calls all messages together may have."""
    return int(max(PIECES_PER_MESSAGE * limit("max_messages"), limit("max_parts")))


def check_pieces(messages: Any) -> Any:
    """Raise the error of a validator when messages together have too many parts and calls.

    As many as each of them may have, they would be read for seconds while everybody waits.
    """
    if not isinstance(messages, list):
        return messages
    found = sum(
        len(inner)
        for message in messages
        if isinstance(message, dict)
        for inner in message.values()
        if isinstance(inner, list)
    )
    if found > max_pieces():
        message = f"has {found} parts and calls; at most {max_pieces()} are allowed in all"
        context = {"message": message, "param": "", "limit": "max_messages"}
        raise PydanticCustomError("value", "{message}", context)
    return messages


def check_sequences(found: int, param: str) -> None:
    """Raise InvalidRequest when a request asks for more outputs than one may."""
    allowed = limit("max_sequences")
    if found > allowed:
        message = (
            f"The request asks for {found} outputs (prompts times n, or best_of); at most"
            f" {allowed} are allowed. Send fewer at a time."
        )
        raise InvalidRequest(message, param, limit="max_sequences")


@dataclass(frozen=True, slots=True)
class AtMost:
    """Annotation of a field of a body: a list, text or object no longer, a number no larger.

    Checked before the entries: a list that is too long is refused without reading them.
    """

    key: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        described = handler(schema)
        bound = _JSON_BOUNDS.get(described.get("type", ""))
        return described if bound is None else {**described, bound: getattr(DEFAULTS, self.key)}

    def _checked(self, value: Any) -> Any:
        if isinstance(value, list | str | dict):
            check_size(self.key, value)
        elif isinstance(value, int) and value > limit(self.key):
            raise over(self.key, value)
        return value
