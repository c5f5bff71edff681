"""The other ranks of a replica as Ray actors, managed by rank 0: start, watch, end.

Ray starts and ends the actors and carries the health checks; steps and failures use sockets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]

from remora.configs.errors import (
    ConfigError,
    EngineError,
    InvalidAdapter,
    RankLost,
    RemoraError,
)
from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.planning.plan import EnginePlan, served_name
from remora.configs.schema import ServeConfig
from remora.deployments.ranks.placement import bundle_index, rank_options
from remora.deployments.ranks.stats import RankStats
from remora.deployments.ranks.worker import EngineWorker, RankFacts
from remora.deployments.scoped_task import scoped_task

if TYPE_CHECKING:  # torch is imported when it is needed
    from remora.engine.parallel.followers import Followers
    from remora.engine.parallel.group import Group
    from remora.engine.parallel.layout import Layout
    from remora.engine.parallel.rendezvous import Host
    from remora.engine.protocols import AdapterFacts

log = logging.getLogger(__name__)

StartRank = Callable[[int, str], "Worker"]

PING_PERIOD_S = 1.0
GRACE_S = 0.5
LOOK_S = 0.5
# Time for the processes that replace ranks to start and to import the engine.
REPLACE_S = 60.0


@dataclass(eq=False, slots=True)
class Worker:
    """A rank's actor and its state.

    is_here:  on this node
    process:  if it is here
    stats:    counters of the last health check
    """

    rank: int
    name: str
    actor: Any
    facts: RankFacts | None = None
    is_here: bool = False
    process: psutil.Process | None = None
    stats: RankStats | None = None

    @property
    def is_running(self) -> bool:
        """Whether its process is on this node, exists and has not been stopped."""
        with suppress(psutil.NoSuchProcess):
            stopped = (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
            return self.process is not None and self.process.status() not in stopped
        return False

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" on node {self.facts.host}" if self.facts else "")


@dataclass(frozen=True, slots=True)
class _Adapter:
    """An adapter that the ranks have loaded, and the digest of its files."""

    source: str
    digest: str


@dataclass(eq=False, slots=True)
class RayTeam:
    """Team over actors. `machine`, `load`, `gather` and `ready` run in the thread of start-up.

    start:  starts the actor of a rank, given the rank and the end of its name; None = no rank is
            replaced
    """

    config: ServeConfig
    workers: Sequence[Worker]
    start: StartRank | None = None
    _host: Host | None = None
    _loading: list[Future[None]] = field(default_factory=list)
    _failure: Exception | None = None
    _adapters: dict[int, _Adapter] = field(default_factory=dict)
    _reloading: list[tuple[Worker, _Adapter, Future[AdapterFacts]]] = field(default_factory=list)
    _num_replaced: int = 0

    @classmethod
    def placed(cls, config: ServeConfig, replica_id: str) -> RayTeam:
        """Start an actor for each rank but 0, in this replica's placement group.

        Call it in the replica's own thread. Raises ConfigError outside a placement group.
        """
        import ray
        from ray.util.placement_group import get_current_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = get_current_placement_group()
        if group is None:
            raise ConfigError(
                f"parallel asks for {config.parallel.num_ranks} ranks, and this replica has no "
                "placement group for them; deploy it with remora.deployments.app:build"
            )
        model = served_name(config, Path(config.model.path))

        def start(rank: int, suffix: str) -> Worker:
            name = f"remora:{model}:{replica_id}:rank{rank}{suffix}"
            actor = ray.remote(EngineWorker).options(
                name=name,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle_index(config.parallel, rank)
                ),
                **rank_options(config),
            )
            return Worker(rank, name, actor.remote(config, rank))

        ranks = range(1, config.parallel.num_ranks)
        return cls(config, [start(rank, "") for rank in ranks], start)

    @property
    def notes(self) -> list[str]:
        """The processes of the ranks, a line each."""
        found = [(worker, worker.facts) for worker in self.workers]
        return [f"{w} is process {facts.pid}: {w.name}" for w, facts in found if facts]

    # -- start-up: engine.parallel.meeting.Team ------------------------------------------------

    def machine(self, own: MachineFacts, model: ModelFacts) -> MachineFacts:
        """Return the smallest resources of any rank's machine. Raises a rank's error."""
        import ray

        from remora.lora.setup import digests

        adapters = digests(self.config.lora)
        here = ray.get_runtime_context().get_node_id()
        asked = [(worker, worker.actor.facts.remote().future()) for worker in self.workers]
        for worker, answer in asked:
            worker.facts = self._wait(worker, answer, REPLACE_S if self._num_replaced else None)
            worker.is_here = worker.facts.node_id == here
            if worker.is_here:
                with suppress(psutil.NoSuchProcess):
                    worker.process = psutil.Process(worker.facts.pid)
            if worker.facts.model != model:
                raise ConfigError(
                    f"{worker} finds another model at model.path = {self.config.model.path} than "
                    "rank 0; every node needs the same files"
                )
            if worker.facts.adapters != adapters:
                raise ConfigError(
                    f"{worker} finds another adapter at lora.adapters[0].path than rank 0; every "
                    "node needs the same files"
                )
        machines = [own, *(worker.facts.machine for worker in self.workers if worker.facts)]
        return replace(
            own,
            num_cores=min(machine.num_cores for machine in machines),
            total_bytes=min(machine.total_bytes for machine in machines),
            available_bytes=min(machine.available_bytes for machine in machines),
            converts_e4m3=all(machine.converts_e4m3 for machine in machines),
        )

    def load(self, plan: EnginePlan) -> None:
        """Start loading on the ranks; a failure there ends every wait for them."""
        from remora.engine.parallel.rendezvous import Host

        self._host = Host(
            self._address(),
            come_s=self.config.parallel.join_timeout_s,
            exchange_s=plan.step_timeout_s,
            port=self.config.parallel.rendezvous_port,
        )
        for worker in self.workers:
            answer = worker.actor.load.remote(plan, self._host.meeting).future()
            self._loading.append(answer)
            answer.add_done_callback(self._on_loaded(worker))
            for lora_id, adapter in self._adapters.items():
                reloaded = worker.actor.prepare_adapter.remote(lora_id, adapter.source).future()
                self._reloading.append((worker, adapter, reloaded))

    def gather(self, layout: Layout, device: str) -> tuple[Followers, Group]:
        """Wait for the ranks to join. Raises a rank's error."""
        assert self._host is not None
        try:
            return self._host.gather(layout, device)
        except EngineError as error:
            raise self._failure or error from None
        finally:
            self._host.close()

    def ready(self) -> None:
        """Wait until the ranks can step. Raises a rank's error."""
        for worker, answer in zip(self.workers, self._loading, strict=True):
            self._wait(worker, answer)
        for worker, adapter, reloaded in self._reloading:
            if self._wait(worker, reloaded).digest != adapter.digest:
                raise EngineError(f"{worker}: the files of {adapter.source} have changed")

    def give_up(self, failure: Exception) -> None:
        """End the start-up, from any thread: every wait for a rank raises `failure`."""
        self._failure = self._failure or failure
        if self._host is not None:
            self._host.close()

    @property
    def can_replace(self) -> bool:
        """Whether `replace` may be called: all ranks are on this node.

        Of another node it is unknown whether it still exists.
        """
        return self.start is not None and all(worker.is_here for worker in self.workers)

    def lost_ranks(self, failure: EngineError) -> frozenset[int]:
        """Return the ranks that caused a failure; all of them if that is unknown."""
        gone = {worker.rank for worker in self.workers if not worker.is_running}
        if isinstance(failure, RankLost) and failure.rank is not None:
            gone.add(failure.rank)
        return frozenset(gone) or self.all_ranks

    @property
    def all_ranks(self) -> frozenset[int]:
        """The ranks other than 0."""
        return frozenset(worker.rank for worker in self.workers)

    def replace(self, lost: frozenset[int]) -> None:
        """Kill ranks, and start others in their places, for another start-up of all.

        In the replica's own thread. The others leave their group; they load their shards again, and
        all load the adapters that they had.
        """
        assert self.start is not None
        self._close_host()
        self._failure, self._loading, self._reloading = None, [], []
        self._num_replaced += 1
        _kill([worker for worker in self.workers if worker.rank in lost])
        suffix = f":{self._num_replaced}"
        self.workers = [
            self.start(worker.rank, suffix) if worker.rank in lost else worker
            for worker in self.workers
        ]
        for worker in self.workers:
            worker.actor.leave.remote()

    def _wait(self, worker: Worker, answer: Future[Any], timeout_s: float | None = None) -> Any:
        """Wait for a rank's answer. Raises the rank's error, or that of the start-up."""
        timeout_s = timeout_s or self.config.parallel.join_timeout_s
        deadline = time.monotonic() + timeout_s
        while not wait({answer}, LOOK_S).done:
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline:
                raise EngineError(f"{worker} did not join within {timeout_s:g} s")
        return _result(worker, answer)

    def _address(self) -> str | None:
        """Return this node's address, if a rank is on another one."""
        import ray

        if all(worker.is_here for worker in self.workers):
            return None
        return str(ray.util.get_node_ip_address())

    def _on_loaded(self, worker: Worker) -> Callable[[Future[None]], None]:
        def note(answer: Future[None]) -> None:
            try:
                _result(worker, answer)
            except Exception as error:  # a boundary: raised by every wait for the rank
                if answer in self._loading:  # of this start-up
                    self.give_up(error)

        return note

    # -- afterwards ----------------------------------------------------------------------------

    async def watch(self, on_failure: Callable[[EngineError], object], timeout_s: float) -> None:
        """Check the ranks' health forever; call `on_failure` for a rank that fails or hangs.

        A rank is checked once its facts are known: its process may take long to start.
        """
        while self.workers:
            known = [worker for worker in self.workers if worker.facts is not None]
            await asyncio.gather(*(self._ping(w, on_failure, timeout_s) for w in known))
            await asyncio.sleep(PING_PERIOD_S)

    async def _ping(
        self, worker: Worker, on_failure: Callable[[EngineError], object], timeout_s: float
    ) -> None:
        from ray.exceptions import RayError

        async with scoped_task(worker.actor.ping.remote()) as answer:
            await asyncio.wait({answer}, timeout=timeout_s)
            # If this process or the whole machine stalled, the answer is read now.
            await asyncio.wait({answer}, timeout=GRACE_S)
            if not answer.done():
                on_failure(
                    RankLost(
                        f"{_capital(worker)} has not answered for {timeout_s:g} s.", worker.rank
                    )
                )
            elif isinstance(error := answer.exception(), RayError):
                on_failure(
                    RankLost(f"{_capital(worker)} has failed: {_first_line(error)}", worker.rank)
                )
            elif error is None:
                worker.stats = answer.result()

    def prepare_adapter(self, lora_id: int, source: str) -> list[Awaitable[AdapterFacts]]:
        """Load an adapter at each rank; a rank's answer raises that rank's error."""
        return [
            self._prepared(
                worker, worker.actor.prepare_adapter.remote(lora_id, source), lora_id, source
            )
            for worker in self.workers
        ]

    async def _prepared(
        self, worker: Worker, answer: Awaitable[AdapterFacts], lora_id: int, source: str
    ) -> AdapterFacts:
        with _errors_of(worker, InvalidAdapter):
            facts = await answer
        self._adapters[lora_id] = _Adapter(source, facts.digest)
        return facts

    async def discard_adapter(self, lora_id: int) -> None:
        """Free an adapter at each rank; ranks that have ended are ignored."""
        self._adapters.pop(lora_id, None)
        gone = [worker.actor.discard_adapter.remote(lora_id) for worker in self.workers]
        await asyncio.gather(*gone, return_exceptions=True)

    def change_weights(self, operation: str, *args: Any) -> list[Awaitable[None]]:
        """Call a method of each rank's `RankWeights`; an answer raises that rank's error."""
        return [
            self._changed(worker, worker.actor.change_weights.remote(operation, *args))
            for worker in self.workers
        ]

    @staticmethod
    async def _changed(worker: Worker, answer: Awaitable[None]) -> None:
        with _errors_of(worker, ConfigError):
            await answer

    def kill(self) -> None:
        """Kill the ranks, stopped ones too, without waiting. No rank is replaced afterwards."""
        self.start = None
        self.give_up(EngineError("The replica ends."))
        ended, self.workers = self.workers, ()
        _kill(ended)

    def _close_host(self) -> None:
        if self._host is not None:
            self._host.close()


def _kill(workers: Sequence[Worker]) -> None:
    import ray

    for worker in workers:
        with suppress(Exception):  # a boundary: the actor or Ray may be gone
            ray.kill(worker.actor)
        if worker.process is not None:
            with suppress(psutil.NoSuchProcess):
                worker.process.kill()  # a stopped process ignores Ray's request


def _result(worker: Worker, answer: Future[Any]) -> Any:
    with _errors_of(worker, ConfigError):
        return answer.result()


@contextmanager
def _errors_of(worker: Worker, kept: type[RemoraError]) -> Iterator[None]:
    """Raise a rank's own error, prefixed with the rank: as `kept` if it is one, or EngineError."""
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayTaskError as error:
        kind = kept if isinstance(error.cause, kept) else EngineError
        raise kind(f"{worker}: {error.cause or _first_line(error)}") from None
    except RayError as error:
        raise EngineError(f"{worker} has failed: {_first_line(error)}") from None


def _capital(worker: Worker) -> str:
    name = str(worker)
    return name[0].upper() + name[1:]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
