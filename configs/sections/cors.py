"""The section `api.cors`: web pages of other origins that browsers let use this server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from remora.configs.fields import Name, Section

ANY = "*"
# As browsers send it: scheme, host and port, without a path.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s*]+")


def _check_origin(value: str) -> str:
    if _ORIGIN.fullmatch(value) is None:
        raise PydanticCustomError(
            "origin", "expected scheme, host and port without a path: https://host:8443; or *"
        )
    return value


Method = Literal["*", "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
Origin = Annotated[str, AfterValidator(_check_origin)]


def _all_methods() -> list[Method]:
    return ["*"]


class CorsSection(Section):
    """Web pages of other origins (CORS): which may read this server's answers."""

    origins: Annotated[list[Origin], Field(min_length=1, max_length=256)]
    """Origins of the pages, such as https://chat.example.com, with the port if it is not the
    scheme's; * = all pages."""

    headers: Annotated[list[Name], Field(min_length=1, max_length=256)] = Field(
        default_factory=lambda: [ANY]
    )
    """Request headers that the pages may send; * = any."""

    methods: Annotated[list[Method], Field(min_length=1, max_length=16)] = Field(
        default_factory=_all_methods
    )
    """HTTP methods that the pages may use; * = all that routes have."""

    credentials: bool = False
    """Whether browsers send cookies and HTTP authentication, for a proxy in front that reads them;
    API keys in headers need no credentials. Needs named origins."""

    max_age_s: Annotated[int, Field(ge=0, le=86_400)] = 600
    """Seconds for which a browser keeps the answer to a preflight request."""

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        if self.credentials and ANY in self.origins:
            yield "credentials", "any page could act for its visitors: name the origins"
