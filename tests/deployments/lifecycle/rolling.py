"""Configuration changes under load: no stream may fail or be truncated."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.deployments.lifecycle.load import Load, Verdict
from tests.deployments.lifecycle.server import REPLICA, Server

KNOWN = range(6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The result of a change under load.

    peak_running:  maximum number of concurrent streams
    change_s:      seconds until Serve had applied the change
    failures:      one line for each stream that was not whole
    """

    num_streams: int
    peak_running: int
    change_s: float
    verdicts: Mapping[str, int]
    failures: list[str]
    num_kept: int


def _changed(config: Mapping[str, Any], change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(dict(config))
    change(changed["applications"][0])
    return changed


def with_seed(config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return a changed config that requires a restart of every replica."""
    return _changed(config, lambda app: app["args"]["engine"].update(random_seed=seed))


def with_resumption(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with a gateway that resumes streams on other replicas."""
    routing = {"gateway": "on", "resume_on_failure": True}
    return _changed(config, lambda app: app["args"].update(routing=routing))


def with_replicas(config: Mapping[str, Any], num_replicas: int) -> dict[str, Any]:
    """Return a config with another number of replicas."""
    deployment = {"name": "LLMServer", "num_replicas": num_replicas}
    return _changed(config, lambda app: app.update(deployments=[deployment]))


def with_user_config(config: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """Return a config with a new `user_config`."""
    deployment = {"name": "LLMServer", "user_config": sections or None}
    return _changed(config, lambda app: app.update(deployments=[deployment]))


async def change_under_load(
    server: Server, load: Load, config: Mapping[str, Any], *, num_streams: int, per_second: float
) -> Change:
    """Deploy `config` when half of the streams have begun; return when all is done."""
    before = server.pids(REPLICA)
    tasks: list[asyncio.Task[Any]] = []
    peak, change = 0, None
    for place in range(num_streams):
        tasks.append(asyncio.create_task(load.stream(KNOWN[place % len(KNOWN)])))
        if place == num_streams // 2:
            change = asyncio.create_task(asyncio.to_thread(_make, server, config, set(before)))
        peak = max(peak, len(load.running))
        await asyncio.sleep(1 / per_second)
    assert change is not None
    while not all(task.done() for task in tasks):
        peak = max(peak, len(load.running))
        await asyncio.sleep(0.1)
    return Change(
        num_streams=num_streams,
        peak_running=peak,
        change_s=await change,
        verdicts=load.verdicts(),
        failures=[
            f"{s.number} after {(s.ended_at or 0) - s.began_at:.1f} s: {s.status} {s.error}"
            for s in load.streams
            if s.verdict is not Verdict.WHOLE
        ],
        num_kept=len(set(before) & set(server.pids(REPLICA))),
    )


def _make(server: Server, config: Mapping[str, Any], before: set[int]) -> float:
    began = time.monotonic()
    server.deploy(config)

    def is_made() -> bool:
        return set(server.pids(REPLICA)) != before and server.is_settled()

    server.until(is_made, 300)
    return time.monotonic() - began
