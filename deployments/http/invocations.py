"""/invocations of Amazon SageMaker: one path for requests of all kinds, by the fields of the body.

The first row of KINDS whose fields a body has all of decides which endpoint answers it. Joins the
APIs' folders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from remora.configs.errors import InvalidRequest
from remora.deployments.http.endpoints import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    EMBEDDINGS,
    POOLING,
    RERANK,
    SCORE,
)
from remora.deployments.http.generation.endpoint import Endpoint
from remora.deployments.http.generation.routes import read_body, respond
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.shared_paths import TGI_ENDPOINT

INVOCATIONS = "/invocations"
KINDS: Sequence[tuple[tuple[str, ...], Endpoint[Any]]] = (
    (("messages",), CHAT),
    (("prompt",), COMPLETIONS),
    (("inputs",), TGI_ENDPOINT),
    (("query", "documents"), RERANK),
    (("text_1", "text_2"), SCORE),
    (("queries", "documents"), SCORE),
    (("input",), EMBEDDINGS),
)
# Of `input`, by the task of the model; other models give embeddings.
_BY_TASK: Mapping[str, Endpoint[Any]] = {
    "classify": CLASSIFY,
    "rerank": CLASSIFY,
    "reward": POOLING,
}


def endpoint_of(body: Any, task: str) -> Endpoint[Any]:
    """Return the endpoint for a body. Raises InvalidRequest.

    task:  of the served model
    """
    given = body.keys() if isinstance(body, dict) else set()
    for fields, endpoint in KINDS:
        if given >= set(fields):
            return _BY_TASK.get(task, endpoint) if endpoint is EMBEDDINGS else endpoint
    allowed = "; ".join(" and ".join(fields) for fields, _ in KINDS)
    found = ", ".join(sorted(given)[:8])[:200] or "none"
    raise InvalidRequest(
        f"The fields of the body ({found}) do not name a task. Send one of: {allowed}.",
        code="missing_required_parameter",
    )


def invocation_routes(server: ServerState) -> APIRouter:
    """Return the router."""
    router = APIRouter(tags=["generation"])

    @router.post(INVOCATIONS)
    async def invocations(request: Request) -> Response:
        body = await read_body(server, request)
        return await respond(server, endpoint_of(body, server.plan.task), request, body)

    return router
