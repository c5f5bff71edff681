"""Disturb servers at random, and judge every request: `make chaos MINUTES=4 SEED=1`.

The clients and the faults follow from the seed; when exactly a fault meets a request does not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.deployments.lifecycle.server import Server, kill
from tests.endurance import inflict
from tests.endurance.chaos_report import Report, Trial, as_text, write_json
from tests.endurance.cut_proxy import CutProxy
from tests.endurance.driver_loss import lose_driver
from tests.endurance.oracle import Oracle, Outage
from tests.endurance.schedule import SEVERED, Fault, Kind, faults
from tests.endurance.session import (
    Clients,
    census,
    held_at_idle,
    keep_changing_adapters,
    learn,
    output_in,
    owners,
    pids_of,
    scratch,
    serving,
    stop_and_list_leftovers,
)
from tests.endurance.topologies import TOPOLOGIES, Checkpoints, Topology

NUM_CLIENTS = 6
HEAL_TIMEOUT_S = 90.0
LULL_S = 0.5
DISTURBED = tuple(name for name in TOPOLOGIES if name != "soak")
DRIVER = "driver"


@dataclass(eq=False)
class _Run:
    """One topology under faults."""

    topology: Topology
    server: Server
    cuts: CutProxy
    clients: Clients
    usual: Mapping[str, int]
    outages: list[Outage] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)

    async def inflict(self, fault: Fault) -> None:
        """Do a fault, and wait until the server has recovered."""
        pid = self._victim(fault)
        trial = Trial(fault, pid, self.clients.num_running, time.monotonic())
        self.trials.append(trial)
        outage = Outage(
            what=fault.name,
            reach=fault.reach,
            began_at=trial.began_at,
            pids=frozenset() if pid is None else frozenset({pid}),
            is_resumed=self.topology.is_resumed
            and fault.target is not None
            and fault.target.kind == "replica",
        )
        self.outages.append(outage)
        answer = asyncio.create_task(self._first_answer(outage.began_at))
        await self._do(fault, pid, outage, trial)
        if trial.is_void:
            self.outages.remove(outage)  # it explains nothing
        killed = pid if fault.kind is Kind.KILL else None
        trial.healed_s = await self._heal(outage.began_at, killed)
        trial.answered_s = await answer
        await asyncio.sleep(LULL_S)
        outage.ended_at = time.monotonic()

    def _victim(self, fault: Fault) -> int | None:
        if fault.target is None:
            return None
        found = pids_of(self.server, fault.target.kind)
        return found[fault.pick % len(found)] if found else None

    async def _do(self, fault: Fault, pid: int | None, outage: Outage, trial: Trial) -> None:
        if fault.kind is Kind.CUT:
            assert fault.how is not None
            outage.rids = self.cuts.cut(fault.how, lambda place: (place + fault.pick) % 2 == 0)
            trial.note, trial.is_void = f"{len(outage.rids)} connections", not outage.rids
        elif fault.kind is Kind.STALL:
            await self.cuts.stall(fault.seconds)
        elif pid is None:
            trial.note, trial.is_void = "there was no such process", True
        elif fault.kind is Kind.KILL:
            kill(pid, signal.SIGKILL)
        elif fault.kind in (Kind.PAUSE, Kind.STOP):
            async with inflict.stopped(pid, fault.seconds):
                pass
        elif fault.kind is Kind.SEVER:
            front = "haproxy" if self.topology.proxy == "haproxy" else "serve proxy"
            kinds = (*SEVERED, front)
            family = {member for kind in kinds for member in pids_of(self.server, kind)}
            number = inflict.sever(pid, frozenset(family))
            trial.note, trial.is_void = f"{number} sockets", number == 0
        else:
            kind, value = resource.RLIMIT_FSIZE, 0
            if fault.kind is Kind.DESCRIPTORS:
                kind, value = resource.RLIMIT_NOFILE, inflict.num_descriptors(pid)
            async with inflict.limited(pid, kind, value):
                await asyncio.sleep(fault.seconds)

    async def _heal(self, since: float, killed: int | None) -> float | None:
        """Return the seconds until all processes of before run again; None if they never do."""

        def is_healed() -> bool:
            return (
                (killed is None or killed not in self._pids())
                and census(self.server) == self.usual
                and self.server.is_settled()
            )

        with suppress(TimeoutError):
            await asyncio.to_thread(self.server.until, is_healed, HEAL_TIMEOUT_S)
            return time.monotonic() - since
        return None

    def _pids(self) -> set[int]:
        return {pid for kind in self.usual for pid in pids_of(self.server, kind)}

    async def _first_answer(self, since: float) -> float | None:
        """Return the seconds until a request that began after the fault is answered."""
        body = {"model": "m", "prompt": "a", "max_tokens": 1}
        async with httpx.AsyncClient(timeout=10) as client:
            while time.monotonic() < since + HEAL_TIMEOUT_S:
                with suppress(httpx.TransportError):
                    answer = await client.post(f"{self.cuts.url}/v1/completions", json=body)
                    if answer.status_code == 200:
                        return time.monotonic() - since
                await asyncio.sleep(0.05)
        return None


async def disturb(
    topology: Topology,
    checkpoints: Checkpoints,
    folder: Path,
    *,
    seed: int,
    seconds: float,
    max_faults: int | None = None,
) -> Report:
    """Run a topology under faults and judge what its clients saw."""
    asks = topology.asks()
    async with serving(topology, checkpoints, folder) as server:
        answers = await learn(server.url, asks)
        port = server.config["http_options"]["port"]
        async with CutProxy(port) as cuts, Clients(cuts.url, "r") as clients:
            run = _Run(topology, server, cuts, clients, census(server))
            over = asyncio.Event()
            work = [
                asyncio.create_task(clients.repeat(asks, random.Random(f"{seed} {number}"), over))
                for number in range(NUM_CLIENTS)
            ]
            if topology.has_adapters:
                changes = keep_changing_adapters(cuts.url, checkpoints, over)
                work.append(asyncio.create_task(changes))
            deadline = time.monotonic() + seconds
            for fault in faults(seed, topology):
                await asyncio.sleep(fault.gap_s)
                if time.monotonic() > deadline or fault.number == max_faults:
                    break
                await run.inflict(fault)
                if run.trials[-1].healed_s is None:
                    break  # later faults would say nothing
            over.set()
            await asyncio.gather(*work)
        try:
            held, others = await held_at_idle(server.url), []
        except httpx.TransportError as error:
            held, others = {}, [f"no answer after all faults: {error!r}"]
        left = await asyncio.to_thread(stop_and_list_leftovers, server, folder)
        output = server.says()
    by_name = {ask.name: ask for ask in asks}
    oracle = Oracle(by_name, answers, run.outages, owners(output))
    findings = [(seen, oracle.judge(seen)) for seen in clients.seen]
    return Report(
        topology=topology.name,
        seed=seed,
        trials=run.trials,
        findings=findings,
        bodies={name: ask.body for name, ask in by_name.items()},
        held=held,
        leftovers=left,
        output=output,
        others=others,
    )


def run(name: str, seed: int, seconds: float) -> Report:
    """Run a topology, or the loss of the driver, in a folder of its own."""
    with scratch() as folder:
        try:
            checkpoints = Checkpoints.make(folder)
            if name == DRIVER:
                return asyncio.run(lose_driver(TOPOLOGIES["one"], checkpoints, folder))
            work = disturb(TOPOLOGIES[name], checkpoints, folder, seed=seed, seconds=seconds)
            return asyncio.run(work)
        except Exception as error:  # the other topologies are to run all the same
            return Report.of_failure(name, seed, error, output_in(folder))


def main() -> None:
    """Run what the command line names; exit with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0, help="for each topology")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--topology", default="all", help=f"all, {DRIVER}, {', '.join(DISTURBED)}")
    parser.add_argument("--json", type=Path, default=Path("build/chaos.json"))
    given = parser.parse_args()
    names = [*DISTURBED, DRIVER] if given.topology == "all" else given.topology.split(",")
    reports = []
    for name in names:
        report = run(name, given.seed, 60 * given.minutes)
        reports.append(report)
        sys.stdout.write(as_text(report) + "\n")
        sys.stdout.flush()
        write_json(given.json, reports)
    sys.exit(any(report.faults for report in reports))


if __name__ == "__main__":
    main()
