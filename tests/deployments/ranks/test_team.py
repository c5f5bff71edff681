"""Rank 0's view of the others without Ray: what it hears at start-up, and what it does then."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from ray.exceptions import ActorDiedError

from remora.configs.errors import ConfigError, EngineError
from remora.configs.load import parse_args
from remora.deployments.free_ports import free_port
from remora.deployments.ranks import replica as replica_module
from remora.deployments.ranks.replica import ReplicaEngine
from remora.deployments.ranks.stats import RankCollector, RankStats
from remora.deployments.ranks.team import RayTeam
from remora.deployments.ranks.weights import TeamWeights
from remora.deployments.ranks.worker import RankFacts
from remora.engine.parallel.channel import Channel
from remora.engine.parallel.connect import listen
from remora.engine.parallel.layout import Layout
from remora.engine.parallel.rendezvous import join
from tests.deployments.ranks.actors import (
    CONFIG,
    FACTS,
    PLAN,
    FakeActor,
    make_task_error,
    team_of,
)
from tests.engine.configured import MACHINE, MODEL
from tests.moments import cancelled, nothing_left


def test_plans_are_made_for_the_poorest_machine(team: RayTeam, actors: list[FakeActor]) -> None:
    poor = replace(MACHINE, num_cores=2, available_bytes=100)
    actors[1].facts_or_error = replace(FACTS, machine=poor)

    found = team.machine(MACHINE, MODEL)

    assert found == replace(MACHINE, num_cores=2, available_bytes=100)


@pytest.mark.parametrize(
    ("rank", "found", "message"),
    [
        (2, replace(FACTS, adapters=("other",)), "finds another adapter"),
        (
            1,
            make_task_error(ConfigError("on node gpu-9: no such folder")),
            r"^rank 1: on node gpu-9: no such folder$",
        ),
        (
            2,
            replace(FACTS, host="gpu-8", model=replace(MODEL, hidden_size=2)),
            r"rank 2 on node gpu-8 finds another model",
        ),
        (
            1,
            replace(FACTS, model=replace(MODEL, fingerprint="other")),
            r"rank 1 on node gpu-7 finds another model",
        ),
    ],
    ids=["another adapter", "no model", "another model", "other weights"],
)
def test_a_node_without_the_same_files_is_named(
    rank: int,
    found: RankFacts | Exception,
    message: str,
    team: RayTeam,
    actors: list[FakeActor],
) -> None:
    actors[rank - 1].facts_or_error = found

    with pytest.raises(ConfigError, match=message):
        team.machine(MACHINE, MODEL)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (make_task_error(MemoryError("no room for 7 GiB")), EngineError, ": no room for 7 GiB$"),
        (make_task_error(ConfigError("load_format is odd")), ConfigError, ": load_format is odd$"),
        (ActorDiedError(), EngineError, " has failed: .*died"),
    ],
)
def test_a_failure_while_loading_ends_the_wait_and_leaves_no_socket(
    error: Exception,
    kind: type[Exception],
    message: str,
    team: RayTeam,
    actors: list[FakeActor],
) -> None:
    team.machine(MACHINE, MODEL)
    team.load(PLAN)
    folder = Path(actors[0].meetings[0].steps.path).parent
    assert folder.exists()

    actors[1].loaded.set_exception(error)

    with pytest.raises(kind, match=f"^rank 2 on node gpu-8{message}"):
        team.gather(Layout(tp_size=3), "cpu")
    assert not folder.exists()


def test_ranks_on_other_nodes_are_met_by_tcp(team: RayTeam, actors: list[FakeActor]) -> None:
    actors[1].facts_or_error = replace(FACTS, node_id="there")
    team.machine(MACHINE, MODEL)
    team.load(PLAN)
    meeting = actors[0].meetings[0]

    assert meeting.steps.path == ""
    assert meeting.steps.host not in ("", "0.0.0.0")
    Channel.connect(meeting.steps, 1, 5.0).close()
    actors[1].loaded.set_exception(ActorDiedError())
    with pytest.raises(EngineError):
        team.gather(Layout(tp_size=3), "cpu")


def test_a_start_that_is_given_up_leaves_no_socket(team: RayTeam, actors: list[FakeActor]) -> None:
    team.machine(MACHINE, MODEL)
    team.load(PLAN)

    team.kill()

    assert not Path(actors[0].meetings[0].steps.path).parent.exists()


async def heard(team: RayTeam, until: Callable[[list[str]], bool]) -> list[str]:
    """Watch the ranks until enough was heard of them."""
    team.machine(MACHINE, MODEL)
    failures: list[str] = []
    watching = asyncio.create_task(team.watch(lambda e: failures.append(str(e)), 0.1))
    async with asyncio.timeout(10):
        while not until(failures):
            await asyncio.sleep(0.01)
    watching.cancel()
    return failures


@pytest.mark.parametrize(
    ("died", "message"), [(False, "has not answered for 0.1 s."), (True, "has failed")]
)
async def test_a_dead_or_silent_rank_is_named(
    died: bool, message: str, team: RayTeam, actors: list[FakeActor]
) -> None:
    actors[0].pinged.set_result(None)
    if died:
        actors[1].pinged.set_exception(ActorDiedError())

    (failure,) = await heard(team, bool)
    assert failure.startswith(f"Rank 2 on node gpu-8 {message}")


async def test_what_ranks_say_of_themselves_is_shown_by_rank(
    team: RayTeam, actors: list[FakeActor]
) -> None:
    told = RankStats(
        steps_total=7, step_time_total_s=0.5, cpu_time_total_s=2.0, resident_bytes=10**6
    )
    actors[0].pinged.set_result(told)
    actors[1].pinged.set_result(None)
    team.machine(MACHINE, MODEL)
    watching = asyncio.create_task(team.watch(lambda _error: None, 5.0))
    engine = ReplicaEngine(CONFIG)
    engine.others = team
    async with asyncio.timeout(10):
        while not engine.stats():
            await asyncio.sleep(0.01)
    watching.cancel()

    assert engine.stats() == {1: told}
    registry = CollectorRegistry()
    registry.register(RankCollector(engine.stats, "tiny"))
    shown = generate_latest(registry).decode()
    assert 'remora_rank_steps_total{model_name="tiny",rank="1"} 7.0' in shown
    assert 'remora_rank_resident_bytes{model_name="tiny",rank="1"} 1e+06' in shown


@pytest.mark.observes("parallel.join_timeout_s")
def test_ranks_that_do_not_come_in_time_end_the_start(
    actors: list[FakeActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    team = team_of(actors, monkeypatch, join_timeout_s=0.2)
    team.machine(MACHINE, MODEL)
    team.load(PLAN)

    with pytest.raises(EngineError, match=r"0\.2 s"):
        team.ready()
    with pytest.raises(EngineError, match=r"within 0\.2 s\); missing: 1, 2"):
        team.gather(Layout(tp_size=3), "cpu")


@pytest.mark.observes("parallel.rendezvous_port")
def test_ranks_meet_at_the_port_that_is_written(
    actors: list[FakeActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    team = team_of(actors[:1], monkeypatch, tp_size=2, rendezvous_port=port)
    ports: list[int] = []

    def noted(host: str, port: int = 0) -> socket.socket:
        made = listen(host, port)
        ports.append(made.getsockname()[1])
        return made

    monkeypatch.setattr("remora.engine.parallel.rendezvous.listen", noted)
    team.machine(MACHINE, MODEL)
    team.load(PLAN)
    with ThreadPoolExecutor(1) as threads:
        layout = Layout(rank=1, tp_size=2)
        coming = threads.submit(join, actors[0].meetings[0], layout, "cpu")
        followers, group = team.gather(Layout(tp_size=2), "cpu")
        for left in (*coming.result(), followers, group):
            left.close()

    assert ports == [port]


def test_several_replicas_cannot_meet_at_one_port() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.rendezvous_port = 4711: several replicas"):
        parse_args(
            {
                "model": {"path": "m"},
                "parallel": {"tp_size": 2, "num_replicas": 2, "rendezvous_port": 4711},
            }
        )


class WatchedClient:
    """Notes what an engine is ended for."""

    def __init__(self) -> None:
        self.failed = asyncio.get_running_loop().create_future()

    def fail(self, error: EngineError) -> None:
        if not self.failed.done():
            self.failed.set_result(str(error))


@pytest.mark.observes("parallel.rank_timeout_s")
async def test_a_replica_gives_its_ranks_as_long_as_is_written(
    team: RayTeam, actors: list[FakeActor]
) -> None:
    actors[0].pinged.set_result(None)
    parallel = CONFIG.parallel.model_copy(update={"rank_timeout_s": 0.07})
    engine = ReplicaEngine(CONFIG.model_copy(update={"parallel": parallel}))
    engine.others = team
    team.machine(MACHINE, MODEL)
    client = WatchedClient()

    engine._watch(client)  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        failure = await client.failed
    for task in engine._watchers():
        task.cancel()

    assert failure == "Rank 2 on node gpu-8 has not answered for 0.07 s."


async def test_a_rank_that_hangs_while_it_gets_ready_ends_the_start(team: RayTeam) -> None:
    team.machine(MACHINE, MODEL)
    team.load(PLAN)
    watching = asyncio.create_task(team.watch(team.give_up, 0.1))

    async with asyncio.timeout(20):
        with pytest.raises(EngineError, match=r"Rank . on node gpu-. has not answered for 0\.1 s"):
            await asyncio.to_thread(team.ready)
        with pytest.raises(EngineError, match="has not answered"):
            await asyncio.to_thread(team.gather, Layout(tp_size=3), "cpu")
    watching.cancel()


def test_a_stopped_rank_of_this_node_is_killed(team: RayTeam, actors: list[FakeActor]) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        actors[0].facts_or_error = replace(FACTS, pid=process.pid)
        actors[1].facts_or_error = replace(FACTS, pid=process.pid, node_id="there")
        team.machine(MACHINE, MODEL)
        os.kill(process.pid, signal.SIGSTOP)

        team.kill()

        assert process.wait(10) == -signal.SIGKILL


class FakeClient:
    """An engine that has failed, and an order of events."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    async def failed(self) -> EngineError:
        return EngineError("rank 1 is gone")

    async def drain(self, timeout_s: float) -> bool:
        self.events.append("streams told")
        return True


