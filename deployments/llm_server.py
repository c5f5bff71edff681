"""One replica: the HTTP application and the engine's client in the same process.

Tokens reach the client without a Serve handle, which would cost ten times the rest of their path.
The engine steps in a separate thread. Python callers use methods of the deployment's handle:

    handle.chat.remote(body)                                 see handle_calls.py
    handle.load_adapter.remote(name, path)                   load an adapter on all replicas
    handle.update_weights.remote(path)                       serve other weights on all replicas;
                                                             likewise save_weights, sleep, wake_up

The constructor imports torch and the model, so that importing this module stays fast.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, aclosing
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from remora.configs.banner import banner
from remora.configs.errors import InvalidRequest
from remora.configs.load import parse_args
from remora.configs.schema import ServeConfig
from remora.configs.version import __version__
from remora.deployments.adapters.manager_handle import HandledManager
from remora.deployments.adapters.replica import ReplicaAdapters
from remora.deployments.adapters.served_adapters import Adapters, FixedAdapters
from remora.deployments.autoscaling.reports import LoadReporter
from remora.deployments.draining import drain
from remora.deployments.gateway.merge import WholeAnswer
from remora.deployments.gateway.relay import Relay
from remora.deployments.gateway.relayed_request import RelayedRequest
from remora.deployments.handle_calls import Chunks, HandleCalls, plain, with_ignored
from remora.deployments.http.admin.server import Startup
from remora.deployments.http.app import build_http_app
from remora.deployments.http.batches.runner import BatchRunner
from remora.deployments.http.batches.store import BatchStore
from remora.deployments.http.core.auth import Access
from remora.deployments.http.core.unknown_fields import IgnoredFields
from remora.deployments.http.endpoints import (
    BATCH_ENDPOINTS,
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    EMBEDDINGS,
    GENERATE,
    RERANK,
    SCORE,
)
from remora.deployments.http.generation.endpoint import Endpoint, Job, run, stream
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServedEngine, ServerState
from remora.deployments.http.generation.weight_update import TAGS, Update, Weights
from remora.deployments.http.storage.storage import storage_of
from remora.deployments.live_update import LiveSettings
from remora.deployments.live_weights.replica import WeightsState
from remora.deployments.live_weights.setup import ReplicaFleet
from remora.deployments.observing.log_files import apply_log_config
from remora.deployments.observing.replay import replay
from remora.deployments.observing.telemetry import Telemetry
from remora.deployments.parsers.replies import ReplyFormats
from remora.deployments.ranks.replica import ReplicaEngine
from remora.deployments.ranks.stats import RankCollector
from remora.deployments.replica_host import ReplicaHost
from remora.deployments.routing.key import RouteKey
from remora.deployments.routing.reporter import Reporter
from remora.deployments.serve_context import ServeHost
from remora.deployments.warm_up import warm_up
from remora.engine.grammar.service import GrammarService
from remora.engine.protocols import EngineClient

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from remora.engine.launch import BuiltEngine, LaunchedEngine
    from remora.engine.pooling.launch import BuiltPooling


_ENDPOINTS: Mapping[str, Endpoint[Any]] = MappingProxyType(
    {
        "chat": CHAT,
        "completions": COMPLETIONS,
        "generate": GENERATE,
        "embed": EMBEDDINGS,
        "rerank": RERANK,
        "score": SCORE,
        "classify": CLASSIFY,
    }
)


class LLMServer(HandleCalls):
    """A replica, which its host creates, health-checks and stops: Serve, unless another is given.

    The constructor raises ConfigError if the model cannot be served as configured.
    """

    async def __init__(  # type: ignore[misc]
        self,
        args: Mapping[str, Any],
        manager: DeploymentHandle | None = None,
        host: ReplicaHost | None = None,
    ) -> None:
        started = time.monotonic()
        self._exit = ExitStack()  # also ends what an unfinished constructor has begun
        self._host: ReplicaHost = ServeHost() if host is None else host
        self._host.take_logs()
        config = parse_args(args)
        apply_log_config(config.metrics.log_config)
        is_local = await asyncio.to_thread(self._host.listens_locally)
        access = Access.of(config, is_local=is_local)
        self._engine = ReplicaEngine(config)
        self._exit.callback(self._engine.close)
        launched = await self._engine.start()
        grammars = _grammars(config, launched.built)
        self._exit.callback(grammars.close)
        client: EngineClient = launched.client
        adapters: Adapters = FixedAdapters(config.lora)
        replica_id = self._engine.replica_id or uuid.uuid4().hex
        self._dynamic_adapters: ReplicaAdapters | None = None
        if manager is not None:
            own = ReplicaAdapters(
                config, launched, self._engine.others, HandledManager(manager), replica_id
            )
            self._exit.callback(own.close)
            self._dynamic_adapters, client, adapters = own, own.client, own.served
        self._fleet = ReplicaFleet.configured(
            config, launched, self._engine.others, self._engine.replica_id
        )
        if self._fleet is not None:
            self._exit.callback(self._fleet.close)
        weights = None if self._fleet is None else self._fleet.weights
        self._served = ServerState.over(
            _served_engine(config, launched, client, adapters, grammars, weights)
        )
        # Rejects an invalid configuration before the server is ready.
        storage_of(self._served)
        if config.metrics.per_rank:
            ranks = RankCollector(self._engine.stats, self._served.plan.served_model_name)
            self._served.metrics.registry.register(ranks)
        self._reporter = Reporter.configured(client, config, resident=adapters.resident)
        self._load = LoadReporter.of(self._served)
        await self._warm_up(launched.built, self._engine.import_s)
        await replay(client, config.debug.tensor_dump_input)
        if self._served.pooling is None:
            grammars.start()
        if self._dynamic_adapters is not None:
            await self._dynamic_adapters.begin()
        if self._fleet is not None:
            await self._fleet.weights.catch_up()
        self._served.part(Startup, Startup.unknown).seconds = time.monotonic() - started
        self._live_settings = LiveSettings(args, self._served, access)
        self._exit.callback(launched.built.inspection.close)
        telemetry = Telemetry(self._served, replica_id, launched.client.failed)
        self._exit.callback(telemetry.close)
        batches = _run_batches(self._served)
        if batches is not None:
            self._exit.callback(_cancel_from_any_thread, batches)
        engine = self._engine
        self._relay = Relay(
            self.__serve_build_asgi_app__, engine.check, num_failures=lambda: engine.num_failures
        )
        is_stopping = self._host.stop_check()
        if is_stopping is not None:
            self._end = asyncio.create_task(drain(self._served, batches, is_stopping))

    async def _warm_up(self, built: BuiltEngine | BuiltPooling, import_s: float) -> None:
        """Run the warm-up, and show the banner."""
        phases = {"import engine": import_s, **built.phases}
        started = time.perf_counter()
        first_token_s = await warm_up(self._served, self._served.config.warmup)
        phases["warm up"] = time.perf_counter() - started
        text = banner(
            built.plan,
            built.facts,
            built.machine,
            phases,
            version=__version__,
            kernels=built.kernels,
            notes=self._engine.notes,
            first_token_s=first_token_s,
        )
        self._host.announce(text)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP application; Serve calls this once, after the constructor.

        Behind a gateway, `relay` calls it with the first request.
        """
        return build_http_app(
            self._served,
            access=lambda: self._live_settings.access,
            echo_request_id=self._host.echo_request_id,
        )

    async def reconfigure(self, user_config: Mapping[str, Any] | None, rank: object = None) -> None:
        """Apply `user_config`; Serve calls this when it changes or is removed.

        rank:  unused rank of the replica; only with this parameter does Serve report a removal
        """
        self._live_settings.apply(user_config)

    async def check_health(self) -> None:
        """Raise EngineError if the engine or a rank has stopped or hangs."""
        self._engine.check()
        if self._dynamic_adapters is not None:
            self._dynamic_adapters.check()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the routing statistics; Serve calls this every `routing.stats_period_s`."""
        return await self._reporter.stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for the autoscaling policy."""
        return self._load.report()

    def __del__(self) -> None:
        """Stop the engine. The host calls this after draining the running requests."""
        begun: ExitStack | None = getattr(self, "_exit", None)  # None before the constructor
        if begun is not None:
            begun.close()

    # -- called by gateways --------------------------------------------------------------------

    async def relay(self, call: RelayedRequest, route: RouteKey | None = None) -> None:
        """Handle a request from a gateway; `route` is read by the router."""
        await self._relay.answer(call)

    async def answer(self, scope: Mapping[str, Any], body: bytes) -> WholeAnswer:
        """Handle a small request and return the whole response."""
        return await self._relay.whole(scope, body)

    # -- for Python handles --------------------------------------------------------------------

    async def load_adapter(
        self, name: str, path: str, *, pinned: bool = False, replaces: bool = False
    ) -> dict[str, Any]:
        """Load an adapter on all replicas; return its state."""
        return await self._served.adapters.manager.load(
            name, path, pinned=pinned, replaces=replaces
        )

    async def unload_adapter(self, name: str, *, ends: bool = False) -> dict[str, Any]:
        """Unload an adapter after its requests end; `ends` cancels them."""
        return await self._served.adapters.manager.unload(name, ends=ends)

    async def pin_adapter(self, name: str, *, pinned: bool = True) -> dict[str, Any]:
        """Pin or unpin an adapter."""
        return await self._served.adapters.manager.pin(name, pinned=pinned)

    async def list_adapters(self) -> dict[str, Any]:
        """Return the state of each adapter on each replica, and of the replicas."""
        return await self._served.adapters.describe()

    async def update_weights(
        self, path: str, load_format: str | None = None, *, version: str | None = None
    ) -> None:
        """Load and serve other weights on all replicas; see /update_weights_from_disk."""
        update = Update(path=path, load_format=load_format, version=version)
        await self._served.weights.update(update)

    async def save_weights(self, path: str) -> int:
        """Write the weights to a new folder below model.weight_roots; return their bytes."""
        return await self._served.weights.save(path)

    async def sleep(self, level: int = 1) -> None:
        """Abort requests and release memory on all replicas; level 2 discards the weights."""
        await self._served.weights.sleep(frozenset(TAGS), "abort", forgets=level == 2)

    async def wake_up(self) -> None:
        """Take the memory again on all replicas."""
        await self._served.weights.wake(frozenset(TAGS))

    async def change_weights(self, operation: str, *args: Any) -> WeightsState:
        """Do this replica's part in a change of weights; called by another replica."""
        if self._fleet is None:
            raise InvalidRequest("The weights of this replica stay as they are.")
        return await self._fleet.replica.call(operation, *args)

    async def _answer(self, method: str, body: Mapping[str, Any]) -> Any:
        endpoint = _ENDPOINTS[method]
        whole = body if endpoint.kind == "pooling" else {**body, "stream": False}
        job, ignored = await self._job(endpoint, whole)
        return with_ignored(plain(await run(self._served, job)), ignored.nearest)

    async def _chunks(self, method: str, body: Mapping[str, Any]) -> Chunks:
        job, ignored = await self._job(_ENDPOINTS[method], {**body, "stream": True})
        unnamed = ignored.nearest
        async with aclosing(stream(self._served, job)) as chunks:
            async for chunk in chunks:
                yield with_ignored(plain(chunk), unnamed)
                unnamed = {}

    async def _job(
        self, endpoint: Endpoint[Any], body: Mapping[str, Any]
    ) -> tuple[Job, IgnoredFields]:
        context = RequestContext(request_id=uuid.uuid4().hex)
        job, ignored = await endpoint.job(self._served, dict(body), context)
        self._served.field_log.note(ignored)
        return job, ignored


