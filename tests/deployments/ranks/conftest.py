"""Teams of two ranks without Ray."""

from __future__ import annotations

from dataclasses import replace

import pytest

from remora.deployments.ranks.team import RayTeam
from tests.deployments.ranks.actors import FACTS, FakeActor, Replacing, team_of


@pytest.fixture
def actors() -> list[FakeActor]:
    return [FakeActor(), FakeActor(replace(FACTS, host="gpu-8"))]


@pytest.fixture
def team(actors: list[FakeActor], monkeypatch: pytest.MonkeyPatch) -> RayTeam:
    return team_of(actors, monkeypatch)


@pytest.fixture
def replacing(team: RayTeam, monkeypatch: pytest.MonkeyPatch) -> Replacing:
    found = Replacing(team)
    team.start = found.start
    monkeypatch.setattr("ray.kill", found.killed.append)
    monkeypatch.setattr("psutil.Process.kill", lambda _process: None)  # a test's own process, below
    return found