async def test_a_failed_replica_ends_itself_once_its_streams_are_told(
    team: RayTeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    engine = ReplicaEngine(CONFIG)
    engine.others = team
    monkeypatch.setattr(replica_module, "FLUSH_S", 0.0)
    monkeypatch.setattr("ray.kill", lambda actor: events.append("rank killed"))
    monkeypatch.setattr("logging.shutdown", lambda: None)
    monkeypatch.setattr("os._exit", lambda code: events.append(f"exit {code}"))

    await engine._end_after_failure(FakeClient(events))  # type: ignore[arg-type]

    assert events == ["rank killed", "rank killed", "streams told", "exit 1"]


async def test_the_watching_of_ranks_ends_at_any_moment(
    team: RayTeam, actors: list[FakeActor]
) -> None:
    for worker in team.workers:
        worker.facts = FACTS
    async with nothing_left():
        for moment in range(8):
            actors[0].pinged, actors[1].pinged = Future(), Future()
            actors[0].pinged.set_exception(ActorDiedError())
            await cancelled(team.watch(lambda _error: None, 5.0), moment)


async def test_weights_change_at_all_ranks_and_the_first_error_is_raised(
    team: RayTeam, actors: list[FakeActor]
) -> None:
    await TeamWeights(team).call("discard", "new")
    actors[1].facts_or_error = make_task_error(ConfigError("no such file"))

    with pytest.raises(ConfigError, match="no such file"):
        await TeamWeights(team).call("install", "new")
