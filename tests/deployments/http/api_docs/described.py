"""Compares responses with their descriptions in /openapi.json."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import jsonschema
from fastapi import FastAPI

JSON = "application/json"


def check_described(description: dict[str, Any], response: httpx.Response) -> bool:
    """Assert that a response is as described; return whether it is one of JSON with status 200.

    Paths with parameters are not looked up.
    """
    path, method = response.request.url.path, response.request.method.lower()
    operation = description["paths"].get(path, {}).get(method)
    if operation is None or response.status_code != 200:
        return False
    content = operation["responses"]["200"].get("content", {})
    kind = response.headers.get("content-type", "").partition(";")[0]
    assert (kind in content) == bool(response.content), f"{method} {path}: {kind}"
    if kind != JSON:
        return False
    schema = content[JSON]["schema"] | {"components": description["components"]}
    try:
        jsonschema.validate(response.json(), schema)
    except jsonschema.ValidationError as error:
        raise AssertionError(f"{method} {path}: {error.json_path}: {error.message}") from None
    return True


def checking(app: FastAPI) -> Callable[[httpx.Response], Awaitable[None]]:
    """Return a hook of a client that compares all of its responses."""

    async def check(response: httpx.Response) -> None:
        await response.aread()
        check_described(app.openapi(), response)

    return check
