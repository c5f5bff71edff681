"""Ranks that take the places of lost ones, and the replica that goes on with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from remora.configs.errors import EngineError, RankLost, StepTimeout
from remora.deployments.ranks.replica import ReplicaEngine
from remora.deployments.ranks.team import Worker
from remora.engine.protocols import AdapterFacts
from tests.deployments.ranks.actors import CONFIG, FACTS, PLAN, FakeActor, Replacing
from tests.engine.configured import MACHINE, MODEL


def test_ranks_are_replaced_by_others_that_start_up_like_them(
    replacing: Replacing, actors: list[FakeActor]
) -> None:
    team = replacing.team
    team.machine(MACHINE, MODEL)
    team.load(PLAN)
    assert team.can_replace

    team.replace(team.all_ranks)
    team.machine(MACHINE, MODEL)
    team.load(PLAN)
    for actor in replacing.started:
        actor.loaded.set_result(None)
    team.ready()

    assert replacing.killed == actors
    assert replacing.names == ["w1:1", "w2:1"]
    (old,), (new,) = actors[0].meetings, replacing.started[0].meetings
    assert not Path(old.steps.path).exists()
    assert Path(new.steps.path).exists()
    team.replace(team.all_ranks)
    assert replacing.killed == [*actors, *replacing.started[:2]]
    assert replacing.names[2:] == ["w1:2", "w2:2"]
    team.kill()
    assert not team.can_replace


@pytest.mark.parametrize(
    ("failure", "running", "lost"),
    [
        (RankLost("its process has ended", 1), {1, 2}, {1}),
        (RankLost("its process has ended", 1), {1}, {1, 2}),
        (RankLost("it has lost another"), {1, 2}, {1, 2}),
        (StepTimeout("9 s"), {1, 2}, {1, 2}),
        (StepTimeout("9 s"), {1}, {2}),
    ],
)
def test_only_lost_ranks_are_killed(
    failure: EngineError,
    running: set[int],
    lost: set[int],
    replacing: Replacing,
    actors: list[FakeActor],
) -> None:
    team = replacing.team
    team.machine(MACHINE, MODEL)
    for worker in team.workers:
        worker.process = psutil.Process() if worker.rank in running else None

    assert team.lost_ranks(failure) == lost
    team.replace(team.lost_ranks(failure))

    assert replacing.killed == [actors[rank - 1] for rank in sorted(lost)]
    assert [actor.has_left for actor in actors] == [rank not in lost for rank in (1, 2)]
    assert {worker.rank for worker in team.workers} == {1, 2}


def test_ranks_of_other_nodes_are_not_replaced(
    replacing: Replacing, actors: list[FakeActor]
) -> None:
    actors[1].facts_or_error = replace(FACTS, node_id="there")
    replacing.team.machine(MACHINE, MODEL)

    assert not replacing.team.can_replace


async def test_ranks_that_take_places_load_the_adapters_again(replacing: Replacing) -> None:
    team = replacing.team
    for lora_id in (1, 2):
        await asyncio.gather(*team.prepare_adapter(lora_id, f"/adapters/{lora_id}"))
    await team.discard_adapter(1)

    team.replace(frozenset({1}))
    team.machine(MACHINE, MODEL)
    team.load(PLAN)

    kept, new = team.workers[1].actor, replacing.started[0]
    assert new.adapters == [(2, "/adapters/2")]
    assert kept.adapters == [(1, "/adapters/1"), (2, "/adapters/2"), (2, "/adapters/2")]
    team.kill()


async def test_an_adapter_that_has_changed_since_ends_the_replacement(
    replacing: Replacing,
) -> None:
    team = replacing.team
    await asyncio.gather(*team.prepare_adapter(1, "/adapters/1"))
    changed = AdapterFacts(max_rank=1, num_bytes=1, digest="other")
    team.start = lambda rank, _suffix: Worker(rank, "w", FakeActor(prepared=changed))
    team.replace(team.all_ranks)
    await asyncio.to_thread(team.machine, MACHINE, MODEL)
    team.load(PLAN)
    for worker in team.workers:
        worker.actor.loaded.set_result(None)
    with pytest.raises(EngineError, match=r"rank 1 on .*: the files of /adapters/1 have"):
        await asyncio.to_thread(team.ready)
    team.kill()


class RepairedClient:
    """A client whose engine works again once it is restarted."""

    def __init__(self) -> None:
        self.steps_total = 1
        self.heard: list[str] = []
        self.repair: Any = None

    def repair_with(self, repair: Any) -> None:
        self.repair = repair

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(steps_total=self.steps_total)

    def fail(self, error: EngineError) -> None:
        self.heard.append(str(error))

    async def restart(self, repair: Callable[[], Any], *, stop_s: float) -> Any:
        assert stop_s > 0
        return await asyncio.to_thread(repair)

    def check_health(self) -> None:
        pass


class FakeRenewal:
    """Meets the new ranks; one of them is lost at once if `failure` is set."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.failure: EngineError | None = None
        self.errors: list[EngineError] = []

    def run(self) -> FakeRenewal:
        self.num_runs += 1
        if self.errors:
            raise self.errors.pop(0)
        return self

    def on_failure(self, callback: Callable[[EngineError], object]) -> None:
        if self.failure is not None:
            callback(self.failure)


