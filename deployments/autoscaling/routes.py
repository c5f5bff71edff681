"""GET /autoscaling/explain: the reason for the current number of replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from remora.configs.schema import ServeConfig
from remora.deployments.autoscaling.explain import explain
from remora.deployments.http.core.auth import ADMIN
from remora.deployments.http.core.wire import JSONAnswer
from remora.deployments.http.generation.server_state import ServerState

if TYPE_CHECKING:  # a server without Ray imports this module, too
    from ray.serve.handle import DeploymentHandle

EXPLAIN = "/autoscaling/explain"
OFF = (
    "Autoscaling is off: the number of replicas is parallel.num_replicas. Set "
    "autoscaling.max_replicas to turn it on."
)
NOT_YET = "The autoscaling policy has not decided anything yet; ask again in a few seconds."


def autoscaling_routes(server: ServerState) -> APIRouter:
    """Return the route of /autoscaling/explain."""
    router = APIRouter(tags=["control"])

    @router.get(EXPLAIN, dependencies=ADMIN)
    async def explain_scaling() -> Response:
        return JSONAnswer(await explanation(server.config))

    return router


async def explanation(config: ServeConfig) -> dict[str, Any]:
    """Return the last decision about this replica's deployment.

    Raises HTTPException 404 if autoscaling is off, 503 before the first decision.
    """
    if not config.autoscaling.is_on:
        raise HTTPException(404, OFF)
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        context = serve.get_replica_context()
    except RayServeException:
        raise HTTPException(404, OFF) from None
    record = await asyncio.to_thread(explain, context.app_name, context.deployment)
    if record is None:
        raise HTTPException(503, NOT_YET)
    return record


async def explanations(models: Mapping[str, DeploymentHandle | None]) -> dict[str, Any]:
    """Return the last decisions about the models behind a gateway; asks no replica.

    models:  by name; None = its number of replicas is fixed
    One model: its record; several: model -> record, None without a decision.
    Raises HTTPException 404 if autoscaling is off for all, 503 before the first decision.
    """
    records: dict[str, dict[str, Any] | None] = dict.fromkeys(models)
    for name, handle in models.items():
        if handle is not None:
            records[name] = await asyncio.to_thread(
                explain, handle.app_name, handle.deployment_name
            )
    if not any(models.values()):
        raise HTTPException(404, OFF)
    if not any(records.values()):
        raise HTTPException(503, NOT_YET)
    (first, *others) = records.values()
    return records if others or first is None else first
