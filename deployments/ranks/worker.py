"""A rank other than 0, as a Ray actor.

Ray places the actor and ends it with the replica that owns it. Rank 0 sends the steps over a socket
to a separate thread, so the actor's event loop answers `ping` while the rank steps, but not when
its process is stopped or starved.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remora.configs.errors import ConfigError, EngineError
from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.planning.loading import Loading
from remora.configs.planning.plan import EnginePlan
from remora.configs.schema import ServeConfig
from remora.deployments.fast_import import fast_import
from remora.deployments.ranks.stats import RankStats
from remora.lora.sources import Sources

if TYPE_CHECKING:  # torch is imported when it is needed
    from remora.engine.live.rank import RankWeights
    from remora.engine.parallel.follower import Follower
    from remora.engine.parallel.rendezvous import Meeting
    from remora.engine.protocols import AdapterFacts, AdapterPool

log = logging.getLogger(__name__)

# Usually the replica or Ray ends a rank that lost rank 0; after this time it ends itself.
ORPHAN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What a rank found on its node.

    node_id, host:  Ray's id of the node, and the machine's name
    adapters:       digests of the adapters' files
    """

    pid: int
    node_id: str
    host: str
    machine: MachineFacts
    model: ModelFacts
    adapters: tuple[str, ...] = ()


class EngineWorker:
    """One rank. Its owner calls `facts`, then `load`, then `ping` periodically.

    When others are lost, the owner calls `leave`, and then `load` for the next group.
    """

    def __init__(self, config: ServeConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._path: Path | None = None
        self._pool: AdapterPool | None = None
        self._follower: Follower | None = None
        self._weights: RankWeights | None = None
        self._thread: threading.Thread | None = None
        self._stays = threading.Event()  # although it has lost rank 0
        self._changing = asyncio.Lock()
        self._sources = Sources.configured(config.lora)
        self._has_pool = asyncio.Event()
        self._preparing: dict[int, asyncio.Task[Any]] = {}

    async def facts(self) -> RankFacts:
        """Find the model on this node. Raises ConfigError."""
        return await asyncio.to_thread(self._find)

    async def load(self, plan: EnginePlan, meeting: Meeting) -> None:
        """Load this rank's shard, join the group, and start to follow. Raises the rank's error."""
        loaded: Future[None] = Future()
        async with self._changing:
            self._stays = threading.Event()
            self._thread = threading.Thread(
                target=self._follow,
                args=(plan, meeting, loaded),
                name=f"remora-rank{self._rank}",
                daemon=True,
            )
            self._thread.start()
        await asyncio.wrap_future(loaded)
        self._has_pool.set()

    async def leave(self) -> None:
        """Leave the group and free the model; nothing if it has joined none."""
        self._stays.set()
        self._has_pool.clear()
        async with self._changing:
            if self._follower is not None:
                self._follower.close()
            if self._thread is not None:
                await asyncio.to_thread(self._thread.join)
            self._thread = self._follower = self._pool = self._weights = None

    async def ping(self) -> RankStats | None:
        """Return this rank's counters, None until it follows or if metrics.per_rank is off."""
        follower = self._follower
        if follower is None or not self._config.metrics.per_rank:
            return None
        return RankStats.here(num_steps=follower.num_steps, step_time_s=follower.step_time_s)

    async def prepare_adapter(self, lora_id: int, source: str) -> AdapterFacts:
        """Fetch an adapter on this node and keep this rank's shard. Raises the rank's error.

        Waits until the model is loaded.
        """
        preparing = asyncio.current_task()
        assert preparing is not None
        self._preparing[lora_id] = preparing
        try:
            await self._has_pool.wait()
            return await self._prepare(lora_id, source)
        finally:
            if self._preparing.get(lora_id) is preparing:
                del self._preparing[lora_id]

    async def _prepare(self, lora_id: int, source: str) -> AdapterFacts:
        assert self._pool is not None
        folder = await asyncio.to_thread(self._sources.fetch, source)
        return await asyncio.to_thread(self._pool.prepare, lora_id, folder)

    async def discard_adapter(self, lora_id: int) -> None:
        """Free an adapter's shard, once it is not being loaded any more."""
        if (preparing := self._preparing.get(lora_id)) is not None:
            await asyncio.wait({preparing})
        if self._pool is not None:
            self._pool.discard(lora_id)

    async def change_weights(self, operation: str, *args: Any) -> None:
        """Call a method of this rank's `RankWeights` in a thread. Raises its error."""
        if self._weights is None:
            raise EngineError("The weights of this rank cannot change.")
        await asyncio.to_thread(getattr(self._weights, operation), *args)

    def _find(self) -> RankFacts:
        import ray

        with fast_import():  # torch
            from remora.engine.launch import read_machine
            from remora.engine.models.facts import read_model_facts
            from remora.engine.models.locate import locate_model
            from remora.lora.setup import digests

        host = os.uname().nodename
        try:
            self._path = locate_model(self._config.model)
            adapters = digests(self._config.lora)
        except ConfigError as error:
            raise ConfigError(f"on node {host}: {error}") from error
        return RankFacts(
            pid=os.getpid(),
            node_id=ray.get_runtime_context().get_node_id(),
            host=host,
            machine=read_machine(self._config),
            model=read_model_facts(self._path, Loading.of(self._config.model)),
            adapters=adapters,
        )

    def _follow(self, plan: EnginePlan, meeting: Meeting, loaded: Future[None]) -> None:
        """Load and follow; runs in the rank's thread until the process ends."""
        from remora.engine.launch import build_follower
        from remora.engine.live.build import live_weights
        from remora.lora.setup import configured

        assert self._path is not None
        try:
            here = replace(plan, model_path=self._path)
            adapting = configured(self._config.lora)
            follower = build_follower(here, self._rank, meeting, adapting=adapting)
            weights = live_weights(self._config, here, follower.table, follower)
        except BaseException as error:  # a boundary: `load` raises it
            loaded.set_exception(error)
            return
        self._pool = follower.adapters
        self._follower = follower
        self._weights = weights
        loaded.set_result(None)
        try:
            follower.run()
        except Exception:  # a boundary: rank 0 has the error
            log.exception("ranks: rank %d has failed", self._rank)
        if not self._stays.wait(ORPHAN_S):
            os._exit(1)
