"""Measure how long a replica of three ranks answers nothing after `kill -9` of one of them.

    python -m tests.benchmarks.ranks.lost_rank [--streams 6] [--rounds 2] [--keep-output FILE]

Each round kills a rank other than 0 and then rank 0. `answered`: seconds until a request that was
sent after the kill has its answer; `healed`: until as many processes as before run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import httpx

from tests.deployments.lifecycle.load import Load
from tests.deployments.lifecycle.server import REPLICA, WORKER, Server, running
from tests.endurance.topologies import TOPOLOGIES, Checkpoints

NUM_TOKENS = 60
TIMEOUT_S = 120.0
PAUSE_S = 5.0


async def answered(url: str) -> float:
    """Ask until there is an answer; return the seconds."""
    began = time.monotonic()
    body = {"model": "m", "prompt": "a", "max_tokens": 1}
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        while time.monotonic() < began + TIMEOUT_S:
            with suppress(httpx.TransportError):
                answer = await client.post(f"{url}/v1/completions", json=body)
                if answer.status_code == 200:
                    return time.monotonic() - began
            await asyncio.sleep(0.05)
    raise TimeoutError


async def lose(server: Server, title: str) -> tuple[float, float]:
    """Kill a rank; return when requests were answered and when it was replaced."""
    before = len(server.pids(WORKER)), len(server.pids(REPLICA))
    victim = server.pids(title)[-1]
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} kill {title}\n")
    os.kill(victim, signal.SIGKILL)
    asking = asyncio.create_task(answered(server.url))

    def is_healed() -> bool:
        now = len(server.pids(WORKER)), len(server.pids(REPLICA))
        return now == before and victim not in server.pids(title) and server.is_settled()

    healed_s = await asyncio.to_thread(server.until, is_healed, TIMEOUT_S)
    return await asking, healed_s


async def measure(server: Server, num_streams: int, rounds: int) -> None:
    """Print a row for each kill."""
    async with Load(server.url, NUM_TOKENS) as load:
        await load.learn(range(num_streams))
        over = asyncio.Event()
        work = asyncio.create_task(load.keep_up(range(num_streams), over))
        for _ in range(rounds):
            for title in (WORKER, REPLICA):
                await asyncio.sleep(PAUSE_S)
                load.streams.clear()
                answered_s, healed_s = await lose(server, title)
                verdicts = ", ".join(f"{n} {kind}" for kind, n in load.verdicts().items())
                print(f"| {title} | {answered_s:.1f} | {healed_s:.1f} | {verdicts} |", flush=True)
        over.set()
        await work


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--keep-output", type=Path)
    args = parser.parse_args()
    print("| killed | answered s | healed s | streams |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        topology = TOPOLOGIES["ranks"]
        config = topology.config(Checkpoints.make(Path(folder)))
        with running(config, Path(folder), proxy=topology.proxy) as server:
            asyncio.run(measure(server, args.streams, args.rounds))
            output = server.says()
    if args.keep_output is not None:
        args.keep_output.write_text(output)


if __name__ == "__main__":
    main()
