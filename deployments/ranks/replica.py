"""The engine of one replica, with all of its ranks: start, watch, end.

When the engine or a rank has failed, open requests end with an error. If other ranks are lost and
rank 0 is unharmed, new ones take their places, and rank 0 goes on in its process; requests that
arrive meanwhile wait. Otherwise the whole replica process ends: Serve replaces a process that is
gone at once, an unhealthy one only after three failed checks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from remora.configs.errors import EngineError, RankLost, StepTimeout
from remora.configs.schema import ServeConfig
from remora.deployments.fast_import import fast_import
from remora.deployments.observing.core_dump import allow_core_dumps, end_process
from remora.deployments.ranks.stats import RankStats
from remora.deployments.ranks.team import RayTeam

if TYPE_CHECKING:  # torch is imported when it is needed
    from remora.engine.client import LocalEngineClient
    from remora.engine.launch import LaunchedEngine
    from remora.engine.parallel.followers import Followers
    from remora.engine.parallel.renewal import Renewal

log = logging.getLogger(__name__)

DRAIN_S = 2.0
START_TIMEOUT_S = 60.0
# Time for written bytes to reach the proxy before the process ends.
FLUSH_S = 0.3
# A step ends when the ranks that it waits for are killed.
STOP_S = 5.0
# Ranks that are lost again within this time, without a step in between, would be lost for ever.
AGAIN_S = 10.0


class ReplicaEngine:
    """The engine and its ranks. Make it on the replica's event loop.

    replica_id:  of Serve; None outside Serve
    import_s:    seconds that importing the engine took
    others:      the other ranks; None = this is the only one
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.replica_id = _replica_id()
        self.others: RayTeam | None = None
        self._client: LocalEngineClient | None = None
        self._renewal: Renewal | None = None
        self._renewing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None  # of the other ranks
        self._renewed_at = -math.inf
        self._steps_at_renewal = 0
        self.import_s = 0.0

    async def start(self) -> LaunchedEngine:
        """Start every rank. If one fails, raise its error and end the others."""
        if self._config.debug.core_dump:
            allow_core_dumps()
        if self._config.parallel.num_ranks > 1:
            self.others = RayTeam.placed(self._config, self.replica_id or "")
        started = time.perf_counter()
        with fast_import():  # torch, while the other ranks start
            from remora.engine.launch import start_engine
            from remora.lora.setup import configured

        self.import_s = time.perf_counter() - started
        watching = self._watch_start(self.others)
        try:
            launched = await start_engine(
                self._config,
                adapting=configured(self._config.lora),
                team=self.others,
                show_progress=False,
            )
        except BaseException:
            self.close()
            raise
        finally:
            watching.cancel()
        self._client = launched.client
        self._watch(launched.client, getattr(launched.built, "renewal", None))
        return launched

    @property
    def notes(self) -> list[str]:
        """The processes of the other ranks, a line each."""
        return [] if self.others is None else self.others.notes

    def stats(self) -> dict[int, RankStats]:
        """Return the counters of each rank that has reported, by rank."""
        found: dict[int, RankStats] = {}
        if self._client is not None:
            own = self._client.stats()
            found[0] = RankStats.here(num_steps=own.steps_total, step_time_s=own.step_time_total_s)
        workers = () if self.others is None else self.others.workers
        return found | {worker.rank: worker.stats for worker in workers if worker.stats}

    def check(self) -> None:
        """Raise EngineError when the engine has failed or a watching task has ended."""
        if self._client is not None:
            self._client.check_health()
        for task in self._watchers():
            if task.done():
                raise EngineError(f"{task.get_name()} has ended: {task}")

    @property
    def num_failures(self) -> int:
        """Failures of the engine, those included that it has survived."""
        return 0 if self._client is None else self._client.num_failures

    def close(self) -> None:
        """End everything. From any thread."""
        for task in self._watchers():
            with suppress(RuntimeError):  # the event loop has been closed
                task.get_loop().call_soon_threadsafe(task.cancel)
        if self._client is not None:
            self._client.close()
        if self.others is not None:
            self.others.kill()

    def _watch_start(self, team: RayTeam | None) -> asyncio.Task[None]:
        """End the start-up when a rank hangs; a rank that imports and loads may answer late."""
        timeout_s = max(START_TIMEOUT_S, self._config.parallel.rank_timeout_s)
        watching = asyncio.sleep(0) if team is None else team.watch(team.give_up, timeout_s)
        return asyncio.create_task(watching, name="remora-watch-start")

    def _watchers(self) -> list[asyncio.Task[None]]:
        return self._tasks if self._watching is None else [*self._tasks, self._watching]

    def _watch(self, client: LocalEngineClient, renewal: Renewal | None = None) -> None:
        if self.others is not None:
            self._watching = self._watch_ranks(self.others, client)
            if renewal is not None:
                self._renewal = renewal
                client.repair_with(self._renew)
        if self.replica_id is not None:
            ending = self._end_after_failure(client)
            self._tasks.append(asyncio.create_task(ending, name="remora-end"))

    def _watch_ranks(self, team: RayTeam, client: LocalEngineClient) -> asyncio.Task[None]:
        watching = team.watch(client.fail, self._config.parallel.rank_timeout_s)
        return asyncio.create_task(watching, name="remora-watch-ranks")

    async def _renew(self, failure: EngineError) -> None:
        """Replace the other ranks. Raises the failure if that would not help."""
        async with self._renewing:
            client, team, renewal = self._client, self.others, self._renewal
            assert client is not None
            assert team is not None
            assert renewal is not None
            is_of_ranks = isinstance(failure, RankLost | StepTimeout)
            steps_total = client.stats().steps_total
            began = time.monotonic()
            is_new = began > self._renewed_at + AGAIN_S or steps_total > self._steps_at_renewal
            if not (is_of_ranks and team.can_replace and is_new):
                raise failure
            log.error("replica: lost ranks are replaced: %s", failure)
            self._steps_at_renewal = steps_total
            lost = team.lost_ranks(failure)
            try:
                followers = await self._meet(client, team, renewal, lost)
            except EngineError:
                if lost == team.all_ranks:
                    raise
                # Others may have been lost, too.
                followers = await self._meet(client, team, renewal, team.all_ranks)
            followers.on_failure(client.fail)
            assert self._watching is not None
            self._watching.cancel()
            self._watching = self._watch_ranks(team, client)
            self._renewed_at = time.monotonic()
            log.info("replica: all ranks run again after %.1f s", self._renewed_at - began)

    async def _meet(
        self, client: LocalEngineClient, team: RayTeam, renewal: Renewal, lost: frozenset[int]
    ) -> Followers:
        """Replace ranks, and let all meet again."""
        if self._watching is not None:
            self._watching.cancel()
        team.replace(lost)
        self._watching = self._watch_start(team)
        return await client.restart(renewal.run, stop_s=STOP_S)

    async def _end_after_failure(self, client: LocalEngineClient) -> None:
        failure = await client.failed()
        log.error("replica: the process ends, so that Serve replaces it: %s", failure)
        if self.others is not None:
            self.others.kill()
        await client.drain(DRAIN_S)
        await asyncio.sleep(FLUSH_S)
        logging.shutdown()
        end_process(dumps_core=self._config.debug.core_dump)


def _replica_id() -> str | None:
    """Return Serve's id of this process's replica; None outside Serve. Does not import Ray."""
    if "ray.serve" not in sys.modules:
        return None
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:
        return None