@dataclass
class RepairedReplica:
    engine: ReplicaEngine
    client: RepairedClient
    renewal: FakeRenewal


@pytest.fixture
async def repaired(replacing: Replacing) -> AsyncIterator[RepairedReplica]:
    engine, client, renewal = ReplicaEngine(CONFIG), RepairedClient(), FakeRenewal()
    replacing.team.machine(MACHINE, MODEL)
    for worker in replacing.team.workers:
        worker.actor.pinged.set_result(None)
    engine.others, engine._client = replacing.team, client  # type: ignore[assignment]
    engine._watch(client, renewal)  # type: ignore[arg-type]
    yield RepairedReplica(engine, client, renewal)
    for task in engine._watchers():
        task.cancel()


async def test_a_replica_that_has_lost_ranks_goes_on_with_others(
    repaired: RepairedReplica, replacing: Replacing
) -> None:
    repaired.renewal.failure = RankLost("Rank 2 has failed again")

    await repaired.client.repair(RankLost("Rank 1 has failed"))

    assert len(replacing.killed) == len(replacing.started) == 2
    assert repaired.renewal.num_runs == 1
    assert repaired.client.heard == ["Rank 2 has failed again"]
    repaired.engine.check()
    assert [task.get_name() for task in repaired.engine._watchers()] == ["remora-watch-ranks"]


@pytest.mark.parametrize(
    ("failure", "is_replaced"),
    [
        (RankLost("Rank 1 has failed"), True),
        (StepTimeout("A step has been running for 9 s"), True),
        (EngineError("A step failed: no memory"), False),
    ],
)
async def test_only_lost_ranks_are_replaced(
    failure: EngineError, is_replaced: bool, repaired: RepairedReplica, replacing: Replacing
) -> None:
    with suppress(EngineError):
        await repaired.client.repair(failure)

    assert bool(replacing.started) is is_replaced


async def test_all_ranks_are_replaced_if_the_others_do_not_meet_the_new_one(
    repaired: RepairedReplica, replacing: Replacing
) -> None:
    for worker in replacing.team.workers:
        worker.process = psutil.Process()
    repaired.renewal.errors = [EngineError("rank 2 has failed")]

    await repaired.client.repair(RankLost("Rank 1 has failed", 1))

    assert replacing.names == ["w1:1", "w1:2", "w2:2"]
    assert repaired.renewal.num_runs == 2
    repaired.renewal.errors = [EngineError("no place for rank 1")]
    repaired.client.steps_total += 1
    with pytest.raises(EngineError, match="no place for rank 1"):
        await repaired.client.repair(RankLost("of all ranks"))


async def test_ranks_that_are_lost_before_their_first_step_are_not_replaced(
    repaired: RepairedReplica, replacing: Replacing
) -> None:
    await repaired.client.repair(RankLost("once"))
    with pytest.raises(RankLost, match="twice"):
        await repaired.client.repair(RankLost("twice"))
    repaired.client.steps_total += 1
    await repaired.client.repair(RankLost("thrice"))

    assert repaired.renewal.num_runs == 2
