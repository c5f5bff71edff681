"""The loss of what everything hangs on: a process of `remora serve` itself, or Ray's GCS.

The server must end within `MAX_END_S`, leave nothing, and start again on the same port.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]

from tests.deployments.lifecycle.leftovers import belongings
from tests.deployments.lifecycle.server import kill, running
from tests.endurance.chaos_report import Report
from tests.endurance.oracle import Oracle, Outage, Reach
from tests.endurance.processes import CHAIN, processes_of
from tests.endurance.session import Clients, list_leftovers, pids_of, stop_and_list_leftovers
from tests.endurance.session import learn as learn_answers
from tests.endurance.topologies import Checkpoints, Topology

MAX_END_S = 10.0
WAIT_S = 40.0
VICTIMS = (*CHAIN, "gcs")
UNDER_WAY_S = 1.0


async def lose_driver(topology: Topology, checkpoints: Checkpoints, folder: Path) -> Report:
    """Kill each victim while requests run; start the server again on its port each time."""
    asks = topology.asks()
    config = topology.config(checkpoints)
    report = Report(
        topology="driver",
        seed=0,
        trials=[],
        findings=[],
        bodies={ask.name: ask.body for ask in asks},
        held={},
        leftovers=[],
        output="",
    )
    findings = []
    for victim in VICTIMS:
        with running(config, folder, proxy=topology.proxy) as server:
            answers = await learn_answers(server.url, asks)
            pids = {pid for pid, _ in processes_of(server.process.pid)}
            found = belongings([server.process.pid])
            async with Clients(server.url, victim) as clients:
                work = [asyncio.create_task(clients.send(ask)) for ask in asks]
                await asyncio.sleep(UNDER_WAY_S)
                outage = Outage(what=f"{victim} killed", reach=Reach.ALL, began_at=time.monotonic())
                kill(pids_of(server, victim)[0], signal.SIGKILL)
                report.others += await _until_ended(victim, pids, server.process)
                await asyncio.gather(*work)
            left = await asyncio.to_thread(list_leftovers, found, server, folder)
            report.others += [f"{victim} killed, left: {name}" for name in left]
            report.output += server.says()[-5000:]
            _end(pids)
        oracle = Oracle({ask.name: ask for ask in asks}, answers, [outage])
        findings += [(seen, oracle.judge(seen)) for seen in clients.seen]
    report.findings = findings
    report.others += await _starts_again(topology, config, folder)
    return report


async def _until_ended(victim: str, pids: set[int], driver: subprocess.Popen[bytes]) -> list[str]:
    began = time.monotonic()
    while time.monotonic() < began + WAIT_S:
        driver.poll()  # reaps it
        if not any(_runs(pid) for pid in pids):
            break
        await asyncio.sleep(0.1)
    seconds = time.monotonic() - began
    if seconds > MAX_END_S:
        number = sum(_runs(pid) for pid in pids)
        return [f"{victim} killed: {number} processes run after {seconds:.1f} s"]
    return []


def _runs(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def _end(pids: set[int]) -> None:
    """End what a failed stop has left, so that the next case starts alone."""
    for pid in pids:
        kill(pid, signal.SIGKILL)


async def _starts_again(topology: Topology, config: dict[str, object], folder: Path) -> list[str]:
    body = {"model": "m", "prompt": "a", "max_tokens": 1}
    with running(config, folder, proxy=topology.proxy) as server:
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"{server.url}/v1/completions", json=body)
        left = await asyncio.to_thread(stop_and_list_leftovers, server, folder)
    wrong = [] if answer.status_code == 200 else [f"no answer after a new start: {answer.text}"]
    return [*wrong, *(f"left after the new start: {name}" for name in left)]