def _grammars(config: ServeConfig, built: BuiltEngine | BuiltPooling) -> GrammarService:
    api = config.api
    formats = ReplyFormats.of(
        built.tokenizer, tool_parser=api.tool_parser, reasoning_parser=api.reasoning_parser
    )
    return GrammarService(
        config.grammar,
        built.tokenizer,
        vocab_size=built.facts.vocab_size,
        eos_token_ids=built.tokenizer.eos_token_ids,
        marker_ids=formats.call_mark_ids,
    )


def _served_engine(
    config: ServeConfig,
    launched: LaunchedEngine,
    client: EngineClient,
    adapters: Adapters,
    grammars: GrammarService,
    weights: Weights | None,
) -> ServedEngine:
    built = launched.built
    return ServedEngine(
        client=client,
        tokenizer=built.tokenizer,
        plan=built.plan,
        config=config,
        grammars=grammars,
        generation_defaults=built.generation_defaults,
        adapters=adapters,
        weights=weights,
        pooling=getattr(built, "pooling", None),
        inspection=built.inspection,
        facts=built.facts,
    )


def _cancel_from_any_thread(task: asyncio.Task[None]) -> None:
    if not task.get_loop().is_closed():
        task.get_loop().call_soon_threadsafe(task.cancel)


def _run_batches(server: ServerState) -> asyncio.Task[None] | None:
    """Start the batch runner, if batches are enabled. Raises ConfigError."""
    folder = server.config.api.batch_dir
    if folder is None:
        return None
    return asyncio.create_task(BatchRunner(server, BatchStore(Path(folder)), BATCH_ENDPOINTS).run())
