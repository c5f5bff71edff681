"""Serve mixed traffic for a long time, and look for growth, drift and wrong answers.

`make soak MINUTES=60 SEED=1`. Requests follow from the seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.endurance.oracle import Oracle, count
from tests.endurance.processes import usages_of
from tests.endurance.session import (
    Clients,
    held_at_idle,
    keep_changing_adapters,
    learn,
    scratch,
    serving,
    stop_and_list_leftovers,
)
from tests.endurance.soak_verdicts import Sample, Soak, as_data, as_text
from tests.endurance.topologies import TOPOLOGIES, Checkpoints, Topology
from tests.endurance.traffic import Ask, bad_asks

NUM_CLIENTS = 3
LEAVING = 0.15  # share of requests whose client leaves
SAMPLE_PERIOD_S = 5.0
CANARY_PAUSE_S = 0.2
# Between two requests of a client, at most. Latencies of a busy server are those of its queue.
PAUSE_S = 2.0
WARM_UP_S = 20.0


async def soak(
    topology: Topology, checkpoints: Checkpoints, folder: Path, *, seed: int, seconds: float
) -> Soak:
    """Run the traffic for some time and return what was seen."""
    known = topology.asks()
    canaries = [ask for ask in known if not ask.may_be_missing]
    asks = [*known, *bad_asks()]
    async with serving(topology, checkpoints, folder) as server:
        answers = await learn(server.url, known)
        over = asyncio.Event()
        async with Clients(server.url, "mix") as mix, Clients(server.url, "canary") as canary:
            work = [
                asyncio.create_task(
                    mix.repeat(
                        asks,
                        random.Random(f"{seed} {number}"),
                        over,
                        leaving=LEAVING,
                        pause_s=PAUSE_S,
                    )
                )
                for number in range(NUM_CLIENTS)
            ]
            work.append(asyncio.create_task(keep_changing_adapters(server.url, checkpoints, over)))
            await asyncio.sleep(min(WARM_UP_S, seconds / 10))
            began = time.monotonic()
            work.append(asyncio.create_task(_keep_asking(canary, canaries, over)))
            samples = await _sample(server.process.pid, began, seconds)
            over.set()
            await asyncio.gather(*work)
        held = await held_at_idle(server.url)
        left = await asyncio.to_thread(stop_and_list_leftovers, server, folder)
    oracle = Oracle({ask.name: ask for ask in asks}, answers)
    findings = [(seen, oracle.judge(seen)) for seen in [*mix.seen, *canary.seen]]
    return Soak(
        seed=seed,
        seconds=seconds,
        samples=samples,
        latencies=[(seen.began_at - began, seen.ended_at - seen.began_at) for seen in canary.seen],
        verdicts=count(finding for _, finding in findings),
        num_canaries=len(canary.seen),
        wrong=[
            f"{finding.verdict}: {seen.name} {seen.rid}: {finding.reason}"
            for seen, finding in findings
            if not finding.is_right
        ],
        held=held,
        leftovers=left,
    )


async def _keep_asking(canary: Clients, canaries: Sequence[Ask], over: asyncio.Event) -> None:
    while not over.is_set():
        for ask in canaries:
            await canary.send(ask)
            await asyncio.sleep(CANARY_PAUSE_S)


async def _sample(driver: int, began: float, seconds: float) -> list[Sample]:
    samples = []
    while (at_s := time.monotonic() - began) < seconds:
        samples.append(Sample(at_s, await asyncio.to_thread(usages_of, driver)))
        await asyncio.sleep(SAMPLE_PERIOD_S)
    return samples


def main() -> None:
    """Run what the command line names; exit with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--json", type=Path, default=Path("build/soak.json"))
    given = parser.parse_args()
    with scratch() as folder:
        checkpoints = Checkpoints.make(folder)
        found = asyncio.run(
            soak(
                TOPOLOGIES["soak"],
                checkpoints,
                folder,
                seed=given.seed,
                seconds=60 * given.minutes,
            )
        )
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(as_data(found), indent=1))
    sys.stdout.write(as_text(found))
    sys.exit(bool(found.faults))


if __name__ == "__main__":
    main()
