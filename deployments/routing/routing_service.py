"""The deployment that HAProxy asks which replica is to answer, where a policy of ours decides that.

It reads what HAProxy shows of a request, makes its key as a gateway does, and lets the replicas'
router choose; the request and its answer go past it. So it holds nothing, and does not hear how a
request ends. Whatever goes wrong here, HAProxy then chooses by itself, by fewest connections: a
preference is lost, not a request.
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
from remora.deployments.routing.haproxy_hook import (
    CUT_HEADER,
    PATH_HEADER,
    QUESTION,
    SHOWN_BYTES,
    answer,
    pick,
)
from remora.deployments.routing.key import RouteKey
from remora.deployments.routing.prompt_keys import PromptKeys
from remora.deployments.serve_context import log_through_serve

# HAProxy shows what it has already, and gives up when it has waited 5 s.
READ_TIMEOUT_S = 1.0
PICK_TIMEOUT_S = 4.0

log = logging.getLogger(__name__)


def routing_service_options(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Serve's options of the chooser. Serve starts one beside each HAProxy by itself.

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
    """Chooses for one model. Raises ConfigError when the configuration is not valid.

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
        return Starlette(routes=[Route(QUESTION, self._choose, methods=["POST"])])

    async def reconfigure(self, user_config: Mapping[str, Any] | None, rank: object = None) -> None:
        """Let the keys that `user_config` says hold from now on.

        rank:  see `LLMServer.reconfigure`
        """
        try:
            self._adopt(user_config)
        except ConfigError as error:
            log.error("user_config was refused, all stays as it was:\n%s", error)

    def _adopt(self, user_config: Mapping[str, Any] | None) -> ServeConfig:
        config = parse_args(with_user_config(self._args, user_config))
        # Strangers are refused by the replica; whether anything is for the operator is its to say.
        self._access = Access.of(config.api, is_local=False)
        return config

    async def _choose(self, request: Request) -> Response:
        shown = await read_bytes(request, SHOWN_BYTES, READ_TIMEOUT_S)
        key = await self._key(request.headers.get(PATH_HEADER), _headers(request), shown)
        try:
            async with asyncio.timeout(PICK_TIMEOUT_S):
                name = await pick(self._handle, key)
            return Response(answer(name), media_type="application/json")
        except (RayServeException, RayError, TimeoutError) as error:
            log.warning("no replica was chosen: %r", error)
            return Response("no replica was chosen", 503)

    async def _key(self, path: str | None, headers: Headers, shown: bytes) -> RouteKey:
        """Return the key of a request. Nothing is prepared for those who will be refused.

        path:  that the client has asked for; None = it is not shown
        """
        if self._access.role(headers) is Role.STRANGER:
            return RouteKey()
        if path is None and self._needs_path:
            log.warning("HAProxy does not say which path was asked for: requests go by load alone")
            self._needs_path = False
        path = _mounted(path or "", self._keys.paths)
        return await self._keys.of(path, headers, await parsed(shown))


def _headers(request: Request) -> Headers:
    """Return the client's headers, with the length of the whole body as far as it is known."""
    headers = MutableHeaders(raw=list(request.headers.raw))
    _, _, whole = headers.get(CUT_HEADER, "").partition("/")
    if whole:
        headers["content-length"] = whole
    return headers


def _mounted(path: str, known: Iterable[str]) -> str:
    """Return which of the known paths this is, wherever the application is mounted."""
    return max((end for end in known if path.endswith(end)), key=len, default=path)
