"""One model behind a gateway: its Serve deployment, and the requests to all its replicas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import orjson
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers

from remora.configs.schema import ServeConfig
from remora.deployments.gateway.carrier import Carrier
from remora.deployments.gateway.crashes import CrashCounts
from remora.deployments.gateway.merge import WholeAnswer, no_answer
from remora.deployments.gateway.metrics import GatewayMetrics
from remora.deployments.gateway.tunnel import Tunnel
from remora.deployments.gateway.wait_queue import Phase, WaitQueue
from remora.deployments.routing.key import RouteKey

ASK_TIMEOUT_S = 30.0
# A list of models is served from memory this long.
LISTED_S = 10.0

log = logging.getLogger(__name__)

KeyMaker = Callable[[str, Headers, Any, str], Awaitable[RouteKey]]


class GatewayModel:
    """One model.

    is_autoscaled:  whether the number of replicas follows the load
    key_of:         makes a request's route key: (path, headers, parsed body, owner) -> key
    """

    def __init__(
        self,
        name: str,
        handle: DeploymentHandle,
        config: ServeConfig,
        tunnel: Tunnel,
        metrics: GatewayMetrics,
        *,
        key_of: KeyMaker,
    ) -> None:
        self.name = name
        self.handle = handle
        self.is_autoscaled = config.autoscaling.is_on
        self.key_of = key_of
        routing = config.routing
        wait_queue = WaitQueue(
            partial(_phase_of, handle),
            max_held=routing.max_held_requests,
            max_wait_s=routing.hold_timeout_s,
        )
        self.carrier = Carrier(
            handle.options(method_name="relay"),
            tunnel,
            wait_queue,
            CrashCounts(max_crashes=routing.max_crashes),
            metrics.failures(name),
            resumes=routing.resume_on_failure,
        )
        self._created = int(time.time())
        self._listings: dict[str, bytes] = {}
        self._listed_at: dict[str, float] = {}

    def num_held(self) -> int:
        """Return how many requests wait for a first replica."""
        return self.carrier.wait_queue.num_held

    async def listing(self, path: str, scope: Mapping[str, Any]) -> bytes | None:
        """Return the list of models at `path` by a replica, from memory while there is none.

        None if there was no replica yet and the list cannot be made without one.
        """
        is_old = time.monotonic() - self._listed_at.get(path, -LISTED_S) >= LISTED_S
        if is_old and await self.carrier.wait_queue.phase() is Phase.READY:
            for answer in await self.ask_all(scope, b""):
                if answer.status == 200:
                    self._listings[path] = answer.body
                    self._listed_at[path] = time.monotonic()
        if path == "/v1/models":
            return self._listings.setdefault(path, orjson.dumps(self._minimal_list()))
        return self._listings.get(path)

    def _minimal_list(self) -> dict[str, Any]:
        """Return the list for a model that has had no replica yet."""
        card = {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "remora",
            "root": self.name,
            "parent": None,
            "max_model_len": None,
        }
        return {"object": "list", "data": [card]}

    async def ask_all(self, scope: Mapping[str, Any], body: bytes) -> list[WholeAnswer]:
        """Send a small request to all replicas and return their whole answers.

        The answer of a replica that fails or is slow is a 503.
        """
        try:
            responses = self.handle.broadcast("answer", scope, body)
            found = await responses.results_async(timeout_s=ASK_TIMEOUT_S, return_exceptions=True)
        except (RayServeException, RayError, TimeoutError) as error:
            log.info("gateway: model %s has no replica to ask: %s", self.name, error)
            return []
        return [answer if isinstance(answer, WholeAnswer) else no_answer() for answer in found]


async def _phase_of(handle: DeploymentHandle) -> Phase | None:
    """Return the phase of a deployment's first replica, as Serve's controller knows it.

    None if the controller does not answer, for example while it restarts, or if it cannot be asked:
    Serve imports modules for that, and there may be no descriptor for their files.
    """
    try:
        status = await asyncio.to_thread(serve.status)
    except (RayServeException, RayError, OSError) as error:
        log.warning("gateway: Serve's controller did not answer: %s", error)
        return None
    application = status.applications.get(handle.app_name)
    deployment = application and application.deployments.get(handle.deployment_name)
    if not deployment:
        return Phase.PLACING
    if deployment.replica_states.get("RUNNING", 0):
        return Phase.READY
    is_placed = "to be scheduled" not in deployment.message
    is_starting = deployment.replica_states.get("STARTING", 0) > 0
    return Phase.LOADING if is_starting and is_placed else Phase.PLACING
