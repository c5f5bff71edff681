"""A rank other than 0, as a Ray actor.

Ray places it, names it and ends it with the replica that owns it. What it computes, it is told by
rank 0 over a socket of their own, in a thread beside the actor's event loop: so `ping` is answered
while the rank steps, and not when its process is stopped or starved.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from remora.configs.environment import cache_dir
from remora.configs.errors import ConfigError
from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.planning.loading import Loading
from remora.configs.planning.plan import EnginePlan
from remora.configs.schema import ServeConfig
from remora.deployments.ranks.stats import RankStats
from remora.lora.sources import Sources

if TYPE_CHECKING:  # torch is imported when it is needed
    from remora.engine.parallel.follower import Follower
    from remora.engine.parallel.rendezvous import Meeting
    from remora.engine.protocols import AdapterFacts, AdapterPool

log = logging.getLogger(__name__)

# The replica, or Ray on its behalf, ends a rank that has nobody to follow; if nobody does, it does.
ORPHAN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What a rank has found where it was placed.

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
    """One rank. Its owner calls `facts`, then `load`, and `ping` from then on."""

    def __init__(self, config: ServeConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._path: Path | None = None
        self._pool: AdapterPool | None = None
        self._follower: Follower | None = None
        self._sources = Sources.configured(config.lora)

    async def facts(self) -> RankFacts:
        """Find the model on this node. Raises ConfigError."""
        return await asyncio.to_thread(self._find)

    async def load(self, plan: EnginePlan, meeting: Meeting) -> None:
        """Load this rank's share, meet the others, and begin to follow. Raises what goes wrong."""
        loaded: Future[None] = Future()
        threading.Thread(
            target=self._follow,
            args=(plan, meeting, loaded),
            name=f"remora-rank{self._rank}",
            daemon=True,
        ).start()
        await asyncio.wrap_future(loaded)

    async def ping(self) -> RankStats | None:
        """Answer, with what this rank has done once it follows."""
        follower = self._follower
        if follower is None or not self._config.metrics.per_rank:
            return None
        return RankStats.here(num_steps=follower.num_steps, step_time_s=follower.step_time_s)

    async def prepare_adapter(self, instance: int, source: str) -> AdapterFacts:
        """Fetch an adapter on this node and keep this rank's share. Raises what goes wrong."""
        from remora.deployments.ranks.adapters import prepare

        assert self._pool is not None
        return await asyncio.to_thread(prepare, self._pool, self._sources, instance, source)

    async def discard_adapter(self, instance: int) -> None:
        """Forget an adapter's share."""
        assert self._pool is not None
        self._pool.discard(instance)

    def _find(self) -> RankFacts:
        import ray

        from remora.engine.launch import read_machine
        from remora.engine.models.facts import read_model_facts
        from remora.engine.weights.resolve_model import resolve_model
        from remora.lora.setup import digests

        host = os.uname().nodename
        try:
            self._path = resolve_model(self._config.model.path, cache_dir())
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
        """The rank's thread, from loading to the end."""
        from remora.engine.launch import build_follower
        from remora.lora.setup import configured

        assert self._path is not None
        try:
            here = replace(plan, model_path=self._path)
            adapting = configured(self._config.lora)
            follower = build_follower(here, self._rank, meeting, adapting=adapting)
        except BaseException as error:  # a boundary: raised where the caller waits
            loaded.set_exception(error)
            return
        self._pool = follower.adapters
        self._follower = follower
        loaded.set_result(None)
        try:
            follower.run()
        except Exception:  # a boundary: rank 0 has been told
            log.exception("rank %d has failed", self._rank)
        time.sleep(ORPHAN_S)
        os._exit(1)
