"""The replicas of this process's Serve deployment."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from remora.configs.errors import Unavailable
from remora.deployments.gateway.failures import client_error
from remora.deployments.live_weights.replica import ReplicaWeights, WeightsState

log = logging.getLogger(__name__)

METHOD = "change_weights"  # of LLMServer
TELL_S = 20.0


class ServePeers:
    """Peers behind a handle of the replica's own deployment."""

    def __init__(self, own: ReplicaWeights) -> None:
        self._own = own
        self._handle: DeploymentHandle | None = None

    async def all(self, operation: str, *args: Any) -> list[WeightsState | BaseException]:
        """Call each replica that Serve knows, and this one in any case."""
        timeout_s = TELL_S if operation == "tell" else None
        try:
            if self._handle is None:
                context = serve.get_replica_context()
                self._handle = serve.get_deployment_handle(context.deployment, context.app_name)
            response = self._handle.broadcast(METHOD, operation, *args)
            found = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
        except (RayServeException, RayError, TimeoutError) as error:
            if operation != "tell":
                return [Unavailable(f"The replicas cannot be reached: {error}")]
            log.info("weights: no other replica is known: %s", error)
            found = []
        answers = [
            client_error(each) if isinstance(each, BaseException) else each for each in found
        ]
        here = self._own.state.replica
        if operation == "tell" and not any(
            getattr(each, "replica", "") == here for each in answers
        ):
            answers += await asyncio.gather(self._own.call("tell"))
        return answers
