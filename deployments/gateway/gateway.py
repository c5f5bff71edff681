"""The deployment between Serve's proxy and the replicas, where `needs_gateway` requires one.

It reads each request, chooses the model, lets the router choose the replica, and passes the answer
on; it holds requests while a model has no replica, and retries them when a replica has died. Python
callers reach the methods of a model's own deployment through it:

    handle.chat.remote(body)                                 see handle_calls.py; with several
                                                             models the body's `model` names one
    handle.load_adapter.remote(name, path, model=...)        as of LLMServer, for one model
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from remora.configs.errors import ConfigError
from remora.configs.live_update import with_user_config
from remora.configs.load import parse_models
from remora.configs.schema import ServeConfig
from remora.deployments.gateway.failures import cause_of
from remora.deployments.gateway.frontend import build_front
from remora.deployments.gateway.metrics import GatewayMetrics
from remora.deployments.gateway.model import GatewayModel
from remora.deployments.gateway.model_choice import choose_model
from remora.deployments.gateway.shutdown import GatewayShutdown
from remora.deployments.gateway.tunnel import Tunnel
from remora.deployments.handle_calls import STREAMS, Chunks, HandleCalls
from remora.deployments.http.core.auth import Access
from remora.deployments.observing.ray_metrics import RayMetrics
from remora.deployments.ray_private import shutdown_check
from remora.deployments.routing.prompt_keys import PromptKeys
from remora.deployments.serve_context import listens_locally, log_through_serve

log = logging.getLogger(__name__)


class Gateway(HandleCalls):
    """One gateway. Raises ConfigError on construction when the configuration is not valid.

    handles:  of the models' deployments, by model name
    """

    async def __init__(  # type: ignore[misc]
        self, args: Mapping[str, Any], handles: Mapping[str, DeploymentHandle]
    ) -> None:
        import ray

        log_through_serve()
        self._args = args
        self._is_local = await asyncio.to_thread(listens_locally)
        configs = self._adopt(None)
        context = ray.get_runtime_context()
        self._tunnel = Tunnel(node_id=context.get_node_id(), host=ray.util.get_node_ip_address())
        await self._tunnel.open()
        self._metrics = GatewayMetrics()
        self._models = {
            name: GatewayModel(
                name,
                handles[name],
                config,
                self._tunnel,
                self._metrics,
                key_of=(await asyncio.to_thread(PromptKeys, config)).of,
            )
            for name, config in configs.items()
        }
        drain_s = max(config.api.drain_s for config in configs.values())
        self._shutdown = GatewayShutdown(shutdown_check(), drain_s)
        self._metrics.watch_held({name: model.num_held for name, model in self._models.items()})
        self._reporting: asyncio.Task[None] | None = None
        if self._config.metrics.enabled and self._config.metrics.export_to_ray:
            self._reporting = asyncio.create_task(RayMetrics(self._metrics.collect).run())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the HTTP application; Serve calls this once, after the constructor."""
        return build_front(
            self._models, lambda: self._config, lambda: self._access, self._metrics, self._shutdown
        )

    async def reconfigure(self, user_config: Mapping[str, Any] | None, rank: object = None) -> None:
        """Apply `api` and `limits` of `user_config` to new requests.

        rank:  see `LLMServer.reconfigure`
        """
        try:
            self._adopt(user_config)
        except ConfigError as error:
            log.error("gateway: refused user_config and kept the former one:\n%s", error)

    def _adopt(self, user_config: Mapping[str, Any] | None) -> dict[str, ServeConfig]:
        configs = parse_models(with_user_config(self._args, user_config))
        config = next(iter(configs.values()))  # its api and limits are those of all models
        self._access = Access.of(config, is_local=self._is_local)
        self._config = config
        return configs

    def __del__(self) -> None:
        """Stop listening."""
        tunnel = getattr(self, "_tunnel", None)
        if tunnel is not None:
            tunnel.close()
        reporting = getattr(self, "_reporting", None)
        if reporting is not None:
            with suppress(RuntimeError):  # the event loop has been closed
                reporting.get_loop().call_soon_threadsafe(reporting.cancel)

    # -- methods for Python handles -----------------------------------------------------------

    async def load_adapter(
        self, name: str, path: str, *, model: str | None = None, **options: bool
    ) -> Any:
        """Load an adapter on all replicas of a model; None = the only model."""
        return await self._manage(model, "load_adapter", name, path, **options)

    async def unload_adapter(self, name: str, *, model: str | None = None, **options: bool) -> Any:
        """Unload an adapter of a model."""
        return await self._manage(model, "unload_adapter", name, **options)

    async def pin_adapter(self, name: str, *, model: str | None = None, **options: bool) -> Any:
        """Pin or unpin an adapter of a model."""
        return await self._manage(model, "pin_adapter", name, **options)

    async def list_adapters(self, *, model: str | None = None) -> Any:
        """Return the adapters of a model and their replicas."""
        return await self._manage(model, "list_adapters")

    async def _manage(self, model: str | None, method: str, *args: str, **options: bool) -> Any:
        handle = self._handle({} if model is None else {"model": model})
        try:
            return await handle.options(method_name=method).remote(*args, **options)
        except Exception as error:
            raise cause_of(error) from None

    def _handle(self, body: Mapping[str, Any]) -> DeploymentHandle:
        return self._models[choose_model(tuple(self._models), "", "", body)].handle

    async def _answer(self, method: str, body: Mapping[str, Any]) -> Any:
        try:
            return await self._handle(body).options(method_name=method).remote(body)
        except Exception as error:
            raise cause_of(error) from None

    async def _chunks(self, method: str, body: Mapping[str, Any]) -> Chunks:
        handle = self._handle(body).options(method_name=STREAMS[method], stream=True)
        chunks = handle.remote(body)
        try:
            async for chunk in chunks:
                yield chunk
        except Exception as error:
            raise cause_of(error) from None
        except BaseException:  # the reader has gone
            chunks.cancel()
            raise
