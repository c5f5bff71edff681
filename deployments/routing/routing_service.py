"""The deployment that HAProxy asks for a replica, where a policy other than HAProxy's own applies.

It reads what HAProxy sends of a request (`haproxy_hook.py`), makes the route key as a gateway does,
and lets the replicas' router choose. The request and its response do not pass through it, so it
does not see a request end. On any failure HAProxy chooses by fewest connections: the preference is
lost, not the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from remora.configs.errors import ConfigError
from remora.configs.live_update import ROUTING_SERVICE, with_user_config
from remora.configs.load import parse_args
from remora.configs.schema import ServeConfig
from remora.configs.sections.routing import NEEDS_BODY
from remora.deployments.http.core.auth import Access, Role
from remora.deployments.http.core.wire import parsed, read_bytes
from remora.deployments.ray_private import choose_replica
from remora.deployments.routing.haproxy_hook import (
    MAX_BODY_BYTES,
    PATH_HEADER,
    ROUTE_PATH,
    TRUNCATED_HEADER,
    route_response,
)
from remora.deployments.routing.key import RouteKey
from remora.deployments.routing.prompt_keys import PromptKeys
from remora.deployments.serve_context import log_through_serve

# HAProxy has read the body before it asks, and gives up after 5 s.
READ_TIMEOUT_S = 1.0
CHOOSE_TIMEOUT_S = 4.0

log = logging.getLogger(__name__)


def routing_service_options(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Serve's options of the routing service; Serve runs one per HAProxy.

    model:  Serve's options of the replicas
    """
    max_requests = model["max_ongoing_requests"]
    return {
        "name": ROUTING_SERVICE,
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": max_requests,
        "max_queued_requests": max_requests,
        "max_constructor_retry_count": 2,
        **{key: model[key] for key in ("health_check_period_s", "health_check_timeout_s")},
    }


class RoutingService:
    """Routes for one model. Raises ConfigError when the configuration is not valid.

    handle:  of the replicas
    """

    async def __init__(  # type: ignore[misc]
        self, args: Mapping[str, Any], handle: DeploymentHandle
    ) -> None:
        log_through_serve()
        self._args = args
        self._handle = handle
        config = self._adopt(None)
        self._keys = await asyncio.to_thread(PromptKeys, config)
        self._needs_path = config.routing.policy in NEEDS_BODY

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the HTTP application; Serve calls this once, after the constructor."""
        return Starlette(routes=[Route(ROUTE_PATH, self._route, methods=["POST"])])

    async def reconfigure(self, user_config: Mapping[str, Any] | None, rank: object = None) -> None:
        """Apply the API keys in `user_config`.

        rank:  see `LLMServer.reconfigure`
        """
        try:
            self._adopt(user_config)
        except ConfigError as error:
            log.error("routing service: refused user_config and kept the former one:\n%s", error)

    def _adopt(self, user_config: Mapping[str, Any] | None) -> ServeConfig:
        config = parse_args(with_user_config(self._args, user_config))
        # The replica authorises the request; here a key only decides whether to prepare the prompt.
        self._access = Access.of(config, is_local=False)
        return config

    async def _route(self, request: Request) -> Response:
        body = await read_bytes(request, MAX_BODY_BYTES, READ_TIMEOUT_S)
        key = await self._key(request.headers.get(PATH_HEADER), _headers(request), body)
        try:
            async with asyncio.timeout(CHOOSE_TIMEOUT_S):
                replica = await choose_replica(self._handle, key)
            return Response(route_response(replica), media_type="application/json")
        except (RayServeException, RayError, TimeoutError) as error:
            log.warning("routing service: no replica was chosen: %r", error)
            return Response("no replica was chosen", 503)

    async def _key(self, path: str | None, headers: Headers, body: bytes) -> RouteKey:
        """Return a request's route key; that of an unauthorised request is empty.

        path:  of the client's request; None if HAProxy did not send it
        """
        if self._access.role(headers) is Role.STRANGER:
            return RouteKey()
        if path is None and self._needs_path:
            log.warning("routing service: HAProxy sends no paths, so requests are routed by load")
            self._needs_path = False
        path = _without_prefix(path or "", self._keys.paths)
        owner = self._access.owner(headers)
        return await self._keys.of(path, headers, await parsed(body), owner)


def _headers(request: Request) -> Headers:
    """Return the client's headers, with the length of the whole body where HAProxy sends it."""
    headers = MutableHeaders(raw=list(request.headers.raw))
    _, _, num_bytes = headers.get(TRUNCATED_HEADER, "").partition("/")
    if num_bytes:
        headers["content-length"] = num_bytes
    return headers


def _without_prefix(path: str, known: Iterable[str]) -> str:
    """Return the known path that a path ends with, whatever the application's route prefix."""
    return max((end for end in known if path.endswith(end)), key=len, default=path)
