"""Limits of request bodies, and the errors of bodies that exceed them.

Body models are classes and limits are configuration values, so `apply` sets the limits of the
running task. This module does not know requests or fields.
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
    """A refusal by a limit on HTTP itself. `limit` is the key of the configuration."""

    def __init__(
        self, status: int, message: str, limit: str, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(status, message, headers)
        self.limit = limit


def apply(section: LimitsSection) -> None:
    """Set the limits of the running task."""
    _limits.set(section)


def limit(key: str) -> Any:
    """Return the running task's value of a limit."""
    return getattr(_limits.get(), key)


def over(key: str, found: int, *, param: str = "") -> PydanticCustomError:
    """Return the validation error for `found` items, or a value of `found`, above a limit."""
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
    """Raise a validation error if `value` has more items than the limit allows."""
    if len(value) > limit(key):
        raise over(key, len(value))


def max_pieces() -> int:
    """Return the limit on parts and calls of all messages together."""
    return int(max(PIECES_PER_MESSAGE * limit("max_messages"), limit("max_parts")))


def check_pieces(messages: Any) -> Any:
    """Raise a validation error if the messages together have too many parts and calls.

    With the limit of one message alone, validation could block the event loop for seconds.
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
    """Raise InvalidRequest if a request asks for more outputs than allowed."""
    allowed = limit("max_sequences")
    if found > allowed:
        message = (
            f"The request asks for {found} outputs (prompts times n, or best_of); at most"
            f" {allowed} are allowed. Send fewer at a time."
        )
        raise InvalidRequest(message, param, limit="max_sequences")


@dataclass(frozen=True, slots=True)
class AtMost:
    """Annotation that limits a body field: the size of a list, text or object, or a number.

    The check runs before validation of the entries, so a list that is too long is never read.
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
