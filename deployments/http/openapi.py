"""The bodies of requests in /openapi.json; handlers read them by themselves, so FastAPI cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from remora.deployments.http.fields import Body

_WITH_BODY = frozenset({"post", "put"})
_REFERENCE = "#/components/schemas/{model}"


def describe_bodies(app: FastAPI, bodies: Mapping[str, type[Body]]) -> None:
    """Add request bodies to the application's description of itself.

    bodies:  path -> what is sent there
    """
    generate = app.openapi

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = generate()
            _, schemas = models_json_schema(
                [(body, "validation") for body in set(bodies.values())], ref_template=_REFERENCE
            )
            components = description.setdefault("components", {}).setdefault("schemas", {})
            components |= schemas["$defs"]
            for path, body in bodies.items():
                operations = description["paths"].get(path, {})
                for method in _WITH_BODY & operations.keys():
                    operations[method]["requestBody"] = _request_body(body)
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _request_body(body: type[Body]) -> dict[str, Any]:
    schema = {"$ref": _REFERENCE.format(model=body.__name__)}
    return {"required": True, "content": {"application/json": {"schema": schema}}}
