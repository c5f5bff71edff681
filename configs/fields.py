"""Value types of configuration keys, and the base class of sections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from remora.configs.descriptions import descriptions

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)")
_UNIT_BYTES = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def _parse_size(value: Any) -> Any:
    """Convert a string such as "512MiB" to bytes; the integer check handles other values."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise PydanticCustomError(
            "size", "expected bytes as a whole number, or a size such as 512MiB or 2GiB"
        )
    return int(float(match[1]) * _UNIT_BYTES[match[2]])


def _check_power_of_two(value: int) -> int:
    if value & (value - 1):
        raise PydanticCustomError("power_of_two", "must be a power of two: 1, 2, 4, 8, 16, ...")
    return value


def _check_not_blank(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("blank", "must not be empty")
    return value


def base_url(text: str) -> str:
    """Return the URL of a server in its normal form. Raises ValueError, saying what is expected."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected http://host:port or https://host:port")
    if parts.username is not None or parts.password is not None:
        raise ValueError("expected a URL without a user and a password")
    if parts.query or parts.fragment or not text.isprintable() or " " in text:
        raise ValueError("expected a URL without a query, a fragment and blanks")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"


def _check_base_url(value: str) -> str:
    try:
        return base_url(value)
    except ValueError as error:
        raise PydanticCustomError("url", "{reason}", {"reason": str(error)}) from None


BaseUrl = Annotated[str, AfterValidator(_check_base_url)]
Bytes = Annotated[
    int,
    Field(gt=0, le=2**50),
    BeforeValidator(_parse_size),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "exclusiveMinimum": 0},
                {"type": "string", "pattern": f"^{_SIZE.pattern}$"},
            ]
        }
    ),
]
Name = Annotated[str, AfterValidator(_check_not_blank)]
PowerOfTwo = AfterValidator(_check_power_of_two)
Seconds = Annotated[float, Field(gt=0, le=86_400)]


def _check_secret(value: str) -> str:
    kind, _, rest = value.partition(":")
    if kind not in ("env", "file") or not rest.strip():
        raise PydanticCustomError(
            "secret", "expected env:NAME or file:/path, never the secret itself"
        )
    return value


Secret = Annotated[str, AfterValidator(_check_secret)]


class Section(BaseModel):
    """Base class of sections: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Add the keys' descriptions."""
        reference = handler(schema)
        properties = handler.resolve_ref_schema(reference).get("properties", {})
        for key, text in descriptions(cls).items():
            properties[key].setdefault("description", text)
        return reference

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield (key, reason) for each key that contradicts another key."""
        yield from ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, why in self._conflicts():
            raise PydanticCustomError("conflict", "{why}", {"key": key, "why": why})
        return self
