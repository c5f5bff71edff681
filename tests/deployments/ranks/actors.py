"""Actors of ranks without Ray, and teams over them."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from remora.configs.load import parse_args
from remora.deployments.ranks.team import RayTeam, Worker
from remora.deployments.ranks.worker import RankFacts
from remora.engine.protocols import AdapterFacts
from tests.engine.configured import MACHINE, MODEL
from tests.engine.fakes import make_plan

CONFIG = parse_args({"model": {"path": "m"}, "parallel": {"tp_size": 3, "rank_timeout_s": 0.1}})
PREPARED = AdapterFacts(max_rank=1, num_bytes=1, digest="d")
NO_PROCESS = 2**22 + 1  # more than Linux numbers
FACTS = RankFacts(pid=NO_PROCESS, node_id="here", host="gpu-7", machine=MACHINE, model=MODEL)
PLAN = make_plan(tp_size=3, step_timeout_s=5.0)


@dataclass(eq=False)
class Answer:
    """What calling an actor gives: to be waited for in a thread, or awaited."""

    value: Future[Any]

    def future(self) -> Future[Any]:
        return self.value

    def __await__(self) -> Any:
        return asyncio.wrap_future(self.value).__await__()


@dataclass
class FakeActor:
    """Answers at once unless `load` or `ping` are futures of the test."""

    facts_or_error: RankFacts | Exception = FACTS
    loaded: Future[Any] = field(default_factory=Future)
    prepared: AdapterFacts | Exception = PREPARED
    adapters: list[tuple[int, str]] = field(default_factory=list)
    pinged: Future[Any] = field(default_factory=Future)
    meetings: list[Any] = field(default_factory=list)
    has_left: bool = False

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *given: Answer(self._call(method, *given)))

    def _call(self, method: str, *given: Any) -> Future[Any]:
        if method == "load":
            self.meetings.append(given[1])
            return self.loaded
        if method == "leave":
            self.has_left = True
        if method == "ping":
            return self.pinged
        result: Any = self.facts_or_error
        if method == "prepare_adapter":
            self.adapters.append(given)
            result = self.prepared
        answer: Future[Any] = Future()
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)
        return answer


def make_task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("load", "a long traceback", cause)


def team_of(actors: list[FakeActor], monkeypatch: pytest.MonkeyPatch, **keys: Any) -> RayTeam:
    here = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr("ray.get_runtime_context", lambda: here)
    monkeypatch.setattr("ray.kill", lambda actor: None)
    workers = [Worker(rank, f"w{rank}", actor) for rank, actor in enumerate(actors, start=1)]
    parallel = CONFIG.parallel.model_copy(update=keys)
    return RayTeam(CONFIG.model_copy(update={"parallel": parallel}), workers)


@dataclass
class Replacing:
    """A team whose ranks can be replaced, and the actors that were started for it."""

    team: RayTeam
    killed: list[FakeActor] = field(default_factory=list)
    started: list[FakeActor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def start(self, rank: int, suffix: str) -> Worker:
        self.started.append(FakeActor())
        self.names.append(f"w{rank}{suffix}")
        return Worker(rank, self.names[-1], self.started[-1], is_here=True)
